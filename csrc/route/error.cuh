// SPDX-License-Identifier: Apache-2.0
// Scores that rank key blocks by the error that pooling them would make (sparge/reference/scores.py has the maths).
//
// With s the variance of a block's logits, V_j its mean value and o the pooled estimate of the output:
//   log mass + s / 2 + log(sqrt((s / 2)^2 |V_j - o|^2 + s / 64 * variance of V in the block))
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/special.cuh"
#include "outputs.cuh"
#include "place.cuh"
#include "row.cuh"

namespace sparge::route {

constexpr float kLeastError = 1e-30f;  // squared; so that the logarithm of an error of 0 is a number, below all others

// weights[j]: mass that a row gives block j, in units of the largest, up to whole steps of pool_outputs. Returns 1 / their sum.
// One warp a row.
SPARGE_DEVICE float share_mass(const float* log_mass, float* weights, const u8* standing, i32 seen, i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize;
  const i32 padded = ceil_div(key_blocks, kKeyStep) * kKeyStep;
  auto sees = [&](i32 j) { return j < seen && standing[j] != 0; };
  float most = kMinusInfinity;
#pragma unroll 4
  for (int j = lane; j < key_blocks; j += kWarpSize) {
    const float x = log_mass[j];
    if (sees(j)) most = fmaxf(most, x);
  }
  most = kLog2E * lane_max<1, kWarpSize>(most);
  float total = 0.0f;
#pragma unroll 4
  for (int j = lane; j < padded; j += kWarpSize) {
    const float mass = ptx::exp2_approx(kLog2E * log_mass[j] - most), weight = sees(j) ? mass : 0.0f;
    weights[j] = weight;
    total += weight;
  }
  total = lane_sum<1, kWarpSize>(total);
  return total > 0.0f ? 1.0f / total : 0.0f;
}

// Vectors that every key block is multiplied with. They lie where the query means were.
struct ErrorVectors {
  PairVectors outputs, squared_means;
};
static_assert(sizeof(ErrorVectors) <= sizeof(Vectors) && sizeof(Sums) <= sizeof(Vectors), "they lie where Vectors lies");

// Makes the vectors from the partial sums in `one` and `other`; they may lie where `one` does. norm[r]: factor on row r's sums,
// then the square of its output.
SPARGE_DEVICE void set_vectors(const RouteParams& p, const Sums& one, const Sums& other, ErrorVectors& vectors, float* norm,
                               const Place& place) {
  const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const i64 q_at = static_cast<i64>(place.head_at) * p.problem.query_blocks() + place.first + warp;
  const float* mean = p.q_block_mean + q_at * kHeadDim + 2 * lane;
  const bool exists = warp < place.rows;
  const float inverse = norm[warp];
  constexpr int kPairs = kHeadDim / kWarpSize / 2;
  float x[kPairs][2] = {}, output[kPairs][2], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i)
    if (exists) load_floats(x[i], mean + 2 * kWarpSize * i);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const i32 at = warp * Sums::kPitch + 2 * (kWarpSize * i + lane);
#pragma unroll
    for (int group = 0; group < kKeyGroups; ++group) {
      float two[2];
      load_floats(two, (group < 2 ? one : other).of_group[group % 2] + at);
#pragma unroll
      for (int j = 0; j < 2; ++j) output[i][j] = group == 0 ? two[j] : output[i][j] + two[j];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      output[i][j] *= inverse;
      squares += output[i][j] * output[i][j];
      x[i][j] *= p.score_scale;
      x[i][j] *= x[i][j];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const i32 channel = 2 * (kWarpSize * i + lane);
    vectors.outputs.set(warp, channel, SplitPair(output[i][0], output[i][1]));
    vectors.squared_means.set(warp, channel, SplitPair(x[i][0], x[i][1]));
  }
  squares = lane_sum<1, kWarpSize>(squares);
  if (lane == 0) norm[warp] = squares;
}

// scores: log mass, then scores by error. `means` held the query means. `spare` has room for as many numbers as there are scores,
// and for Sums.
SPARGE_DEVICE void score_error(const RouteParams& p, Vectors& means, float* norm, float* scores, float* spare, const u8* standing,
                               const Place& place, const i32* seen) {
  const i32 key_blocks = p.problem.key_blocks(), warp = threadIdx.x / kWarpSize;
  auto of_head = [&](const auto* of_blocks) { return of_blocks + static_cast<i64>(place.kv_at) * key_blocks; };
  auto columns_of_head = [&](const u16* of_blocks) { return of_blocks + static_cast<i64>(place.kv_at) * key_blocks * kHeadDim; };
  Sums &one = *reinterpret_cast<Sums*>(&means), &other = *reinterpret_cast<Sums*>(spare);
  ErrorVectors& vectors = *reinterpret_cast<ErrorVectors*>(&means);
  __syncthreads();
  float inverse = 0.0f;
  if (warp < place.rows)
    inverse = share_mass(scores + warp * p.score_pitch, spare + warp * p.score_pitch, standing, seen[warp], key_blocks);
  if (threadIdx.x % kWarpSize == 0) norm[warp] = inverse;
  __syncthreads();
  pool_outputs(columns_of_head(p.v_block_mean), spare, p.score_pitch, one, other, place.rows, key_blocks);
  set_vectors(p, one, other, vectors, norm, place);
  __syncthreads();
  over_shares(key_blocks, [&](const Share& share) {
    Products away = {};  // |V_j - o|^2
    float square[kLaneColumns], scatter[kLaneColumns];
    load_columns(square, of_head(p.v_square), share, key_blocks);
    multiply(away, share, vectors.outputs, columns_of_head(p.v_block_mean), key_blocks);
#pragma unroll
    for (int i = 0; i < 2 * kLaneColumns; ++i) {
      float& dot = away[i / 4][i % 4];
      dot = fmaxf(0.0f, norm[share.row(i % 4 / 2)] - 2.0f * dot + square[i / 4 * 2 + i % 2]);
    }
    Products variance = {};
    load_columns(scatter, of_head(p.v_variance), share, key_blocks);
    multiply(variance, share, vectors.squared_means, columns_of_head(p.k_variance), key_blocks);
    each_row(share, scores, p.score_pitch, place.rows, key_blocks, [&](i32 h, float (&score)[kLaneColumns]) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        const float dot = product_at(variance, h, i), half = 0.5f * dot;
        const float squared = half * half * product_at(away, h, i) + dot * (scatter[i] / static_cast<float>(kKeyBlock));
        score[i] += half + 0.5f * kLn2 * ptx::log2_approx(fmaxf(squared, kLeastError));
      }
    });
  });
}

}  // namespace sparge::route
