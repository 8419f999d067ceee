// SPDX-License-Identifier: Apache-2.0
// Which rows a thread block scores, and how its shared memory is laid out.
#pragma once

#include "../common/split.cuh"
#include "../params.cuh"

namespace sparge::score {

constexpr int kMaxRows = 16;          // of a thread block: those of one product on tensor cores
constexpr int kWarps = kHeadDim / 8;  // a warp has eight channels of the pooled values
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = kHeadDim == 128 ? 1 : 3;
constexpr int kMostDensities = 32;  // lanes, each of which knows a part

// Some rows of one measured query block.
struct Place {
  i32 b, head, head_at, block;
  i32 first, rows;  // of the head

  SPARGE_DEVICE i64 kv_at(const ScoreParams& p) const { return static_cast<i64>(b) * p.kv_heads + head / (p.heads / p.kv_heads); }
};

SPARGE_DEVICE Place place_at(const ScoreParams& p, i32 index) {
  const i32 rows_a_block = p.rows / p.blocks, groups = ceil_div(rows_a_block, p.rows_per_cta);
  const i32 first = index % groups * p.rows_per_cta, block = index / groups % p.blocks;
  const i32 head_at = index / (groups * p.blocks);
  return {head_at / p.heads,
          head_at % p.heads,
          head_at,
          block,
          block * rows_a_block + first,
          smaller(p.rows_per_cta, rows_a_block - first)};
}

// The queries of a thread block as the tensor cores take them, in two parts: for every eight channels a lane's four numbers lie
// side by side. Of every sixteen channels of a mean a lane loads four, of which a product takes two.
struct Queries {
  alignas(16) u32 high[kHeadDim / 8][kWarpSize][4];
  alignas(16) u32 low[kHeadDim / 8][kWarpSize][4];

  // `row` is one of the operand.
  SPARGE_DEVICE void set(i32 row, i32 channel, float x) {
    const i32 step = channel / 16 * 2 + channel % 4 / 2, lane = row % 8 * 4 + channel % 16 / 4, i = row / 8 + channel % 2 * 2;
    const Split parts = split(x);
    high[step][lane][i] = parts.high, low[step][lane][i] = parts.low;
  }
};

// Dynamic shared memory; sparge/stages/measuring.py counts it.
struct Shared {
  // Queries until all logits are known; then the pooled values of each density and row.
  Queries* queries;
  float* pooled;
  float* weights;  // logits, then weights: lines of two rows, whose numbers alternate, as a lane needs both, or of a lone row
  float* bias;     // for each place in the list: log2 of the number of keys of its block
  u16* list;       // key blocks, see buckets.cuh
  i32 pitch;       // places of a line
  i32 lines;       // row r is in line r or r - lines, and in row r or r - lines + 8 of an operand
  bool alone;      // one row

  SPARGE_DEVICE Shared(const ScoreParams& p, float* start) : queries(reinterpret_cast<Queries*>(start)), pooled(start) {
    const i32 pooled_numbers = (p.densities - 1) * p.rows_per_cta * kHeadDim;
    pitch = (p.room + 15) / 16 * 16 + 8;  // neighbouring lines are 16 banks apart
    lines = (p.rows_per_cta + 1) / 2;
    alone = p.rows_per_cta == 1;
    weights = start + larger<i32>(pooled_numbers, sizeof(Queries) / sizeof(float));
    bias = weights + width() * lines * pitch;
    list = reinterpret_cast<u16*>(bias + p.room);
  }

  SPARGE_DEVICE i32 width() const { return alone ? 1 : 2; }
  // The last line stands for those past it, of which nothing is used.
  SPARGE_DEVICE float* line(i32 index) const { return weights + width() * smaller(index, lines - 1) * pitch; }
  // A row, whose numbers are `width` apart.
  SPARGE_DEVICE float* row(i32 row) const { return row < lines ? line(row) : line(row - lines) + 1; }
  // Which row has row 8 h + i of an operand.
  SPARGE_DEVICE i32 row_of(i32 h, i32 i) const { return i < lines ? h * lines + i : kMaxRows; }

  SPARGE_DEVICE float* pooled_row(const ScoreParams& p, i32 density, i32 row) const {
    return pooled + (density * p.rows_per_cta + row) * kHeadDim;
  }
};

}  // namespace sparge::score
