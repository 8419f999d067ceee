// SPDX-License-Identifier: Apache-2.0
// Where a 16-byte chunk of a tile row lives, so that eight rows read at one chunk hit 32 banks.
//
// Rows of 128 bytes and more: chunk ^= row mod 8. Rows of 64 bytes: two rows share a 128-byte line, so
// chunk ^= (row / 2) mod 4. These are also the tensor cores' 128-byte and 64-byte swizzles (ptx/wgmma.cuh).
#pragma once

#include "types.cuh"

namespace sparge {

template <int kRowBytes>
SPARGE_DEVICE u32 tile_offset(u32 row, u32 chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128 || kRowBytes == 256, "tile rows are 64, 128 or 256 bytes");
  const u32 mixed = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3u) : chunk ^ (row & 7u);
  return row * kRowBytes + mixed * 16u;
}

}  // namespace sparge
