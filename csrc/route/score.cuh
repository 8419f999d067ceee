// SPDX-License-Identifier: Apache-2.0
// Scores of the query blocks of a thread block against every key block of their head, in shared memory.
#pragma once

#include "product.cuh"

namespace sparge::route {

// Standing of a key block for all rows: number of its keys, 0 where none can be seen, and a bit where it is forced.
constexpr u32 kStandsForced = 0x80;
SPARGE_DEVICE i32 keys_in(u8 standing) { return standing & (kStandsForced - 1); }

// Key of a key block in a row: nothing to see, forced, or its rank.
constexpr u32 kUnseen = 0, kForced = 1, kLeastRanked = 2;

// Order-preserving map of float32 to u32; every number maps to a rank.
SPARGE_DEVICE u32 sortable(float score) {
  const u32 bits = __float_as_uint(score);
  return larger(kLeastRanked, bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}
SPARGE_DEVICE float unsortable(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

SPARGE_DEVICE void load_means(Vectors& q_mean, const RouteParams& p, i64 q_at, i32 rows) {
#pragma unroll
  for (int pass = 0; pass < kMaxRows * kHeadDim / kThreads; ++pass) {
    const i32 i = pass * kThreads + threadIdx.x, row = i / kHeadDim;
    q_mean.set(row, i % kHeadDim, row < rows ? p.q_block_mean[q_at * kHeadDim + i] * p.score_scale : 0.0f);
  }
}

// scores[r * score_pitch + j]: natural log of the block's mass, up to a constant a row. Without upstream's semantics a block of n
// keys counts n / 64.
SPARGE_DEVICE void score_mass(const RouteParams& p, const Vectors& q_mean, float* scores, const u8* standing, i32 kv_at,
                              i32 rows) {
  const i32 key_blocks = p.problem.key_blocks();
  const float* means = p.k_block_mean + static_cast<i64>(kv_at) * kHeadDim * key_blocks;
  over_shares(key_blocks, [&](const Share& share) {
    Products dots = {};
    multiply(dots, share, q_mean, means, key_blocks);
    float weight[kLaneColumns] = {};
    if (!p.upstream) {
      u8 stands[kLaneColumns];
      load_columns(stands, standing, share, key_blocks);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i)
        weight[i] = kLn2 * ptx::log2_approx(static_cast<float>(keys_in(stands[i])) / static_cast<float>(kKeyBlock));
    }
    each_row(share, scores, p.score_pitch, rows, key_blocks, [&](i32 h, float (&log_mass)[kLaneColumns]) {
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) log_mass[i] = product_at(dots, h, i) + weight[i];
    });
  });
}

}  // namespace sparge::route
