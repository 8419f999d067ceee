// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 vectors with the bf16 columns of a head, on tensor cores. Each number of a vector is the sum of two bf16
// numbers, which leaves out 2^-16 of it; columns are off by 2^-8. (product.cuh multiplies float32 columns.)
#pragma once

#include "../ptx/convert.cuh"
#include "product.cuh"

namespace sparge::route {

// Two neighbouring numbers as sums of two bf16 pairs.
struct SplitPair {
  u32 high, low;

  SPARGE_DEVICE SplitPair(float even, float odd)
      : high(ptx::pack_bf16(even, odd)),
        low(ptx::pack_bf16(even - __uint_as_float(high << 16), odd - __uint_as_float(high & 0xFFFF0000u))) {}
};

// 16 vectors in the order of the products' first operand: a lane reads the eight numbers of a product as one. It has eight
// neighbouring channels of every 32, four for each of two products, as it has of a column.
struct PairVectors {
  static constexpr int kPitch = 4 * kWarpSize + 16;  // from the words of one product to those of the next
  alignas(16) u32 high[kHeadDim / 16 * kPitch];
  alignas(16) u32 low[kHeadDim / 16 * kPitch];

  // Sets a channel and the one after it.
  SPARGE_DEVICE void set(i32 row, i32 channel, const SplitPair& parts) {
    const i32 product = channel / 32 * 2 + channel % 8 / 4, lane = row % 8 * 4 + channel % 32 / 8;
    const i32 at = product * kPitch + 4 * lane + channel % 4 / 2 * 2 + row / 8;
    high[at] = parts.high, low[at] = parts.low;
  }
};

SPARGE_DEVICE void multiply(Products& sum, const Share& share, const PairVectors& vectors, const u16* columns, i32 key_blocks) {
  const u16* column[kColumnTiles];
#pragma unroll
  for (int tile = 0; tile < kColumnTiles; ++tile)
    column[tile] = columns + static_cast<i64>(smaller(share.operand_column(tile), key_blocks - 1)) * kHeadDim + 8 * share.quad;
  const i32 place = 4 * (ptx::thread_index() % kWarpSize);
#pragma unroll kSteps
  for (int c = 0; c < kHeadDim; c += 32) {
    u32 x[kColumnTiles][4];
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const Vec16 words = *reinterpret_cast<const Vec16*>(column[tile] + c);
      x[tile][0] = words.x, x[tile][1] = words.y, x[tile][2] = words.z, x[tile][3] = words.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i32 at = (c / 16 + i) * PairVectors::kPitch + place;
      const Vec16 highs = *reinterpret_cast<const Vec16*>(vectors.high + at);
      const Vec16 lows = *reinterpret_cast<const Vec16*>(vectors.low + at);
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) {
        ptx::mma_m16n8k16_bf16(sum[tile], {lows.x, lows.y, lows.z, lows.w}, x[tile][2 * i], x[tile][2 * i + 1]);
        ptx::mma_m16n8k16_bf16(sum[tile], {highs.x, highs.y, highs.z, highs.w}, x[tile][2 * i], x[tile][2 * i + 1]);
      }
    }
  }
}

}  // namespace sparge::route
