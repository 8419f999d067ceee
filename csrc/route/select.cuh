// SPDX-License-Identifier: Apache-2.0
// Keeps the largest scores whose inclusive cumulative weight stays within a target. With weight 1 that is top-k, with weight
// softmax the cumulative-mass rule. No sort: one warp a row narrows the range in which the threshold lies, by value, three probes
// a pass, until 32 keys are left, one a lane.
//
// Weights are integers (mass in units of 2^-31 of the largest), so sums are exact and their order never matters.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/count.cuh"
#include "score.cuh"

namespace sparge::route {

constexpr float kMassUnit = 2147483648.0f;

struct Unit {
  static constexpr bool kCounts = true;
  SPARGE_DEVICE u64 operator()(u32) const { return 1; }
};
struct Mass {
  static constexpr bool kCounts = false;
  float highest;
  SPARGE_DEVICE u64 operator()(u32 key) const { return static_cast<u64>(expf(unsortable(key) - highest) * kMassUnit); }
};

// Kept are keys above `threshold`, and the first `ties` keys equal to it, in ascending order of index. Where all are kept, ties
// is 0 and the threshold lies below them.
struct Cut {
  u32 threshold;
  u64 ties;
};

// Range and number of the ranked keys, and number of the forced ones.
struct Range {
  u32 lowest, highest, number, forced;
};

// Mass of the ranked keys.
SPARGE_DEVICE u64 total_mass(const u32* keys, i32 count, const Mass& mass) {
  u64 sum = 0;
#pragma unroll 4
  for (int j = threadIdx.x % kWarpSize; j < count; j += kWarpSize)
    if (const u32 key = keys[j]; key >= kLeastRanked) sum += mass(key);
  return warp_sum(sum);
}

constexpr int kProbes = 3;  // in each pass over the keys
struct Totals {
  u64 weight[kProbes];
  u32 number[kProbes];
};

// Totals of the keys that are at least least[i]; these ascend.
template <typename Weight>
SPARGE_DEVICE Totals totals_from(const u32* keys, i32 count, const u32 (&least)[kProbes], const Weight& weight) {
  Totals totals = {};
  constexpr int kAtOnce = Weight::kCounts ? 4 : 1;
#pragma unroll kAtOnce
  for (int j = threadIdx.x % kWarpSize; j < count; j += kWarpSize) {
    const u32 key = keys[j];
    if constexpr (Weight::kCounts) {
#pragma unroll
      for (int i = 0; i < kProbes; ++i) ptx::count_from(least[i], key, totals.number[i]);
    } else if (key >= least[0]) {
      const u64 own = weight(key);
#pragma unroll
      for (int i = 0; i < kProbes; ++i)
        if (key >= least[i]) ++totals.number[i], totals.weight[i] += own;
    }
  }
#pragma unroll
  for (int i = 0; i < kProbes; ++i) {
    totals.number[i] = warp_sum(totals.number[i]);
    totals.weight[i] = Weight::kCounts ? totals.number[i] : warp_sum(totals.weight[i]);
  }
  return totals;
}

// The threshold among the at most 32 keys in low .. top, the number of keys `equal` to it, and the weight `above` it, which comes
// in as that of the keys above top. `list` is this warp's.
template <typename Weight>
SPARGE_DEVICE u32 cut_among(const u32* keys, i32 count, u32 low, u32 top, u64 target, const Weight& weight, u32* list, u64& above,
                            u32& equal) {
  const i32 lane = threadIdx.x % kWarpSize;
  i32 found = 0;
#pragma unroll 4
  for (int first = 0; first < count; first += kWarpSize) {
    const u32 key = first + lane < count ? keys[first + lane] : 0;
    const bool inside = key - low <= top - low;
    const u32 lanes = __ballot_sync(kFullWarp, inside);
    if (inside) list[found + __popc(lanes & ((1u << lane) - 1))] = key;
    found += __popc(lanes);
  }
  __syncwarp();
  const u32 own = lane < found ? list[lane] : 0;
  __syncwarp();
  const u64 own_weight = own ? weight(own) : 0;
  u64 inclusive = above;
#pragma unroll 1
  for (int first = 0; first < found; first += 8)
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // past the last one there are zeros
      const u32 key = __shfl_sync(kFullWarp, own, first + i);
      const u64 of_key = Weight::kCounts ? 1 : __shfl_sync(kFullWarp, own_weight, first + i);
      if (key >= own) inclusive += of_key;
    }
  const u32 threshold = __reduce_max_sync(kFullWarp, own && inclusive > target ? own : 0);
  equal = __popc(__ballot_sync(kFullWarp, own == threshold));
  if constexpr (Weight::kCounts)
    above += __popc(__ballot_sync(kFullWarp, own > threshold));
  else
    above += warp_sum(own > threshold ? own_weight : 0);
  return threshold;
}

// `total` is the weight of all ranked keys.
template <typename Weight>
SPARGE_DEVICE Cut cut_at(const u32* keys, i32 count, const Range& range, u64 total, u64 target, const Weight& weight, u32* list) {
  if (total <= target) return {0, 0};
  constexpr int kStepsByValue = 8;  // scores are spread by value, not by bits; but some are infinite
  // Between these lies the largest key whose inclusive weight passes the target.
  u32 low = range.lowest, top = range.highest;
  u32 from_low = range.number, from_above = 0;  // how many keys there are from low on, and above top
  u64 above = 0;
#pragma unroll 1
  for (int step = 0; low < top && from_low - from_above > kWarpSize; ++step) {
    const float lowest = unsortable(low), highest = unsortable(top);
    u32 probe[kProbes];
#pragma unroll
    for (int i = 0; i < kProbes; ++i) {
      const float part = static_cast<float>(i + 1) / static_cast<float>(kProbes + 1);
      const u32 by_value = sortable((1.0f - part) * lowest + part * highest);
      const u32 by_bits = low + (top - low) / (kProbes + 1) * (i + 1) + 1;
      probe[i] = larger(i ? probe[i - 1] : low + 1, smaller(step < kStepsByValue ? by_value : by_bits, top));
    }
    const Totals totals = totals_from(keys, count, probe, weight);
#pragma unroll
    for (int i = kProbes - 1; i >= 0; --i)
      if (totals.weight[i] <= target) top = probe[i] - 1, from_above = totals.number[i], above = totals.weight[i];
#pragma unroll
    for (int i = 0; i < kProbes; ++i)
      if (totals.weight[i] > target) low = probe[i], from_low = totals.number[i];
  }
  u32 equal = from_low - from_above;
  const u32 threshold = low < top ? cut_among(keys, count, low, top, target, weight, list, above, equal) : low;
  const u64 each = weight(threshold);
  const u64 within = each ? (target - above) / each : count;
  const u64 ties = above == 0 && within == 0 ? 1 : within;  // at least one block
  return ties >= equal ? Cut{threshold - 1, 0} : Cut{threshold, ties};
}

}  // namespace sparge::route
