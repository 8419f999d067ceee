// SPDX-License-Identifier: Apache-2.0
// INT8 levels of a row or block, from its largest magnitude.
#pragma once

#include "../ptx/convert.cuh"
#include "types.cuh"

namespace sparge {

// Rows and blocks whose largest magnitude is at most this count as zeros.
constexpr float kLeastAmax = kZeroScale * kInt8Levels;

// NaN where the largest magnitude is NaN or infinite.
SPARGE_DEVICE float int8_scale(float amax) { return (amax > kLeastAmax ? amax / kInt8Levels : kZeroScale) + (amax - amax); }
SPARGE_DEVICE float int8_inverse_scale(float amax) { return amax > kLeastAmax ? kInt8Levels / amax : 1.0f; }

// Level of x. Adding 1.5 x 2^23 rounds to the nearest even, like the conversion to an integer, which has a quarter
// of the throughput. The low byte is the level.
SPARGE_DEVICE u32 int8_level(float x, float inverse_scale) {
  return __float_as_uint(__fadd_rn(__fmul_rn(x, inverse_scale), 0x1.8p23f));
}

// Levels of four neighbouring values.
SPARGE_DEVICE u32 pack_int8(const float* x, float inverse_scale) {
  u32 level[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) level[i] = int8_level(x[i], inverse_scale);
  return __byte_perm(__byte_perm(level[0], level[1], 0x0040), __byte_perm(level[2], level[3], 0x0040), 0x5410);
}

}  // namespace sparge
