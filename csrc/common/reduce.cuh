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

// Transposes four words of four neighbouring lanes: lane i of them gets the words i of all, in the order of lanes.
SPARGE_DEVICE void transpose_quad(u32 (&word)[4], i32 quad_lane) {
  const bool upper = quad_lane & 2, odd = quad_lane & 1;
  u32 own[2], other[2];  // words of this lane and of the one that differs in bit 1, both of this lane's half
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    own[i] = upper ? word[i + 2] : word[i];
    other[i] = __shfl_xor_sync(kFullWarp, upper ? word[i] : word[i + 2], 2);
  }
  const u32 from_own = __shfl_xor_sync(kFullWarp, odd ? own[0] : own[1], 1),
            from_other = __shfl_xor_sync(kFullWarp, odd ? other[0] : other[1], 1);
  const u32 even_lane = odd ? from_own : own[0], odd_lane = odd ? own[1] : from_own;
  const u32 even_other = odd ? from_other : other[0], odd_other = odd ? other[1] : from_other;
  word[0] = upper ? even_other : even_lane;
  word[1] = upper ? odd_other : odd_lane;
  word[2] = upper ? even_lane : even_other;
  word[3] = upper ? odd_lane : odd_other;
}

SPARGE_DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(kFullWarp, value); }

SPARGE_DEVICE u64 warp_sum(u64 value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

}  // namespace sparge
