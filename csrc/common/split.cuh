// SPDX-License-Identifier: Apache-2.0
// Products of float32 numbers on tensor cores: each number as a sum of two TF32, three products of four.
// What is left out is 2^-22 of a term, next to which float32 sums of head_dim terms round as much.
#pragma once

#include "../ptx/mma.cuh"
#include "config.cuh"

namespace sparge {

struct Split {
  u32 high, low;
};
SPARGE_DEVICE Split split(float x) {
  const u32 high = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;  // 11 bits; the tensor cores read no more of `low` either
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// d += a b, where a holds rows of 16 vectors and b eight columns.
SPARGE_DEVICE void multiply_add(float (&d)[4], const u32 (&high)[4], const u32 (&low)[4], const Split& b0, const Split& b1) {
  ptx::mma_m16n8k8_tf32(d, low, b0.high, b1.high);
  ptx::mma_m16n8k8_tf32(d, high, b0.low, b1.low);
  ptx::mma_m16n8k8_tf32(d, high, b0.high, b1.high);
}
SPARGE_DEVICE void multiply_add(float (&d)[4], const Split (&a)[4], const Split& b0, const Split& b1) {
  const u32 high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const u32 low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  multiply_add(d, high, low, b0, b1);
}

}  // namespace sparge
