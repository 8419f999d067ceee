// SPDX-License-Identifier: Apache-2.0
// Scores of up to eight query blocks against every key block of a head, as sortable keys in shared memory.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"

namespace sparge::route {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxRows = kWarps;  // a warp selects for one query block

// Order-preserving map of float32 to u32; every number maps above 0, so 0 can mean "not ranked".
SPARGE_DEVICE u32 sortable(float score) {
  const u32 bits = __float_as_uint(score);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
SPARGE_DEVICE float unsortable(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

// keys[r * key_blocks + j] = sortable(q_block_mean[row r] . k_block_mean[j] * scale). Each thread owns key blocks
// and reads their means coalesced; the query means are broadcast from shared memory.
SPARGE_DEVICE void score_rows(const RouteParams& p, float (&q_mean)[kMaxRows][kHeadDim], u32* keys, i64 q_at, i64 k_at,
                              i32 rows) {
  const i32 key_blocks = p.problem.key_blocks();
  for (int i = threadIdx.x; i < kMaxRows * kHeadDim; i += kThreads)
    q_mean[i / kHeadDim][i % kHeadDim] = i / kHeadDim < rows ? p.q_block_mean[q_at * kHeadDim + i] * p.score_scale : 0.0f;
  __syncthreads();
  const float* k_mean = p.k_block_mean + k_at * kHeadDim * key_blocks;
  for (int j = threadIdx.x; j < key_blocks; j += kThreads) {
    float score[kMaxRows] = {};
#pragma unroll 2
    for (int c = 0; c < kHeadDim; c += 4) {
      float k[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) k[i] = k_mean[static_cast<i64>(c + i) * key_blocks + j];
#pragma unroll
      for (int r = 0; r < kMaxRows; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[r] += q_mean[r][c + i] * k[i];
    }
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r)
      if (r < rows) keys[r * key_blocks + j] = sortable(score[r]);
  }
}

}  // namespace sparge::route
