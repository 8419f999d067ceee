// SPDX-License-Identifier: Apache-2.0
// Pseudo-keys: the mean of each block as one row of a K tile, one column of a V tile. 64 blocks make a tile, which looks
// like a tile of keys to attend, but each pseudo-key has a scale of its own: block means differ more than keys of a block.
#pragma once

#include "../common/int8.cuh"
#include "../common/swizzle.cuh"
#include "block_stats.cuh"
#include "key_order.cuh"

namespace sparge::quantize {

SPARGE_DEVICE i64 pool_tile_at(const Problem& problem, i32 head_at, i32 block) {
  return static_cast<i64>(head_at) * problem.pool_tiles() + block / kKeyBlock;
}

SPARGE_DEVICE u16 sixteen_bits(float x) {
  return static_cast<u16>(kElement == Element::kBf16 ? ptx::pack_bf16(x, 0.0f) : ptx::pack_fp16(x, 0.0f));
}

// Thread c < kHeadDim holds channel c of the block's mean key. The last block clears the rows after it: what a scale of 0
// multiplies must be a number.
SPARGE_DEVICE void pool_key(const QuantizeParams& p, const Thread& thread, i32 head_at, i32 block, i32 count, float mean) {
  const i64 tile_at = pool_tile_at(p.problem, head_at, block);
  const i32 row = block % kKeyBlock, channel = threadIdx.x;
  constexpr int kRowBytes = kHeadDim * key_bytes(kElement);
  u8* tile = p.pool_k + tile_at * (kKeyBlock * kRowBytes);
  if (block == p.problem.key_blocks() - 1)
    for (i32 byte = (row + 1) * kRowBytes + 16 * threadIdx.x; byte < kKeyBlock * kRowBytes; byte += 16 * kThreads)
      *reinterpret_cast<Vec16*>(tile + byte) = {};  // swizzled chunks stay in their row
  float scale = 1.0f;
  if constexpr (is_quantized(kElement)) {
    constexpr int kMeanWarps = kHeadDim / kWarpSize;
    __shared__ float most[kMeanWarps];
    const float of_warp = lane_max<1, kWarpSize>(fabsf(mean));
    if (thread.lane == 0 && thread.warp < kMeanWarps) most[thread.warp] = of_warp;
    __syncthreads();
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kMeanWarps; ++w) largest = fmaxf(largest, most[w]);
    scale = int8_scale(largest);
    const float one[4] = {mean, 0.0f, 0.0f, 0.0f};
    if (channel < kHeadDim)
      tile[tile_offset<kRowBytes>(row, channel / 16) + channel % 16] =
          static_cast<u8>(pack_int8(one, int8_inverse_scale(largest)));
  } else if (channel < kHeadDim) {
    reinterpret_cast<u16*>(tile + tile_offset<kRowBytes>(row, channel / 8))[channel % 8] = sixteen_bits(mean);
  }
  if (threadIdx.x == 0) p.pool_columns[tile_at * kKeyBlock + row] = {scale, log2f(static_cast<float>(count))};
}

// Thread c < kHeadDim holds channel c of the block's mean value, in units of v_scale. The last block clears the columns
// after it: what a probability of 0 multiplies must be a number.
SPARGE_DEVICE void pool_value(const QuantizeParams& p, i32 head_at, i32 block, float mean) {
  constexpr int kBytes = value_bytes(kElement);
  constexpr int kRowBytes = kKeyBlock * kBytes;
  const i32 channel = threadIdx.x;
  if (channel >= kHeadDim) return;
  u8* tile = p.pool_v + pool_tile_at(p.problem, head_at, block) * (kHeadDim * kRowBytes);
  auto store = [&](i32 column, float x) {
    const i32 byte = position_of(column) * kBytes;
    u8* at = tile + tile_offset<kRowBytes>(channel, byte / 16) + byte % 16;
#if SPARGE_ARCH >= 89
    if constexpr (kElement == Element::kInt8E4M3) {
      *at = static_cast<u8>(ptx::pack_e4m3(x, 0.0f));
      return;
    }
#endif
    *reinterpret_cast<u16*>(at) = sixteen_bits(x);
  };
  store(block % kKeyBlock, mean);
  if (block == p.problem.key_blocks() - 1)
    for (i32 column = block % kKeyBlock + 1; column < kKeyBlock; ++column) store(column, 0.0f);
}

}  // namespace sparge::quantize
