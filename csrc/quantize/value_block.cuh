// SPDX-License-Identifier: Apache-2.0
// One block of 64 values, transposed: a swizzled tile of head_dim rows x 64 keys, one scale a channel.
//
// E4M3 tiles permute the keys inside each group of 16, so that the accumulator fragment of QK is, value for value,
// the A fragment of PV: position 4t + 2i + c holds key 8i + 2t + c (t < 4, i < 2, c < 2).
#pragma once

#include "../common/swizzle.cuh"
#include "block_stats.cuh"

namespace sparge::quantize {

constexpr int kValueBytes = value_bytes(kElement);
constexpr int kSectorBytes = 32;  // each thread writes whole DRAM sectors of the transposed tile

struct alignas(16) ValueSmem {
  u8 rows[kKeyBlock][kHeadDim * kValueBytes];
};

SPARGE_DEVICE constexpr i32 key_at(i32 position) {
  if constexpr (kElement != Element::kInt8E4M3) return position;
  return (position & ~15) + 8 * ((position >> 1) & 1) + 2 * ((position >> 2) & 3) + (position & 1);
}

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

template <DType kType>
SPARGE_DEVICE void value_block(const QuantizeParams& p, const Rows<kType>& rows, ValueSmem& smem, i32 head_at, i32 block,
                               i32 count) {
  const Thread thread;
  float mean[kLaneChannels] = {}, inverse_scale[kLaneChannels];
  if constexpr (is_quantized(kElement)) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      mean[i] = p.v_mean[head_at * kHeadDim + thread.channel + i];
      inverse_scale[i] = 1.0f / p.v_scale[head_at * kHeadDim + thread.channel + i];
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const i32 token = thread.token + pass * kTokensPerPass;
    float x[kLaneChannels] = {};
    if (token < count) {
      rows.load(static_cast<i64>(block) * kKeyBlock + token, thread.channel, x);
      if constexpr (is_quantized(kElement)) {
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) x[i] = (x[i] - mean[i]) * inverse_scale[i];
      }
    }
    store_row(&smem.rows[token][thread.channel * kValueBytes], x);
  }
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
