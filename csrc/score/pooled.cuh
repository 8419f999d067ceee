// SPDX-License-Identifier: Apache-2.0
// What each density pools, for every row of a thread block: logits of the listed key blocks' mean keys, weights relative to the
// row's largest, and sums of weights and of weighted mean values from the start of the list to the end of each bucket.
//
// Logits are as exact as float32 (two TF32 a number). Weights are rounded to TF32 before they are summed. Mean values are bf16.
#pragma once

#include "buckets.cuh"
#include "value.cuh"

namespace sparge::score {

constexpr float kLeastLogit = -1e30f;  // finite, so that minus infinity less it is no NaN

struct Masses {
  float most[kMaxRows];  // the largest logit of a row, log2 units
  float sum[kMaxRows][kMostDensities];
};

SPARGE_DEVICE void load_queries(const ScoreParams& p, const Place& place, const Shared& shared) {
  const i64 head = place.b * p.q.batch_stride + place.head * p.q.head_stride;
#pragma unroll
  for (int pass = 0; pass < kMaxRows * kHeadDim / kThreads; ++pass) {
    const i32 i = pass * kThreads + threadIdx.x, of_operand = i / kHeadDim, channel = i % kHeadDim;
    const i32 row = shared.row_of(of_operand / 8, of_operand % 8);
    const bool inside = row < place.rows && channel < p.channels;
    const float x = inside ? value_at(p.q, head + (place.first + row) * p.q.token_stride + channel) : 0.0f;
    shared.queries->set(of_operand, channel, x * (p.scale * kLog2E));
  }
}

// A warp takes eight places at a time. Loads of the next eight start before their products.
SPARGE_DEVICE void find_logits(const ScoreParams& p, const Place& place, const Shared& shared, i32 end) {
  constexpr int kChunks = kHeadDim / 16;
  const i32 lane = threadIdx.x % kWarpSize, group = lane / 4, quad = lane % 4;
  const float* means = p.k_block_mean + place.kv_at(p) * p.key_blocks * kHeadDim + 4 * quad;
  i32 first = threadIdx.x / kWarpSize * kStep;
  if (first >= end) return;
  Vec16 chunk[kChunks];
  auto load = [&](const float* mean, int c) { chunk[c] = *reinterpret_cast<const Vec16*>(mean + 16 * c); };
  auto mean_at = [&](i32 place_at) { return means + static_cast<i64>(shared.list[place_at + group]) * kHeadDim; };
  {
    const float* mean = mean_at(first);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) load(mean, c);
  }
#pragma unroll 1
  for (; first < end; first += kWarps * kStep) {
    const i32 next = first + kWarps * kStep;
    const float* mean = next < end ? mean_at(next) : nullptr;
    float sum[2][4] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float x[4] = {__uint_as_float(chunk[c].x), __uint_as_float(chunk[c].y), __uint_as_float(chunk[c].z),
                          __uint_as_float(chunk[c].w)};
      if (mean) load(mean, c);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Vec16 a = *reinterpret_cast<const Vec16*>(shared.queries->high[2 * c + h][lane]);
        const Vec16 rest = *reinterpret_cast<const Vec16*>(shared.queries->low[2 * c + h][lane]);
        const u32 high[4] = {a.x, a.y, a.z, a.w}, low[4] = {rest.x, rest.y, rest.z, rest.w};
        multiply_add(sum[h], high, low, split(x[2 * h]), split(x[2 * h + 1]));
      }
    }
    if (group >= shared.lines) continue;
    const i32 at = first + 2 * quad;
    const Vec8 bias = *reinterpret_cast<const Vec8*>(shared.bias + at);
    auto logit = [&](int i, u32 of_place) { return __float_as_uint(sum[0][i] + sum[1][i] + __uint_as_float(of_place)); };
    float* line = shared.line(group) + shared.width() * at;
    if (shared.alone)
      *reinterpret_cast<Vec8*>(line) = {logit(0, bias.x), logit(1, bias.y)};
    else
      *reinterpret_cast<Vec16*>(line) = {logit(0, bias.x), logit(2, bias.x), logit(1, bias.y), logit(3, bias.y)};
  }
}

