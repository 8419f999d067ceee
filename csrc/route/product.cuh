// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 float32 vectors with every float32 column of a head, on tensor cores.
#pragma once

#include "../common/floats.cuh"
#include "../common/split.cuh"
#include "../params.cuh"
#include "../ptx/special.cuh"

namespace sparge::route {

constexpr int kMaxRows = 16;      // query blocks that share a product, and each read of the K means from the L2
constexpr int kWarps = kMaxRows;  // a warp selects for one query block
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = 1024 / kThreads;          // 64 registers a thread, for many warps: every phase waits for latencies
constexpr int kColumnTiles = kHeadDim == 128 ? 2 : 1;  // tiles that share each read of the vectors
constexpr int kTileColumns = 8;
constexpr int kColumns = kTileColumns * kColumnTiles;
constexpr int kLaneColumns = 2 * kColumnTiles;
constexpr int kSteps = (kArch < 100 ? 4 : 2) / kColumnTiles;  // of 16 channels, unrolled; from sm_100 on as many as were tried

// 16 vectors, split, in the order of the products' first operand: a lane reads the four numbers of a product as one. Threads that
// write neighbouring channels of a vector share a bank two by two.
struct Vectors {
  static constexpr int kPitch = 4 * kWarpSize + 16;  // from the numbers of one product to those of the next
  alignas(16) u32 high[kHeadDim / 8 * kPitch];
  alignas(16) u32 low[kHeadDim / 8 * kPitch];

  // A lane has four neighbouring channels of every sixteen, two for each of two products.
  SPARGE_DEVICE static i32 place(i32 row, i32 channel) {
    const i32 product = channel / 16 * 2 + channel % 4 / 2, lane = row % 8 * 4 + channel % 16 / 4;
    return product * kPitch + 4 * lane + channel % 2 * 2 + row / 8;
  }
  SPARGE_DEVICE void set(i32 row, i32 channel, float x) {
    const Split parts = split(x);
    high[place(row, channel)] = parts.high, low[place(row, channel)] = parts.low;
  }
};

// A warp's share of a product: 16 rows of vectors with kColumns columns, each head_dim numbers in a row. A lane's results are
// neighbouring columns, two of each tile.
struct Share {
  i32 first_column;
  i32 group = threadIdx.x % kWarpSize / 4, quad = threadIdx.x % 4;

  SPARGE_DEVICE i32 row(i32 h) const { return 8 * h + group; }
  SPARGE_DEVICE i32 column() const { return first_column + kLaneColumns * quad; }
  // The column whose channels the lane multiplies.
  SPARGE_DEVICE i32 operand_column(i32 tile) const { return first_column + group / 2 * kLaneColumns + 2 * tile + group % 2; }
};

using Products = float[kColumnTiles][4];
SPARGE_DEVICE float product_at(const Products& of, i32 h, i32 i) { return of[i / 2][2 * h + i % 2]; }  // of row(h), column() + i

// A lane has four neighbouring channels of every sixteen: two for each of two products.
SPARGE_DEVICE void multiply(Products& sum, const Share& share, const Vectors& vectors, const float* columns, i32 key_blocks) {
  const float* column[kColumnTiles];
#pragma unroll
  for (int tile = 0; tile < kColumnTiles; ++tile)
    column[tile] = columns + static_cast<i64>(smaller(share.operand_column(tile), key_blocks - 1)) * kHeadDim + 4 * share.quad;
  const i32 place = 4 * (ptx::thread_index() % kWarpSize);
#pragma unroll kSteps
  for (int c = 0; c < kHeadDim; c += 16) {
    float x[kColumnTiles][4];
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) load_floats(x[tile], column[tile] + c);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i32 at = (c / 8 + i) * Vectors::kPitch + place;
      const Vec16 highs = *reinterpret_cast<const Vec16*>(vectors.high + at);
      const Vec16 lows = *reinterpret_cast<const Vec16*>(vectors.low + at);
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile)
        multiply_add(sum[tile], {highs.x, highs.y, highs.z, highs.w}, {lows.x, lows.y, lows.z, lows.w}, split(x[tile][2 * i]),
                     split(x[tile][2 * i + 1]));
    }
  }
}

// A lane's numbers of its columns; the last one stands for columns after it.
template <typename T>
SPARGE_DEVICE void load_columns(T (&facts)[kLaneColumns], const T* of_head, const Share& share, i32 key_blocks) {
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) facts[i] = of_head[smaller(share.column() + i, key_blocks - 1)];
}

// Calls `body(share)` for all columns, spread over the warps.
template <typename Body>
SPARGE_DEVICE void over_shares(i32 key_blocks, Body&& body) {
  for (i32 first = threadIdx.x / kWarpSize * kColumns; first < key_blocks; first += kWarps * kColumns) body(Share{first});
}

// Numbers of a row from a lane's first column on, in one load.
struct alignas(sizeof(float) * kLaneColumns) Columns {
  float at[kLaneColumns];
};

// Calls `use(h, columns)` for the rows of `scores` that exist. They have room for the columns of whole lanes.
template <typename Use>
SPARGE_DEVICE void each_row(const Share& share, float* scores, i32 pitch, i32 rows, i32 key_blocks, Use&& use) {
  if (share.column() >= key_blocks) return;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (share.row(h) < rows) {
      Columns& numbers = *reinterpret_cast<Columns*>(scores + share.row(h) * pitch + share.column());
      Columns columns = numbers;
      use(h, columns.at);
      numbers = columns;
    }
}

}  // namespace sparge::route
