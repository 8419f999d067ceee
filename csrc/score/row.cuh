// SPDX-License-Identifier: Apache-2.0
// The distances of one row, found by one warp. It reads the exact parts twice, for o and then density by density; the second
// time they are in the L1 or L2.
#pragma once

#include "pooled.cuh"

namespace sparge::score {

constexpr int kShare = kHeadDim / kWarpSize;  // channels a lane: every 32nd
constexpr float kLeastSum = 1e-30f;           // below every sum of weights but that of no key, whose values sum to 0

SPARGE_DEVICE i32 channel(int i) { return threadIdx.x % kWarpSize + i * kWarpSize; }

// Factors that add up the exact parts of a row from the first density on, in units of the largest exponential so far. Each lane
// knows one part, so that nothing waits for exponentials part by part.
struct Parts {
  float before, own;  // factors on the sums so far and on those of the part
  float sum, most;    // sum of the part times `own`; maximum of all up to it

  SPARGE_DEVICE Parts(const ScoreParams& p, i64 first) {
    const i32 lane = threadIdx.x % kWarpSize;
    const bool exists = lane < p.densities;
    const i64 at = first + static_cast<i64>(exists ? lane : 0) * p.rows;
    sum = exists ? p.exact_sum[at] : 0.0f;
    const float largest = sum == 0.0f ? kMinusInfinity : p.exact_max[at];
    most = largest;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const float earlier = __shfl_up_sync(kFullWarp, most, step);
      if (lane >= step) most = fmaxf(most, earlier);
    }
    float last = __shfl_up_sync(kFullWarp, most, 1);
    if (lane == 0) last = kMinusInfinity;
    before = last == most ? 1.0f : exp2f(last - most);
    own = largest == most ? 1.0f : exp2f(largest - most);
    sum *= own;
  }

  static SPARGE_DEVICE float of(float value, i32 density) { return __shfl_sync(kFullWarp, value, density); }
};

struct Values {
  float x[kShare];

  SPARGE_DEVICE void load(const float* row, i32 channels) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) x[i] = channel(i) < channels ? row[channel(i)] : 0.0f;
  }
};

struct Sums {
  Values values = {};
  float sum = 0.0f;

  SPARGE_DEVICE void add(const Parts& parts, i32 density, const Values& other) {
    const float before = Parts::of(parts.before, density), own = Parts::of(parts.own, density);
#pragma unroll
    for (int i = 0; i < kShare; ++i) values.x[i] = values.x[i] * before + other.x[i] * own;
    sum = sum * before + Parts::of(parts.sum, density);
  }
  SPARGE_DEVICE float inverse() const { return 1.0f / fmaxf(sum, kLeastSum); }
};

// index: the row's in its thread block.
SPARGE_DEVICE void score_row(const ScoreParams& p, const Place& place, const Shared& shared, const Masses& masses, i32 index) {
  const bool writes = threadIdx.x % kWarpSize == 0;
  const i32 pooling = p.densities - 1, row = place.first + index;
  const i64 first = static_cast<i64>(place.head_at) * p.densities * p.rows + row;  // row of the first part
  float* found = p.found + place.b * p.batch_stride + place.head * p.head_stride + row;
  auto store = [&](i32 field, float value) {
    if (writes) found[field * p.field_stride] = value;
  };
  auto load = [&](Values& values, i32 density) {
    values.load(p.exact_out + (first + static_cast<i64>(density) * p.rows) * p.channels, p.channels);
  };

  Values truth, mean;
  mean.load(p.v_mean + place.kv_at(p) * kHeadDim, p.channels);
  const Parts parts(p, first);
  {
    Sums all;
#pragma unroll 7
    for (i32 density = 0; density < p.densities; ++density) {
      Values values;
      load(values, density);
      all.add(parts, density, values);
    }
    const float inverse = all.inverse();
#pragma unroll
    for (int i = 0; i < kShare; ++i) truth.x[i] = all.values.x[i] * inverse;
  }
  float norm = 0.0f, mean_far = 0.0f;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const float o = mean.x[i] - truth.x[i];
    norm += truth.x[i] * truth.x[i];
    mean_far += o * o;
  }
  store(p.densities + 5 * pooling, lane_sum<1, kWarpSize>(norm));
  store(p.densities + 5 * pooling + 1, lane_sum<1, kWarpSize>(mean_far));

  Sums kept;
  Values next;
  load(next, 0);
#pragma unroll 1
  for (i32 density = 0; density < p.densities; ++density) {
    const Values values = next;
    if (density + 1 < p.densities) load(next, density + 1);
    kept.add(parts, density, values);
    const bool pools = density < pooling;
    const float of_kept = kept.inverse(), pooled_sum = pools ? masses.sum[index][density] : 0.0f;
    const float of_pooled = 1.0f / fmaxf(pooled_sum, kLeastSum), share = pooled_sum > 0.0f ? 1.0f : 0.0f;
    const float* pooled = shared.pooled_row(p, pools ? density : 0, index);
    float near = 0.0f, between = 0.0f, far = 0.0f, kept_towards = 0.0f, pooled_towards = 0.0f;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const float e = kept.values.x[i] * of_kept - truth.x[i];
      const float o = mean.x[i] * share + pooled[channel(i)] * of_pooled - truth.x[i];
      near += e * e;
      between += e * o;
      far += o * o;
      kept_towards += e * (mean.x[i] - truth.x[i]);
      pooled_towards += o * (mean.x[i] - truth.x[i]);
    }
    near = lane_sum<1, kWarpSize>(near), between = lane_sum<1, kWarpSize>(between), far = lane_sum<1, kWarpSize>(far);
    kept_towards = lane_sum<1, kWarpSize>(kept_towards);
    pooled_towards = lane_sum<1, kWarpSize>(pooled_towards);
    store(density, near);
    if (pools) {
      store(p.densities + density, between);
      store(p.densities + pooling + density, far);
      const float kept_log = log2f(kept.sum) + Parts::of(parts.most, density);
      store(p.densities + 2 * pooling + density, (kept_log - log2f(pooled_sum) - masses.most[index]) * kLn2);
      store(p.densities + 3 * pooling + density, kept_towards);
      store(p.densities + 4 * pooling + density, pooled_towards);
    }
  }
}

}  // namespace sparge::score
