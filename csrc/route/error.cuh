// SPDX-License-Identifier: Apache-2.0
// Scores that rank key blocks by the error which pooling them would make (sparge/reference/choose.py has the maths).
//
// With s the variance of a block's logits, V_j its mean value and o the pooled estimate of the output:
//   log mass + s / 2 + log(sqrt((s / 2)^2 |V_j - o|^2 + s / 64 * variance of V in the block))
#pragma once

#include "../common/reduce.cuh"
#include "outputs.cuh"
#include "row.cuh"

namespace sparge::route {

constexpr float kLeastError = 1e-30f;  // squared: the logarithm of an error of 0 stays a number, below all others

// weights[j] = share of the mass that a row gives block j, in whole steps of pool_outputs; one warp a row.
SPARGE_DEVICE void share_mass(const float* log_mass, float* weights, const u8* standing, i32 seen, i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 padded = ceil_div(key_blocks, kKeyStep) * kKeyStep;
  auto sees = [&](i32 j) { return j < seen && standing[j] != kUnseen; };
  float most = kMinusInfinity;
#pragma unroll 4
  for (int j = lane; j < key_blocks; j += kWarpSize) {
    const float x = log_mass[j];
    if (sees(j)) most = fmaxf(most, x);
  }
  most = lane_max<1, kWarpSize>(most);
  float total = 0.0f;
#pragma unroll 4
  for (int j = lane; j < padded; j += kWarpSize) {
    const float mass = expf(log_mass[j] - most), weight = sees(j) ? mass : 0.0f;
    weights[j] = weight;
    total += weight;
  }
  total = lane_sum<1, kWarpSize>(total);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll 4
  for (int j = lane; j < key_blocks; j += kWarpSize) weights[j] *= inverse;
}

// scores hold the log mass, and become the scores by error; `vectors` held the query means. `spare` has room for as many
// numbers as there are scores, and for Vectors.
SPARGE_DEVICE void score_error(const RouteParams& p, Vectors& vectors, float* norm, float* scores, float* spare,
                               const u8* standing, i64 q_at, i32 kv_at, i32 rows, const i32* seen) {
  constexpr int kLaneShare = kHeadDim / kWarpSize;
  const i32 key_blocks = p.problem.key_blocks(), warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const float* values = p.v_block_mean + static_cast<i64>(kv_at) * kHeadDim * key_blocks;
  const float* variances = p.k_variance + static_cast<i64>(kv_at) * kHeadDim * key_blocks;
  __syncthreads();
  if (warp < rows) share_mass(scores + warp * p.score_pitch, spare + warp * p.score_pitch, standing, seen[warp], key_blocks);
  __syncthreads();
  Vectors& squared_means = *reinterpret_cast<Vectors*>(spare);
  pool_outputs(values, spare, p.score_pitch, vectors, squared_means, rows, key_blocks);
  float x[kLaneShare];
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i)
    x[i] = warp < rows ? p.q_block_mean[(q_at + warp) * kHeadDim + i * kWarpSize + lane] * p.score_scale : 0.0f;
  __syncthreads();
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) {
    const i32 c = i * kWarpSize + lane;
    const float output = sum_of_groups(vectors, squared_means, warp, c);
    squares += output * output;
    vectors.set(warp, c, output);
    squared_means.set(warp, c, x[i] * x[i]);
  }
  squares = lane_sum<1, kWarpSize>(squares);
  if (lane == 0) norm[warp] = squares;
  __syncthreads();
  over_shares(key_blocks, [&](const Share& share) {
    Products away = {};  // |V_j - o|^2
    multiply(away, share, vectors, values, key_blocks);
    each_product(share, away, rows, key_blocks, [&](i32 j) {
      const float square = p.v_square[static_cast<i64>(kv_at) * key_blocks + j];
      return [=, &away](i32 r, i32 i, float dot) { away[i] = fmaxf(0.0f, norm[r] - 2.0f * dot + square); };
    });
    Products variance = {};
    multiply(variance, share, squared_means, variances, key_blocks);
    each_product(share, variance, rows, key_blocks, [&](i32 j) {
      const float scatter = p.v_variance[static_cast<i64>(kv_at) * key_blocks + j] / static_cast<float>(kKeyBlock);
      return [=, &away](i32 r, i32 i, float dot) {
        const float half = 0.5f * dot;
        const float squared = half * half * away[i] + dot * scatter;
        scores[r * p.score_pitch + j] += half + 0.5f * logf(fmaxf(squared, kLeastError));
      };
    });
  });
}

}  // namespace sparge::route
