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

// 16 vectors, split, in the order of the first operand of products: a lane reads the four numbers of a product as one. Where
// threads write neighbouring channels of a vector, two share a bank.
struct Vectors {
  static constexpr int kPitch = 4 * kWarpSize + 16;  // from the numbers of one product to those of the next
  alignas(16) u32 high[kHeadDim / 8 * kPitch];
  alignas(16) u32 low[kHeadDim / 8 * kPitch];

  // Of a lane's four neighbouring channels of every sixteen, two for each of two products.
  SPARGE_DEVICE static i32 place(i32 row, i32 channel) {
    const i32 product = channel / 16 * 2 + channel % 4 / 2, lane = row % 8 * 4 + channel % 16 / 4;
    return product * kPitch + 4 * lane + channel % 2 * 2 + row / 8;
  }
  SPARGE_DEVICE void set(i32 row, i32 channel, float x) {
    const Split parts = split(x);
    high[place(row, channel)] = parts.high, low[place(row, channel)] = parts.low;
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

SPARGE_DEVICE void multiply(Products& sum, const Share& share, const Vectors& vectors, const float* columns, i32 key_blocks) {
  const float* column =
      columns + static_cast<i64>(smaller(share.first_column + share.group, key_blocks - 1)) * kHeadDim + 4 * share.quad;
  const i32 place = 4 * (threadIdx.x % kWarpSize);
#pragma unroll kSteps
  for (int c = 0; c < kHeadDim; c += 16) {
    const Vec16 four = *reinterpret_cast<const Vec16*>(column + c);
    const float x[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z), __uint_as_float(four.w)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i32 at = (c / 8 + i) * Vectors::kPitch + place;
      const Vec16 highs = *reinterpret_cast<const Vec16*>(vectors.high + at);
      const Vec16 lows = *reinterpret_cast<const Vec16*>(vectors.low + at);
      multiply_add(sum, {highs.x, highs.y, highs.z, highs.w}, {lows.x, lows.y, lows.z, lows.w}, split(x[2 * i]),
                   split(x[2 * i + 1]));
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
