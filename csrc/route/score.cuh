// SPDX-License-Identifier: Apache-2.0
// Scores of up to eight query blocks against every key block of a head, as sortable keys in shared memory.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"

namespace sparge::route {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBlocksPerSm = 2;   // with 80 registers a thread ptxas spills
constexpr int kMaxRows = kWarps;  // a warp selects for one query block

// Order-preserving map of float32 to u32; every number maps above 0, so 0 can mean "not ranked".
SPARGE_DEVICE u32 sortable(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
SPARGE_DEVICE float unsortable(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

// One vector a row, broadcast from shared memory.
using RowVectors = float[kMaxRows][kHeadDim];

// For each key block j of the thread block's, `use(j, dot)` with the products of up to eight vectors and column j of a
// (head_dim, key_blocks) matrix. Each thread owns key blocks and reads their columns coalesced.
template <typename Use>
SPARGE_DEVICE void multiply_rows(const RowVectors& vectors, const float* columns, i32 key_blocks, Use&& use) {
  for (int j = threadIdx.x; j < key_blocks; j += kThreads) {
    float dot[kMaxRows] = {};
#pragma unroll 2
    for (int c = 0; c < kHeadDim; c += 4) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = columns[static_cast<i64>(c + i) * key_blocks + j];
#pragma unroll
      for (int r = 0; r < kMaxRows; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) dot[r] += vectors[r][c + i] * x[i];
    }
    use(j, dot);
  }
}

SPARGE_DEVICE void load_means(RowVectors& q_mean, const RouteParams& p, i64 q_at, i32 rows) {
  for (int i = threadIdx.x; i < kMaxRows * kHeadDim; i += kThreads)
    q_mean[i / kHeadDim][i % kHeadDim] = i / kHeadDim < rows ? p.q_block_mean[q_at * kHeadDim + i] * p.score_scale : 0.0f;
  __syncthreads();
}

// scores[r * key_blocks + j]: natural log of the block's mass, up to a constant a row. Where blocks are weighed, one of n
// keys counts n / 64.
SPARGE_DEVICE void score_mass(const RouteParams& p, const RowVectors& q_mean, float* scores, i64 kv_at, i32 rows) {
  const i32 key_blocks = p.problem.key_blocks();
  multiply_rows(q_mean, p.k_block_mean + kv_at * kHeadDim * key_blocks, key_blocks, [&](i32 j, const float (&dot)[kMaxRows]) {
    const float weight =
        p.weigh_counts ? logf(static_cast<float>(p.key_counts[kv_at * key_blocks + j]) / static_cast<float>(kKeyBlock)) : 0.0f;
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r)
      if (r < rows) scores[r * key_blocks + j] = dot[r] + weight;
  });
}

SPARGE_DEVICE void make_sortable(float* scores, i32 rows, i32 key_blocks) {
  for (int i = threadIdx.x; i < rows * key_blocks; i += kThreads) scores[i] = __uint_as_float(sortable(scores[i]));
}

}  // namespace sparge::route
