// SPDX-License-Identifier: Apache-2.0
// INT8 levels of a row or block, from its largest magnitude.
#pragma once

#include "../ptx/convert.cuh"
#include "types.cuh"

namespace sparge {

SPARGE_DEVICE float int8_scale(float amax) { return amax > 0.0f ? amax / kKeyLevels : kZeroScale; }
SPARGE_DEVICE float int8_inverse_scale(float amax) { return amax > 0.0f ? kKeyLevels / amax : 1.0f; }

// Four neighbouring values.
SPARGE_DEVICE u32 pack_int8(const float* x, float inverse_scale) {
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed |= (ptx::round_to_int(x[i] * inverse_scale) & 0xFF) << (8 * i);
  return packed;
}

}  // namespace sparge
