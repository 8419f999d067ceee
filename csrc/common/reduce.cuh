// SPDX-License-Identifier: Apache-2.0
// Butterfly reductions among lanes whose numbers differ in the bits kFirst .. kLast/2 of the lane index.
#pragma once

#include "../ptx/special.cuh"
#include "types.cuh"

namespace sparge {

template <int kFirst, int kLast>
SPARGE_DEVICE float lane_sum(float value) {
#pragma unroll
  for (int step = kFirst; step < kLast; step *= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

template <int kFirst, int kLast>
SPARGE_DEVICE float lane_max(float value) {
#pragma unroll
  for (int step = kFirst; step < kLast; step *= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// NaN where one of the lanes has a NaN.
template <int kFirst, int kLast>
SPARGE_DEVICE float lane_max_or_nan(float value) {
#pragma unroll
  for (int step = kFirst; step < kLast; step *= 2) value = ptx::max_or_nan(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

template <int kFirst, int kLast>
SPARGE_DEVICE float lane_min(float value) {
#pragma unroll
  for (int step = kFirst; step < kLast; step *= 2) value = fminf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// Two sums over two lanes that differ in the bit `step`. The lane with that bit gets the second.
SPARGE_DEVICE float lane_sum_of_two(float first, float second, i32 lane, int step) {
  const bool upper = lane & step;
  return (upper ? second : first) + __shfl_xor_sync(kFullWarp, upper ? first : second, step);
}

// Eight sums over eight lanes that differ in bits kFirst, 2 kFirst and 4 kFirst. Each lane gets one: 7 shuffles instead of 24.
template <int kFirst>
SPARGE_DEVICE float lane_sum_of_eight(const float (&x)[8], i32 lane) {
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = lane_sum_of_two(x[i], x[i + 4], lane, kFirst);
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = lane_sum_of_two(four[i], four[i + 2], lane, 2 * kFirst);
  return lane_sum_of_two(two[0], two[1], lane, 4 * kFirst);
}

// Which of the eight sums a lane gets.
template <int kFirst>
SPARGE_DEVICE i32 lane_channel(i32 lane) {
  return (lane & kFirst ? 4 : 0) + (lane & 2 * kFirst ? 2 : 0) + (lane & 4 * kFirst ? 1 : 0);
}

SPARGE_DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(kFullWarp, value); }

SPARGE_DEVICE u64 warp_sum(u64 value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

}  // namespace sparge
