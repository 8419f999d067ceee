// SPDX-License-Identifier: Apache-2.0
// Pooled keys: the mean of each block as one row of a K tile and one column of a V tile. 64 blocks make a tile, which looks
// like a tile of keys to attend. But each pooled key has a scale of its own, as block means differ more than keys of a block.
#pragma once

#include "../common/balance.cuh"
#include "../common/int8.cuh"
#include "../common/key_tile.cuh"
#include "block_stats.cuh"
#include "key_order.cuh"

namespace sparge::quantize {

SPARGE_DEVICE u16 sixteen_bits(float x) {
  return static_cast<u16>(kElement == Element::kBf16 ? ptx::pack_bf16(x, 0.0f) : ptx::pack_fp16(x, 0.0f));
}

// Mean key of a block, from a warp whose lanes hold neighbouring channels. factor: of the channels where they are balanced. The last block clears the rows after it: a scale of 0
// must multiply numbers.
SPARGE_DEVICE void pool_key(const QuantizeParams& p, const Run& run, i32 lane, i32 block, const float (&mean)[kLaneShare],
                            const float* factor) {
  const i64 tile_at = run.pool_tile_at(block);
  const i32 row = block % kKeyBlock, channel = lane * kLaneShare;
  constexpr int kBytes = key_bytes(kElement), kTileBytes = kKeyBlock * kKeyRowBytes, kPartBytes = kTileBytes / kKeyParts;
  u8* tile = p.pool_k + tile_at * kTileBytes;
  if (block == run.blocks - 1)
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
#pragma unroll 1
      for (i32 byte = (row + 1) * kKeyPartRowBytes + 16 * lane; byte < kPartBytes; byte += 16 * kWarpSize)
        *reinterpret_cast<Vec16*>(tile + part * kPartBytes + byte) = {};  // swizzled chunks stay in their row
  float scale = 1.0f;
  u8* at = tile + key_offset<kKeyBlock>(row, channel * kBytes / 16) + channel * kBytes % 16;
  if constexpr (is_quantized(kElement)) {
    float largest = 0.0f, four[4] = {}, rotated[kLaneShare];
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) rotated[i] = factor ? mean[i] * factor[channel + i] : mean[i];
    if (factor) rotate_lanes(rotated, lane);
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) largest = fmaxf(largest, fabsf(rotated[i])), four[i] = rotated[i];
    largest = lane_max<1, kWarpSize>(largest);
    scale = int8_scale(largest);
    const u32 levels = pack_int8(four, int8_inverse_scale(largest));
    if constexpr (kLaneShare == 4)
      *reinterpret_cast<u32*>(at) = levels;
    else
      *reinterpret_cast<u16*>(at) = static_cast<u16>(levels);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) reinterpret_cast<u16*>(at)[i] = sixteen_bits(mean[i]);
  }
  if (lane == 0) p.pool_columns[tile_at * kKeyBlock + row].scale = scale;
}

// By one thread.
SPARGE_DEVICE void pool_bias(const QuantizeParams& p, const Run& run, i32 block, i32 count) {
  p.pool_columns[run.pool_tile_at(block) * kKeyBlock + block % kKeyBlock].bias = log2f(static_cast<float>(count));
}

// Mean value of a block likewise, in units of v_scale. INT8 values of each pooled key have a scale of their own, which is 1 where the
// largest is kValueLevels. The last block clears the columns after it: a probability of 0 must
// multiply numbers.
SPARGE_DEVICE void pool_value(const QuantizeParams& p, const Run& run, i32 lane, i32 block, const float (&mean)[kLaneShare]) {
  constexpr int kBytes = value_bytes(kElement), kRowBytes = kKeyBlock * kBytes;
  u8* tile = p.pool_v + run.pool_tile_at(block) * (kHeadDim * kRowBytes);
  float inverse_step = 0.0f;
  if constexpr (kElement == Element::kInt8Int8) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) largest = fmaxf(largest, fabsf(mean[i]));
    const float scale = fmaxf(lane_max<1, kWarpSize>(largest) * (1.0f / kValueLevels), kLeastPoolScale);
    inverse_step = 1.0f / (scale * kPoolValueStep);
    if (lane == 0) p.pool_value_scale[run.pool_tile_at(block) * kKeyBlock + block % kKeyBlock] = scale;
  }
  // A lane's rows differ in bits that the first does not have.
  const u32 first_row = tile_offset<kRowBytes>(lane * kLaneShare, 0);
  auto store = [&](int i, i32 column, float x) {
    const i32 byte = position_of(column) * kBytes;
    u8* at = tile + (first_row ^ tile_offset<kRowBytes>(i, byte / 16)) + byte % 16;
    if constexpr (kElement == Element::kInt8Int8) {
      *at = static_cast<u8>(int8_level(x, inverse_step));
      return;
    }
#if SPARGE_ARCH >= 89
    if constexpr (kElement == Element::kInt8E4M3) {
      *at = static_cast<u8>(ptx::pack_e4m3(x, 0.0f));
      return;
    }
#endif
    *reinterpret_cast<u16*>(at) = sixteen_bits(x);
  };
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) store(i, block % kKeyBlock, mean[i]);
  if (block == run.blocks - 1)
#pragma unroll 1
    for (i32 column = block % kKeyBlock + 1; column < kKeyBlock; ++column)
#pragma unroll 1
      for (int i = 0; i < kLaneShare; ++i) store(i, column, 0.0f);
}

}  // namespace sparge::quantize
