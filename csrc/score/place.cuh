// SPDX-License-Identifier: Apache-2.0
// Which rows a thread block scores, and how its shared memory is laid out.
#pragma once

#include "../common/split.cuh"
#include "../params.cuh"

namespace sparge::score {

constexpr int kMaxRows = 16;          // of a thread block: those of one product on tensor cores
constexpr int kWarps = kHeadDim / 8;  // each has eight channels of the pooled values
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = kHeadDim == 128 ? 1 : 3;
constexpr int kMostDensities = 32;  // bits of `ends`

using Queries = SplitVectors<kMaxRows>;

// Some rows of one sampled query block, for one router.
struct Place {
  i32 b, head, head_at, router, block;
  i32 first, rows;  // of the head

  SPARGE_DEVICE i64 kv_at(const ScoreParams& p) const { return static_cast<i64>(b) * p.kv_heads + head / (p.heads / p.kv_heads); }
};

SPARGE_DEVICE Place place_at(const ScoreParams& p, i32 index) {
  const i32 rows_a_block = p.rows / p.blocks, groups = ceil_div(rows_a_block, p.rows_per_cta);
  const i32 first = index % groups * p.rows_per_cta, block = index / groups % p.blocks;
  index /= groups * p.blocks;
  const i32 head_at = index / p.routers;
  return {head_at / p.heads,
          head_at % p.heads,
          head_at,
          index % p.routers,
          block,
          block * rows_a_block + first,
          smaller(p.rows_per_cta, rows_a_block - first)};
}

// Dynamic shared memory; sparge/launch_score.py counts it.
struct Shared {
  // Queries, in parts, until the logits stand; then the pooled values of each density and row.
  Queries* queries;
  float* pooled;
  float* weights;  // a row of `pitch` for each row: logits, then weights
  float* bias;     // of each place in the list: log2 of the keys of its block
  u16* list;       // key blocks, see buckets.cuh
  i32 pitch;

  SPARGE_DEVICE Shared(const ScoreParams& p, float* start) : queries(reinterpret_cast<Queries*>(start)), pooled(start) {
    const i32 pooled_numbers = (p.densities - 1) * p.rows_per_cta * kHeadDim;
    pitch = (p.room + 15) / 16 * 16 + 8;  // eight lanes' rows of two numbers each are 8 or 24 banks apart
    weights = start + larger<i32>(pooled_numbers, sizeof(Queries) / sizeof(float));
    bias = weights + p.rows_per_cta * pitch;
    list = reinterpret_cast<u16*>(bias + p.room);
  }

  SPARGE_DEVICE float* pooled_row(const ScoreParams& p, i32 density, i32 row) const {
    return pooled + (density * p.rows_per_cta + row) * kHeadDim;
  }
};

}  // namespace sparge::score
