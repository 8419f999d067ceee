// SPDX-License-Identifier: Apache-2.0
// Keep the largest scores whose inclusive cumulative weight stays within a target: with weight 1 that is top-k, with
// weight softmax it is the cumulative-mass rule. No sort: one warp a row narrows the range in which the threshold lies, by
// value, until 32 keys are left, one a lane.
//
// Weights are integers (mass in units of 2^-31 of the largest), so sums are exact and their order never matters.
#pragma once

#include "../common/reduce.cuh"
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

struct Total {
  u64 weight;
  u32 number;
};

// Of the keys from `least` on.
template <typename Weight>
SPARGE_DEVICE Total total_from(const u32* keys, i32 count, u32 least, const Weight& weight) {
  u64 sum = 0;
  u32 number = 0;
#pragma unroll 8
  for (int j = threadIdx.x % kWarpSize; j < count; j += kWarpSize) {
    const u32 key = keys[j];
    if (key < least) continue;
    ++number;
    if constexpr (!Weight::kCounts) sum += weight(key);
  }
  number = warp_sum(number);
  if constexpr (Weight::kCounts) return {number, number};
  return {warp_sum(sum), number};
}

// Of the ranked keys.
struct Range {
  u32 lowest, highest, number;
};

SPARGE_DEVICE Range ranked(const u32* keys, i32 count) {
  u32 lowest = 0xFFFFFFFFu, highest = 0, number = 0;
#pragma unroll 8
  for (int j = threadIdx.x % kWarpSize; j < count; j += kWarpSize) {
    const u32 key = keys[j];
    highest = larger(highest, key);
    if (key < kLeastRanked) continue;
    lowest = smaller(lowest, key);
    ++number;
  }
  return {__reduce_min_sync(kFullWarp, lowest), __reduce_max_sync(kFullWarp, highest), warp_sum(number)};
}

// The threshold among the at most 32 keys in low .. top, and the weight above it: `above` is that of the keys above top.
// `list` is this warp's.
template <typename Weight>
SPARGE_DEVICE u32 cut_among(const u32* keys, i32 count, u32 low, u32 top, u64 target, const Weight& weight, u32* list,
                            u64& above) {
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
  for (int i = 0; i < found; ++i) {
    const u32 key = __shfl_sync(kFullWarp, own, i);
    const u64 of_key = Weight::kCounts ? 1 : __shfl_sync(kFullWarp, own_weight, i);
    if (key >= own) inclusive += of_key;
  }
  const u32 threshold = __reduce_max_sync(kFullWarp, own && inclusive > target ? own : 0);
  if constexpr (Weight::kCounts)
    above += __popc(__ballot_sync(kFullWarp, own > threshold));
  else
    above += warp_sum(own > threshold ? own_weight : 0);
  return threshold;
}

template <typename Weight>
SPARGE_DEVICE Cut cut_at(const u32* keys, i32 count, const Range& range, u64 target, const Weight& weight, u32* list) {
  if ((Weight::kCounts ? range.number : total_from(keys, count, kLeastRanked, weight).weight) <= target) return {0, 0};
  constexpr int kStepsByValue = 16;             // scores are spread by value, not by bits; but some are infinite
  u32 low = range.lowest, top = range.highest;  // between them lies the largest key whose inclusive weight passes the target
  u32 from_low = range.number, from_above = 0;  // how many keys there are from low on, and above top
  u64 above = 0;
  for (int step = 0; low < top && from_low - from_above > kWarpSize; ++step) {
    const float value = 0.5f * unsortable(low) + 0.5f * unsortable(top);
    const u32 wanted = step < kStepsByValue ? sortable(value) : low + (top - low) / 2 + 1;
    const u32 middle = larger(low + 1, smaller(wanted, top));
    const Total total = total_from(keys, count, middle, weight);
    if (total.weight > target)
      low = middle, from_low = total.number;
    else
      top = middle - 1, from_above = total.number, above = total.weight;
  }
  const u32 threshold = low < top ? cut_among(keys, count, low, top, target, weight, list, above) : low;
  const u64 each = weight(threshold);
  const u64 ties = each ? (target - above) / each : count;
  return {threshold, above == 0 && ties == 0 ? 1 : ties};  // at least one block
}

}  // namespace sparge::route
