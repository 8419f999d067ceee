// SPDX-License-Identifier: Apache-2.0
// Output of attention over block means alone: sums of V means by each row's share of the mass.
#pragma once

#include "pairs.cuh"

namespace sparge::route {

constexpr int kKeyGroups = 4;  // groups of warps that share out steps of kKeyStep key blocks
constexpr int kChannelGroups = kWarps / kKeyGroups;
constexpr int kKeyStep = 16;
constexpr int kTiles = kHeadDim / kChannelGroups / kTileColumns;  // of a warp, which splits its weights once for all of them
constexpr int kLaneWords = kTiles / 2;                            // of a lane's neighbouring channels of a key block

// Sums of two groups of warps. Rows are four banks apart, so that eight lanes of a store, two rows of four, hit all banks.
struct Sums {
  static constexpr int kPitch = kHeadDim + 4;
  alignas(16) float of_group[2][kMaxRows * kPitch];
};

SPARGE_DEVICE void load_channels(u32 (&words)[kLaneWords], const u16* at) {
  if constexpr (kLaneWords == 2) {
    const Vec8 two = *reinterpret_cast<const Vec8*>(at);
    words[0] = two.x, words[1] = two.y;
  } else {
    words[0] = *reinterpret_cast<const u32*>(at);
  }
}

// Partial sums of weights[r][j] V_j; rows of weights are `pitch` apart. Two groups store in `one`, two in `other`, where weights
// may lie. Tile t has channel t of every kTiles, so that a lane loads neighbours.
SPARGE_DEVICE void pool_outputs(const u16* values, const float* weights, i32 pitch, Sums& one, Sums& other, i32 rows,
                                i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, group = lane / 4, quad = lane % 4;
  const i32 key_group = warp / kChannelGroups, first_channel = warp % kChannelGroups * kTiles * kTileColumns;
  const u16* channels = values + first_channel + kTiles * group;
  const float* row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row[h] = weights + smaller(8 * h + group, rows - 1) * pitch + 2 * quad;
  float sum[kTiles][4] = {};
  u32 x[2][4][kLaneWords];
  // A lane's key blocks of a step are two and two, like its weights.
  auto load = [&](u32(&four)[4][kLaneWords], i32 start) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_channels(four[i], channels + smaller(start + 2 * quad + i / 2 * 8 + i % 2, key_blocks - 1) * kHeadDim);
  };
  load(x[0], kKeyStep * key_group);
#pragma unroll 1
  for (i32 base = kKeyStep * key_group; base < key_blocks; base += 2 * kKeyStep * kKeyGroups)
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const i32 start = base + step * kKeyStep * kKeyGroups;
      if (start >= key_blocks) continue;
      load(x[1 - step], start + kKeyStep * kKeyGroups);
      u32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float two[2];
        load_floats(two, row[i % 2] + start + i / 2 * 8);
        const SplitPair parts(two[0], two[1]);
        high[i] = parts.high, low[i] = parts.low;
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        auto pair = [&](int half) {
          return __byte_perm(x[step][2 * half][tile / 2], x[step][2 * half + 1][tile / 2], tile % 2 ? 0x7632 : 0x5410);
        };
        const u32 first = pair(0), second = pair(1);
        ptx::mma_m16n8k16_bf16(sum[tile], low, first, second);
        ptx::mma_m16n8k16_bf16(sum[tile], high, first, second);
      }
    }
  __syncthreads();
  float* sums = (key_group < 2 ? one : other).of_group[key_group % 2] + first_channel + 2 * kTiles * quad;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 2 * kTiles; i += 4) {
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = sum[(i + j) % kTiles][2 * h + (i + j) / kTiles];
      store_floats(sums + (8 * h + group) * Sums::kPitch + i, four);
    }
}

}  // namespace sparge::route
