// SPDX-License-Identifier: Apache-2.0
// Butterfly reductions among lanes whose numbers differ in the bits kFirst .. kLast/2 of the lane index.
#pragma once

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

template <int kFirst, int kLast>
SPARGE_DEVICE float lane_min(float value) {
#pragma unroll
  for (int step = kFirst; step < kLast; step *= 2) value = fminf(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

SPARGE_DEVICE u32 warp_sum(u32 value) { return __reduce_add_sync(kFullWarp, value); }

SPARGE_DEVICE u64 warp_sum(u64 value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

}  // namespace sparge
