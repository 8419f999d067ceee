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

// weights[r * key_blocks + j] = share of the mass that row r gives block j; one warp a row.
SPARGE_DEVICE void share_mass(const RouteParams& p, const float* log_mass, float* weights, const Rules& rules, const Row& row) {
  const i32 key_blocks = p.problem.key_blocks(), lane = threadIdx.x % kWarpSize;
  float most = kMinusInfinity;
  for (int j = lane; j < key_blocks; j += kWarpSize)
    if (rules.valid(j) && rules.sees(row, j)) most = fmaxf(most, log_mass[j]);
  most = lane_max<1, kWarpSize>(most);
  float total = 0.0f;
  for (int j = lane; j < key_blocks; j += kWarpSize) {
    weights[j] = rules.valid(j) && rules.sees(row, j) ? expf(log_mass[j] - most) : 0.0f;
    total += weights[j];
  }
  total = lane_sum<1, kWarpSize>(total);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int j = lane; j < key_blocks; j += kWarpSize) weights[j] *= inverse;
}

// outputs[r] = sum of weights[r][j] V_j; a warp takes eight channels. Both operands are split as they are read.
SPARGE_DEVICE void pool_outputs(const float* values, const float* weights, Vectors& outputs, i32 rows, i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize, group = lane / 4, quad = lane % 4;
  for (int first = threadIdx.x / kWarpSize * 8; first < kHeadDim; first += kWarps * 8) {
    float sum[kRowTiles][4] = {};
    const float* channel = values + static_cast<i64>(first + group) * key_blocks;
#pragma unroll 2
    for (int start = 0; start < key_blocks; start += 8) {
      const i32 j[2] = {start + quad, start + quad + 4};
      Split b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) b[i] = split(channel[smaller(j[i], key_blocks - 1)]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (m * kTileRows >= rows) continue;
        Split a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const i32 row = m * kTileRows + 8 * (i % 2) + group;
          a[i] = split(row < rows && j[i / 2] < key_blocks ? weights[row * key_blocks + j[i / 2]] : 0.0f);
        }
        multiply_add(sum[m], a, b[0], b[1]);
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) outputs.set(m * kTileRows + 8 * (i / 2) + group, first + 2 * quad + i % 2, sum[m][i]);
  }
}

// scores hold the log mass, and become the scores by error; `spare` is as large as they are. `vectors` held the query means.
SPARGE_DEVICE void score_error(const RouteParams& p, Vectors& vectors, float* norm, float* scores, float* spare, i64 q_at,
                               i64 kv_at, i32 rows, const Rules& rules, const Row& first) {
  const i32 key_blocks = p.problem.key_blocks(), warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const float* values = p.v_block_mean + kv_at * kHeadDim * key_blocks;
  __syncthreads();
  for (int r = warp; r < rows; r += kWarps)
    share_mass(p, scores + r * key_blocks, spare + r * key_blocks, rules, Row(p, first.b, first.head, first.block + r));
  __syncthreads();
  pool_outputs(values, spare, vectors, rows, key_blocks);
  __syncthreads();
  for (int r = warp; r < rows; r += kWarps) {
    float squares = 0.0f;
    for (int c = lane; c < kHeadDim; c += kWarpSize) squares += vectors.get(r, c) * vectors.get(r, c);
    squares = lane_sum<1, kWarpSize>(squares);
    if (lane == 0) norm[r] = squares;
  }
  __syncthreads();
  // |V_j - o|^2
  multiply_rows(vectors, rows, values, key_blocks, [&](i32 j) {
    const float own = p.v_square[kv_at * key_blocks + j];
    return [=](i32 r, float dot) { spare[r * key_blocks + j] = fmaxf(0.0f, norm[r] - 2.0f * dot + own); };
  });
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kHeadDim; i += kThreads) {
    const float x = p.q_block_mean[q_at * kHeadDim + i] * p.score_scale;
    vectors.set(i / kHeadDim, i % kHeadDim, x * x);
  }
  __syncthreads();
  multiply_rows(vectors, rows, p.k_variance + kv_at * kHeadDim * key_blocks, key_blocks, [&](i32 j) {
    const float scatter = p.v_variance[kv_at * key_blocks + j] / static_cast<float>(kKeyBlock);
    return [=](i32 r, float dot) {
      const i32 at = r * key_blocks + j;
      const float half = 0.5f * dot;
      const float squared = half * half * spare[at] + dot * scatter;
      scores[at] += half + 0.5f * logf(fmaxf(squared, kLeastError));
    };
  });
}

}  // namespace sparge::route