// One warp a row.
SPARGE_DEVICE void weigh(const ScoreParams& p, const Shared& shared, const Buckets& buckets, Masses& masses, i32 row) {
  const i32 lane = threadIdx.x % kWarpSize, pooling = p.densities - 1;
  float* x = shared.row(row);
  const i32 width = shared.width();
  float most = kLeastLogit;
#pragma unroll 4
  for (i32 i = lane; i < buckets.ends[0]; i += kWarpSize) most = fmaxf(most, x[width * i]);
  most = lane_max<1, kWarpSize>(most);
  float sum = 0.0f;
  for (i32 t = pooling - 1; t >= 0; --t) {
    const i32 end = buckets.ends[t];
#pragma unroll 4
    for (i32 i = buckets.ends[t + 1] + lane; i < end; i += kWarpSize) {
      const float weight = __uint_as_float(split(ptx::exp2_approx(x[width * i] - most)).high);
      x[width * i] = weight;
      sum += weight;
    }
    const float total = lane_sum<1, kWarpSize>(sum);
    if (lane == 0) masses.sum[row][t] = total;
  }
  if (lane == 0) masses.most[row] = most;
}

// Two weights of a lone row as half of an operand.
SPARGE_DEVICE Vec16 lone(const float* weights) {
  const Vec8 two = *reinterpret_cast<const Vec8*>(weights);
  return {two.x, 0, two.y, 0};
}

// Each warp sums eight channels of every row. A step takes the eight places in an order that makes two of them neighbours in a
// lane: 2 quad and the one after it.
template <bool kAlone>
SPARGE_DEVICE void pool_values(const ScoreParams& p, const Place& place, const Shared& shared, const Buckets& buckets) {
  constexpr int kAhead = 8;  // steps whose values are being loaded
  const i32 lane = threadIdx.x % kWarpSize, group = lane / 4, quad = lane % 4, first = threadIdx.x / kWarpSize * 8;
  const i32 end = buckets.ends[0];
  const u16* values = p.v_block_mean + place.kv_at(p) * p.key_blocks * kHeadDim + first + group;
  asm("" : "+l"(values));  // one address, to which an offset takes one instruction
  __builtin_assume(__isGlobal(values));
  const float* line = shared.line(group) + (kAlone ? 2 : 4) * quad;
  float sum[4] = {};
  u32 x[kAhead][2];
  auto load = [&](u32(&two)[2], i32 start) {
    if (start >= end) return;
    const u32 blocks = *reinterpret_cast<const u32*>(shared.list + start + 2 * quad);
    two[0] = values[static_cast<u64>(blocks & 0xFFFFu) * kHeadDim];
    two[1] = values[static_cast<u64>(blocks >> 16) * kHeadDim];
  };
  i32 t = p.densities - 2, next = buckets.ends[t];
  auto store_ended = [&](i32 at) {
    while (at == next) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const i32 row = shared.row_of(h, group);
        if (row >= place.rows) continue;
        float* pooled = shared.pooled_row(p, t, row) + first + 2 * quad;
#pragma unroll
        for (int i = 0; i < 2; ++i) pooled[i] = sum[2 * h + i];
      }
      next = t > 0 ? buckets.ends[--t] : -1;
    }
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) load(x[step], step * kStep);
  store_ended(0);
#pragma unroll 1
  for (i32 base = 0; base < end; base += kAhead * kStep)
#pragma unroll
    for (int step = 0; step < kAhead; ++step) {
      const i32 start = base + step * kStep;
      if (start >= end) continue;
      const Vec16 weights = kAlone ? lone(line + start) : *reinterpret_cast<const Vec16*>(line + 2 * start);
      const u32 a[4] = {weights.x, weights.y, weights.z, weights.w};
      ptx::mma_m16n8k8_tf32(sum, a, x[step][0] << 16, x[step][1] << 16);
      load(x[step], start + kAhead * kStep);
      store_ended(start + kStep);
    }
}

}  // namespace sparge::score
