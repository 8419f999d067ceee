// SPDX-License-Identifier: Apache-2.0
// The order of keys inside a V tile.
//
// Tiles of bytes permute the keys inside each group of 16, so that the accumulator fragment of QK is, value for value,
// the A fragment of PV: position 4t + 2i + c holds key 8i + 2t + c (t < 4, i < 2, c < 2).
#pragma once

#include "../common/config.cuh"

namespace sparge::quantize {

SPARGE_DEVICE constexpr i32 key_at(i32 position) {
  if constexpr (value_bytes(kElement) != 1) return position;
  return (position & ~15) + 8 * ((position >> 1) & 1) + 2 * ((position >> 2) & 3) + (position & 1);
}

SPARGE_DEVICE constexpr i32 position_of(i32 key) {
  if constexpr (value_bytes(kElement) != 1) return key;
  return (key & ~15) + 4 * ((key >> 1) & 3) + 2 * ((key >> 3) & 1) + (key & 1);
}

}  // namespace sparge::quantize
