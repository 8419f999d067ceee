// SPDX-License-Identifier: Apache-2.0
// One block of 64 values, transposed: a swizzled tile of head_dim rows x 64 keys, one scale a channel.
#pragma once

#include "../common/swizzle.cuh"
#include "pool.cuh"

namespace sparge::quantize {

constexpr int kValueBytes = value_bytes(kElement);
constexpr int kSectorBytes = 32;  // each thread writes whole DRAM sectors of the transposed tile

struct alignas(16) ValueSmem {
  u8 rows[kKeyBlock][kHeadDim * kValueBytes];
  float mean[kHeadDim], inverse_scale[kHeadDim];  // here, because registers hold a tile that is on its way
  float sums[kWarps][kHeadDim];
  float of_warps[2][kWarps];
};

SPARGE_DEVICE void store_row(u8* row, const float (&x)[kLaneChannels]) {
#if SPARGE_ARCH >= 89
  if constexpr (kElement == Element::kInt8E4M3) {
    auto four = [&](int i) {
      return ptx::pack_e4m3(x[i], x[i + 1]) | static_cast<u32>(ptx::pack_e4m3(x[i + 2], x[i + 3])) << 16;
    };
    *reinterpret_cast<Vec8*>(row) = {four(0), four(4)};
    return;
  }
#endif
  auto pack = [](float low, float high) {
    return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
  };
  *reinterpret_cast<Vec16*>(row) = {pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
}

// Mean of each channel, its square and the variance summed over channels, in the caller's units; the mean as a pseudo-key's
// value.
SPARGE_DEVICE void value_statistics(const QuantizeParams& p, ValueSmem& smem, const Thread& thread, i32 head_at, i32 block,
                                    i32 count, const float (&sums)[kLaneChannels], const float (&squares)[kLaneChannels]) {
  const i32 blocks = p.problem.key_blocks(), channel = threadIdx.x;
  const float inverse_count = 1.0f / static_cast<float>(larger(1, count));
  const float mean = channel_sum(smem.sums, thread, sums) * inverse_count;
  __syncthreads();
  const float square = channel_sum(smem.sums, thread, squares) * inverse_count;
  float of_channel[2] = {};  // variance, squared mean
  if (channel < kHeadDim) {
    const float scale = is_quantized(kElement) ? p.v_scale[head_at * kHeadDim + channel] : 1.0f;
    p.v_block_mean[static_cast<i64>(head_at * kHeadDim + channel) * blocks + block] = mean * scale;
    of_channel[0] = fmaxf(0.0f, square - mean * mean) * scale * scale;
    of_channel[1] = mean * scale * (mean * scale);
  }
  pool_value(p, head_at, block, mean);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float of_warp = lane_sum<1, kWarpSize>(of_channel[i]);
    if (thread.lane == 0) smem.of_warps[i][thread.warp] = of_warp;
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += smem.of_warps[threadIdx.x][w];
  (threadIdx.x == 0 ? p.v_variance : p.v_square)[head_at * blocks + block] = total;
}

template <DType kType>
SPARGE_DEVICE void value_block(const QuantizeParams& p, const Rows<kType>& rows, ValueSmem& smem, i32 head_at, i32 block,
                               const KeySlots& slots) {
  const Thread thread;
  if constexpr (is_quantized(kElement)) {
    if (const i32 channel = threadIdx.x; channel < kHeadDim) {
      smem.mean[channel] = p.v_mean[head_at * kHeadDim + channel];
      smem.inverse_scale[channel] = 1.0f / p.v_scale[head_at * kHeadDim + channel];
    }
    __syncthreads();
  }
  float sums[kLaneChannels] = {}, squares[kLaneChannels] = {};  // in units of v_scale
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const i32 place = thread.token + pass * kTokensPerPass, token = slots.token(place);
    float x[kLaneChannels] = {};
    if (token >= 0) {
      rows.load(token, thread.channel, x);
      if constexpr (is_quantized(kElement)) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i)
          x[i] = (x[i] - smem.mean[thread.channel + i]) * smem.inverse_scale[thread.channel + i];
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      sums[i] += x[i];
      squares[i] += x[i] * x[i];
    }
    store_row(&smem.rows[place][thread.channel * kValueBytes], x);
  }
  if (p.pool_v) value_statistics(p, smem, thread, head_at, block, slots.count, sums, squares);
  __syncthreads();

  constexpr int kRowBytes = kKeyBlock * kValueBytes;
  constexpr int kRowSectors = kRowBytes / kSectorBytes;
  constexpr int kSectorKeys = kSectorBytes / kValueBytes;
  u8* tile = p.v_tiles + static_cast<i64>(head_at * p.problem.key_blocks() + block) * (kHeadDim * kRowBytes);
#pragma unroll
  for (int sector = threadIdx.x / kHeadDim; sector < kRowSectors; sector += kThreads / kHeadDim) {
    const i32 channel = threadIdx.x % kHeadDim;
    u32 word[kSectorBytes / 4] = {};
#pragma unroll
    for (int i = 0; i < kSectorKeys; ++i) {
      const i32 key = key_at(sector * kSectorKeys + i);
      const u8* element = &smem.rows[key][channel * kValueBytes];
      const u32 bits = kValueBytes == 2 ? *reinterpret_cast<const u16*>(element) : *element;
      word[i * kValueBytes / 4] |= bits << (8 * (i * kValueBytes % 4));
    }
    *reinterpret_cast<Vec16*>(tile + tile_offset<kRowBytes>(channel, 2 * sector)) = {word[0], word[1], word[2], word[3]};
    *reinterpret_cast<Vec16*>(tile + tile_offset<kRowBytes>(channel, 2 * sector + 1)) = {word[4], word[5], word[6], word[7]};
  }
}

}  // namespace sparge::quantize
