// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 float32 vectors with every float32 column of a head, on tensor cores.
#pragma once

#include "../common/split.cuh"
#include "../params.cuh"

namespace sparge::route {

constexpr int kMaxRows = 16;      // query blocks that share a product, and each read of the K means from the L2
constexpr int kWarps = kMaxRows;  // each selects for one query block
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = 1024 / kThreads;  // 64 registers a thread: every phase waits for latencies, so warps count most
constexpr int kColumns = 8;
constexpr int kSteps = kArch < 100 ? 2 : 1;  // of 16 channels at once; ptxas spills with two on later ones

// One vector a row, split. Eight lanes read 16 bytes each from two rows: 16 banks apart.
struct Vectors {
  static constexpr int kPitch = kHeadDim + 16;
  alignas(16) u32 high[kMaxRows][kPitch];
  alignas(16) u32 low[kMaxRows][kPitch];

  SPARGE_DEVICE void set(i32 row, i32 channel, float x) {
    const Split parts = split(x);
    high[row][channel] = parts.high, low[row][channel] = parts.low;
  }
};

// A warp's share of a product: 16 rows of vectors with kColumns columns, each head_dim numbers in a row.
struct Share {
  i32 first_column;
  i32 group = threadIdx.x % kWarpSize / 4, quad = threadIdx.x % 4;

  SPARGE_DEVICE i32 row(i32 i) const { return 8 * (i / 2) + group; }
  SPARGE_DEVICE i32 column(i32 i) const { return first_column + 2 * quad + i % 2; }
};

using Products = float[4];  // of row(i) and column(i) of a share

// A lane has four neighbouring channels of every sixteen: two for each of two products.
SPARGE_DEVICE void multiply(Products& sum, const Share& share, const Vectors& vectors, const float* columns, i32 key_blocks) {
  const i32 channel = 4 * share.quad;
  const float* column =
      columns + static_cast<i64>(smaller(share.first_column + share.group, key_blocks - 1)) * kHeadDim + channel;
#pragma unroll kSteps
  for (int c = 0; c < kHeadDim; c += 16) {
    const Vec16 four = *reinterpret_cast<const Vec16*>(column + c);
    const float x[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z), __uint_as_float(four.w)};
    u32 high[2][4], low[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Vec16 highs = *reinterpret_cast<const Vec16*>(&vectors.high[share.row(2 * h)][c + channel]);
      const Vec16 lows = *reinterpret_cast<const Vec16*>(&vectors.low[share.row(2 * h)][c + channel]);
      high[h][0] = highs.x, high[h][1] = highs.y, high[h][2] = highs.z, high[h][3] = highs.w;
      low[h][0] = lows.x, low[h][1] = lows.y, low[h][2] = lows.z, low[h][3] = lows.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Split a[4] = {
          {high[0][i], low[0][i]}, {high[1][i], low[1][i]}, {high[0][i + 1], low[0][i + 1]}, {high[1][i + 1], low[1][i + 1]}};
      multiply_add(sum, a, split(x[i]), split(x[i + 1]));
    }
  }
}

// `body(share)` for all columns, spread over the warps.
template <typename Body>
SPARGE_DEVICE void over_shares(i32 key_blocks, Body&& body) {
  const i32 shares = ceil_div(key_blocks, kColumns);
  for (i32 at = threadIdx.x / kWarpSize; at < shares; at += kWarps) body(Share{at * kColumns});
}

// `use(r, i, dot)` of the products that exist.
template <typename Use>
SPARGE_DEVICE void each_product(const Share& share, const Products& dot, i32 rows, i32 key_blocks, Use&& use) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const i32 j = share.column(i);
    if (j >= key_blocks) continue;
    auto use_column = use(j);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (const i32 row = share.row(2 * h); row < rows) use_column(row, 2 * h + i, dot[2 * h + i]);
  }
}

}  // namespace sparge::route
