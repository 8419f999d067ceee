// SPDX-License-Identifier: Apache-2.0
// Products of float32 vectors with float32 columns on tensor cores: each number as a sum of two TF32, three products of four.
// What is left out is 2^-22 of a term, next to which float32 sums of head_dim terms round as much.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"
#include "../ptx/mma.cuh"

namespace sparge::route {

constexpr int kMaxRows = 32;  // query blocks that share each read of the K means from the L2
constexpr int kTileRows = 16;
constexpr int kRowTiles = kMaxRows / kTileRows;
constexpr int kWarps = kMaxRows / 2;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlocksPerSm = 1;  // 128 registers a thread

struct Split {
  u32 high, low;
};
SPARGE_DEVICE Split split(float x) {
  const u32 high = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;  // 11 bits; the tensor cores read no more of `low` either
  return {high, __float_as_uint(x - __uint_as_float(high))};
}

// One vector a row, split. Eight lanes read 16 bytes each from two rows: 16 banks apart.
struct Vectors {
  static constexpr int kPitch = kHeadDim + 16;
  alignas(16) u32 high[kMaxRows][kPitch];
  alignas(16) u32 low[kMaxRows][kPitch];

  SPARGE_DEVICE void set(i32 row, i32 channel, float x) {
    const Split parts = split(x);
    high[row][channel] = parts.high, low[row][channel] = parts.low;
  }
  SPARGE_DEVICE float get(i32 row, i32 channel) const {
    return __uint_as_float(high[row][channel]) + __uint_as_float(low[row][channel]);
  }
};

// d += a b, where a holds rows of 16 vectors and b eight columns.
SPARGE_DEVICE void multiply_add(float (&d)[4], const Split (&a)[4], const Split& b0, const Split& b1) {
  const u32 high[4] = {a[0].high, a[1].high, a[2].high, a[3].high};
  const u32 low[4] = {a[0].low, a[1].low, a[2].low, a[3].low};
  ptx::mma_m16n8k8_tf32(d, low, b0.high, b1.high);
  ptx::mma_m16n8k8_tf32(d, high, b0.low, b1.low);
  ptx::mma_m16n8k8_tf32(d, high, b0.high, b1.high);
}

// `use(r, j, dot)` with the product of vector r < rows and column j of a (head_dim, key_blocks) matrix, for all of them.
template <typename Use>
SPARGE_DEVICE void multiply_rows(const Vectors& vectors, i32 rows, const float* columns, i32 key_blocks, Use&& use) {
  constexpr int kColumnTiles = 2;
  constexpr int kColumns = 8 * kColumnTiles;
  const i32 lane = threadIdx.x % kWarpSize, group = lane / 4, quad = lane % 4;
  for (int first = threadIdx.x / kWarpSize * kColumns; first < key_blocks; first += kWarps * kColumns) {
    float sum[kRowTiles][kColumnTiles][4] = {};
    const float* column[kColumnTiles];
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
      column[n] = columns + smaller(first + 8 * n + group, key_blocks - 1) + static_cast<i64>(4 * quad) * key_blocks;
    // A lane has four neighbouring channels of every sixteen: two for each of two products.
#pragma unroll 2
    for (int c = 0; c < kHeadDim; c += 16) {
      float x[kColumnTiles][4];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = column[n][static_cast<i64>(c + i) * key_blocks];
      Split b[kColumnTiles][4];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) b[n][i] = split(x[n][i]);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (m * kTileRows >= rows) continue;
        u32 high[2][4], low[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const i32 row = m * kTileRows + 8 * h + group;
          const Vec16 highs = *reinterpret_cast<const Vec16*>(&vectors.high[row][c + 4 * quad]);
          const Vec16 lows = *reinterpret_cast<const Vec16*>(&vectors.low[row][c + 4 * quad]);
          high[h][0] = highs.x, high[h][1] = highs.y, high[h][2] = highs.z, high[h][3] = highs.w;
          low[h][0] = lows.x, low[h][1] = lows.y, low[h][2] = lows.z, low[h][3] = lows.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const Split a[4] = {
              {high[0][i], low[0][i]}, {high[1][i], low[1][i]}, {high[0][i + 1], low[0][i + 1]}, {high[1][i + 1], low[1][i + 1]}};
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) multiply_add(sum[m][n], a, b[n][i], b[n][i + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const i32 j = first + 8 * n + 2 * quad + i;
        if (j >= key_blocks) continue;
        auto use_column = use(j);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const i32 row = m * kTileRows + 8 * h + group;
            if (row < rows) use_column(row, sum[m][n][2 * h + i]);
          }
      }
  }
}

}  // namespace sparge::route
