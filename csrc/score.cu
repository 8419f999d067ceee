// SPDX-License-Identifier: Apache-2.0
// Calibration: how far the outputs of every candidate density lie from exact attention, of sampled query rows.
//
// Semantics   With the first buckets of key blocks exact and the others pooled: e the output of the exact ones, p of the pooled
//             ones, o of all, exact. |e - o|^2, (e - o)(p - o), |p - o|^2 and the natural log of both sums' ratio, which serve
//             every gain (sparge/calibrate/scoring.py has the maths, and is this kernel's reference). And |o|^2, and how far o
//             is from what dense attention gave: the rounding of 8-bit operands, which no density takes away.
// Strategy    One warp a row. It reads the pieces twice, for o and then density by density; the second time they are in the L1.
#include "common/config.cuh"
#include "common/reduce.cuh"
#include "params.cuh"
#include "ptx/convert.cuh"

namespace sparge::score {

SPARGE_CHECK_PARAMS(ScoreParams);

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = 4;               // left alone, compilers spill for a fifth
constexpr int kShare = kHeadDim / kWarpSize;  // channels a lane: every 32nd
constexpr float kLeastSum = 1e-30f;           // below every sum of weights but that of no key, whose values sum to 0

SPARGE_DEVICE i32 channel(int i) { return threadIdx.x % kWarpSize + i * kWarpSize; }

struct Row {
  i32 head_at, router, row;

  SPARGE_DEVICE Row(const ScoreParams& p, i32 index) {
    row = index % p.rows;
    index /= p.rows;
    router = index % p.routers;
    head_at = index / p.routers;
  }

  SPARGE_DEVICE i64 exact(const ScoreParams& p, i32 of_router, i32 piece) const {
    return ((static_cast<i64>(head_at) * p.routers + of_router) * p.pieces + piece) * p.rows + row;
  }
  SPARGE_DEVICE i64 pooled(const ScoreParams& p, i32 density) const {
    return ((static_cast<i64>(head_at) * p.routers + router) * (p.densities - 1) + density) * p.rows + row;
  }
  SPARGE_DEVICE i64 of_head(const ScoreParams& p) const { return static_cast<i64>(head_at) * p.rows + row; }
};

// Sums over the exact keys of some pieces, in units of exp2(most).
struct Sums {
  float values[kShare] = {};
  float sum = 0.0f, most = kMinusInfinity;

  // Without a branch, so that loads of several pieces are on their way at once.
  SPARGE_DEVICE void add(const ScoreParams& p, i64 row) {
    const float other_sum = p.exact_sum[row];
    const float other_most = other_sum == 0.0f ? kMinusInfinity : p.exact_max[row], top = fmaxf(most, other_most);
    const float own = most == top ? 1.0f : exp2f(most - top), other = other_most == top ? 1.0f : exp2f(other_most - top);
    const float* other_values = p.exact_out + row * p.channels;
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      values[i] = values[i] * own + (channel(i) < p.channels ? other_values[channel(i)] : 0.0f) * other;
    sum = sum * own + other_sum * other;
    most = top;
  }

  SPARGE_DEVICE float inverse() const { return 1.0f / fmaxf(sum, kLeastSum); }
};

// As it is: other loads of float32 round it to what the kernels compute with.
SPARGE_DEVICE float dense_value(const TensorView& dense, i64 at) {
  if (dense.dtype == DType::kFp32) return static_cast<const float*>(dense.data)[at];
  const u16 bits = static_cast<const u16*>(dense.data)[at];
  return dense.dtype == DType::kBf16 ? ptx::bf16_to_float(bits) : ptx::fp16_to_float(bits);
}

// |dense - o|^2: the part of a lane.
SPARGE_DEVICE float rounding_of(const ScoreParams& p, const Row& row, const float (&truth)[kShare]) {
  if (!p.dense.data) return 0.0f;
  const i64 first =
      row.head_at / p.heads * p.dense.batch_stride + row.head_at % p.heads * p.dense.head_stride + row.row * p.dense.token_stride;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const float off = channel(i) < p.channels ? dense_value(p.dense, first + channel(i)) - truth[i] : 0.0f;
    sum += off * off;
  }
  return sum;
}

SPARGE_DEVICE void score_row(const ScoreParams& p, const Row& row) {
  const bool writes = threadIdx.x % kWarpSize == 0;
  const i32 pooling = p.densities - 1;
  float* found = p.found + row.router * p.router_stride + row.head_at / p.heads * p.batch_stride +
                 row.head_at % p.heads * p.head_stride + row.row;
  auto store = [&](i32 field, float value) {
    if (writes) found[field * p.field_stride] = value;
  };

  Sums all;
#pragma unroll 2
  for (i32 piece = 0; piece < p.pieces; ++piece) all.add(p, row.exact(p, 0, piece));
  float truth[kShare], norm = 0.0f;
  const float of_all = all.inverse();
#pragma unroll
  for (int i = 0; i < kShare; ++i) truth[i] = all.values[i] * of_all, norm += truth[i] * truth[i];
  store(p.densities + 3 * pooling, lane_sum<1, kWarpSize>(norm));

  Sums kept;
  i32 density = 0;
  for (i32 piece = 0; piece < p.pieces; ++piece) {
    kept.add(p, row.exact(p, row.router, piece));
    if (!(p.ends >> piece & 1)) continue;
    const bool pools = density < pooling;
    const i64 pooled = pools ? row.pooled(p, density) : 0;
    const float pooled_sum = pools ? p.pooled_sum[pooled] : 0.0f;
    const float of_kept = kept.inverse(), of_pooled = pools ? p.unit[row.head_at] / fmaxf(pooled_sum, kLeastSum) : 0.0f;
    const u16* pooled_values = p.pooled_out + pooled * p.channels;
    float near = 0.0f, between = 0.0f, far = 0.0f;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const bool inside = pools && channel(i) < p.channels;
      const float e = kept.values[i] * of_kept - truth[i];
      const float o = pools ? (inside ? ptx::fp16_to_float(pooled_values[channel(i)]) * of_pooled : 0.0f) - truth[i] : 0.0f;
      near += e * e;
      between += e * o;
      far += o * o;
    }
    store(density, lane_sum<1, kWarpSize>(near));
    if (pools) {
      store(p.densities + density, lane_sum<1, kWarpSize>(between));
      store(p.densities + pooling + density, lane_sum<1, kWarpSize>(far));
      const float kept_log = log2f(kept.sum) + kept.most, pooled_log = log2f(pooled_sum) + p.pooled_max[row.of_head(p)];
      store(p.densities + 2 * pooling + density, (kept_log - pooled_log) * kLn2);
    }
    ++density;
  }
  store(p.densities + 3 * pooling + 1, lane_sum<1, kWarpSize>(rounding_of(p, row, truth)));
}

}  // namespace sparge::score

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::score::kThreads, 0};

// Grid: a warp for every (batch, head), router and row, rows fastest.
extern "C" __global__ void __launch_bounds__(sparge::score::kThreads, sparge::score::kBlocksPerSm)
    score(const __grid_constant__ sparge::ScoreParams p) {
  using namespace sparge;
  const i32 index = blockIdx.x * score::kWarps + threadIdx.x / kWarpSize;
  if (index < p.batch * p.heads * p.routers * p.rows) score::score_row(p, score::Row(p, index));
}
