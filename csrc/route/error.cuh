// SPDX-License-Identifier: Apache-2.0
// Scores that rank key blocks by the error which pooling them would make (sparge/reference/choose.py has the maths).
//
// With s the variance of a block's logits, V_j its mean value and o the pooled estimate of the output:
//   log mass + s / 2 + log(sqrt((s / 2)^2 |V_j - o|^2 + s / 64 * variance of V in the block))
#pragma once

#include "../common/reduce.cuh"
#include "row.cuh"

namespace sparge::route {

constexpr float kLeastError = 1e-30f;  // squared: the logarithm of an error of 0 stays a number, below all others

struct ErrorSmem {
  RowVectors vectors;  // o, then squares of the query means
  float norm[kMaxRows];
};

// weights[r * key_blocks + j] = share of the mass that row r gives block j; one warp a row.
SPARGE_DEVICE void share_mass(const RouteParams& p, const float* log_mass, float* weights, const Rules& rules) {
  const i32 key_blocks = p.problem.key_blocks(), lane = threadIdx.x % kWarpSize;
  float most = kMinusInfinity;
  for (int j = lane; j < key_blocks; j += kWarpSize)
    if (rules.valid(j)) most = fmaxf(most, log_mass[j]);
  most = lane_max<1, kWarpSize>(most);
  float total = 0.0f;
  for (int j = lane; j < key_blocks; j += kWarpSize) {
    weights[j] = rules.valid(j) ? expf(log_mass[j] - most) : 0.0f;
    total += weights[j];
  }
  total = lane_sum<1, kWarpSize>(total);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int j = lane; j < key_blocks; j += kWarpSize) weights[j] *= inverse;
}

// smem.vectors[r] = sum of weights[r][j] V_j; a warp takes four channels at a time, which share each read of the weights, its
// lanes the key blocks.
SPARGE_DEVICE void pool_outputs(const float* values, const float* weights, ErrorSmem& smem, i32 rows, i32 key_blocks) {
  constexpr int kChannels = 4;
  const i32 lane = threadIdx.x % kWarpSize;
  for (int first = threadIdx.x / kWarpSize * kChannels; first < kHeadDim; first += kWarps * kChannels) {
    float sum[kChannels][kMaxRows] = {};
    for (int j = lane; j < key_blocks; j += kWarpSize) {
      float x[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) x[c] = values[static_cast<i64>(first + c) * key_blocks + j];
#pragma unroll
      for (int r = 0; r < kMaxRows; ++r) {
        const float weight = r < rows ? weights[r * key_blocks + j] : 0.0f;
#pragma unroll
        for (int c = 0; c < kChannels; ++c) sum[c][r] += weight * x[c];
      }
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c)
#pragma unroll
      for (int r = 0; r < kMaxRows; ++r) {
        const float total = lane_sum<1, kWarpSize>(sum[c][r]);
        if (lane == r) smem.vectors[r][first + c] = total;
      }
  }
}

// scores hold the log mass, and become the scores by error; `spare` is as large as they are.
SPARGE_DEVICE void score_error(const RouteParams& p, const RowVectors& q_mean, ErrorSmem& smem, float* scores, float* spare,
                               i64 kv_at, i32 rows, const Rules& rules) {
  const i32 key_blocks = p.problem.key_blocks(), warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const float* values = p.v_block_mean + kv_at * kHeadDim * key_blocks;
  __syncthreads();
  if (warp < rows) share_mass(p, scores + warp * key_blocks, spare + warp * key_blocks, rules);
  __syncthreads();
  pool_outputs(values, spare, smem, rows, key_blocks);
  __syncthreads();
  float squares = 0.0f;
  for (int c = lane; c < kHeadDim; c += kWarpSize) squares += smem.vectors[warp][c] * smem.vectors[warp][c];
  squares = lane_sum<1, kWarpSize>(squares);
  if (lane == 0) smem.norm[warp] = squares;
  __syncthreads();
  // |V_j - o|^2
  multiply_rows(smem.vectors, values, key_blocks, [&](i32 j, const float (&dot)[kMaxRows]) {
    const float own = p.v_square[kv_at * key_blocks + j];
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r)
      if (r < rows) spare[r * key_blocks + j] = fmaxf(0.0f, smem.norm[r] - 2.0f * dot[r] + own);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < kMaxRows * kHeadDim; i += kThreads) {
    const float x = q_mean[i / kHeadDim][i % kHeadDim];
    smem.vectors[i / kHeadDim][i % kHeadDim] = x * x;
  }
  __syncthreads();
  multiply_rows(smem.vectors, p.k_variance + kv_at * kHeadDim * key_blocks, key_blocks, [&](i32 j, const float (&dot)[kMaxRows]) {
    const float scatter = p.v_variance[kv_at * key_blocks + j] / static_cast<float>(kKeyBlock);
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r) {
      if (r >= rows) continue;
      const float half = 0.5f * dot[r];
      const float squared = half * half * spare[r * key_blocks + j] + dot[r] * scatter;
      scores[r * key_blocks + j] += half + 0.5f * logf(fmaxf(squared, kLeastError));
    }
  });
}

}  // namespace sparge::route
