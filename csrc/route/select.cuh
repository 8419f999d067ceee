// SPDX-License-Identifier: Apache-2.0
// Keep the largest scores whose inclusive cumulative weight stays within a target: with weight 1 that is top-k, with
// weight softmax it is the cumulative-mass rule. No sort: a bisection over the bits of the score, one warp a row.
//
// Weights are integers (mass in units of 2^-31 of the largest), so sums are exact and their order never matters.
// Tried: nothing faster yet. 32 passes over shared memory cost about 45 us at the Mochi shape (prediction).
#pragma once

#include "../common/reduce.cuh"
#include "score.cuh"

namespace sparge::route {

constexpr float kMassUnit = 2147483648.0f;

struct Unit {
  using Sum = u32;
  SPARGE_DEVICE u32 operator()(u32) const { return 1; }
};
struct Mass {
  using Sum = u64;
  float highest;
  SPARGE_DEVICE u64 operator()(u32 key) const { return static_cast<u64>(expf(unsortable(key) - highest) * kMassUnit); }
};

// Keys above `threshold` are kept, and the first `ties` keys equal to it in ascending order of index.
struct Cut {
  u32 threshold;
  u64 ties;
};

// The one that keeps more.
SPARGE_DEVICE Cut lower(const Cut& a, const Cut& b) {
  if (a.threshold != b.threshold) return a.threshold < b.threshold ? a : b;
  return a.ties > b.ties ? a : b;
}

template <typename Weight>
SPARGE_DEVICE u64 weight_from(const u32* keys, i32 count, u32 least, const Weight& weight) {
  typename Weight::Sum sum = 0;
#pragma unroll 4
  for (int j = threadIdx.x % kWarpSize; j < count; j += kWarpSize)
    if (keys[j] >= least) sum += weight(keys[j]);
  return warp_sum(sum);
}

template <typename Weight>
SPARGE_DEVICE Cut cut_at(const u32* keys, i32 count, u64 target, const Weight& weight) {
  if (weight_from(keys, count, 1, weight) <= target) return {0, 0};
  u32 threshold = 0;  // the largest key whose inclusive weight passes the target
  for (int bit = 31; bit >= 0; --bit) {
    const u32 candidate = threshold | 1u << bit;
    if (weight_from(keys, count, candidate, weight) > target) threshold = candidate;
  }
  const u64 above = threshold == 0xFFFFFFFFu ? 0 : weight_from(keys, count, threshold + 1, weight);
  const u64 each = weight(threshold);
  const u64 ties = each ? (target - above) / each : count;
  return {threshold, above == 0 && ties == 0 ? 1 : ties};  // at least one block
}

}  // namespace sparge::route
