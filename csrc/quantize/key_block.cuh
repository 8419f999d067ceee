// SPDX-License-Identifier: Apache-2.0
// One block of 64 keys: a swizzled tile of INT8 (one scale a block) or 16-bit keys, its mean and self-similarity.
#pragma once

#include "../common/int8.cuh"
#include "../common/swizzle.cuh"
#include "pool.cuh"

namespace sparge::quantize {

struct KeySmem {
  SumsSmem sums;
  float amax[kWarps];
  bool whole;            // as KeySlots says
  float mean[kHeadDim];  // of the head's keys, then of the block's; registers hold the tile
};

// Of channel threadIdx.x among the block's keys, around `mean`, which thread c < kHeadDim holds for channel c.
SPARGE_DEVICE float variance_around(KeySmem& smem, const Thread& thread, const float (&x)[kPasses][kLaneChannels], float mean,
                                    i32 count) {
  if (threadIdx.x < kHeadDim) smem.mean[threadIdx.x] = mean;
  __syncthreads();
  float squares[kLaneChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const float deviation = thread.token + pass * kTokensPerPass < count ? x[pass][i] - smem.mean[thread.channel + i] : 0.0f;
      squares[i] += deviation * deviation;
    }
  }
  return channel_sum(smem.sums.rows, thread, squares) / static_cast<float>(larger(1, count));
}

template <DType kType>
SPARGE_DEVICE void key_block(const QuantizeParams& p, const Rows<kType>& rows, KeySmem& smem, i32 head_at, i32 block,
                             const KeySlots& slots) {
  const Thread thread;
  const i32 count = slots.count, blocks = p.problem.key_blocks();
  const i32 block_at = head_at * blocks + block;
  if (threadIdx.x == 0) smem.whole = slots.whole;
  if (const i32 channel = threadIdx.x; channel < kHeadDim)
    smem.mean[channel] = is_quantized(kElement) ? p.k_mean[head_at * kHeadDim + channel] : 0.0f;
  __syncthreads();

  float x[kPasses][kLaneChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const i32 token = slots.token(thread.token + pass * kTokensPerPass);
    if (token >= 0) rows.load(token, thread.channel, x[pass]);
  }
  float amax = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    if (thread.token + pass * kTokensPerPass < count) {
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        x[pass][i] -= smem.mean[thread.channel + i];
        amax = fmaxf(amax, fabsf(x[pass][i]));
      }
    }
  }
  ChannelSums sums;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) sums.add(x[pass]);
  amax = lane_max<1, kWarpSize>(amax);
  if (thread.lane == 0) smem.amax[thread.warp] = amax;
  float block_mean;
  const float similarity = finish_sums(smem.sums, thread, sums, count, block_mean);
  if (threadIdx.x < kHeadDim) p.k_block_mean[static_cast<i64>(head_at * kHeadDim + threadIdx.x) * blocks + block] = block_mean;
  if (threadIdx.x == 0) {
    p.k_similarity[block_at] = similarity;
    p.key_counts[block_at] = count;
  }
  if (p.pool_k) {
    pool_key(p, thread, head_at, block, count, block_mean);
    const float variance = variance_around(smem, thread, x, block_mean, count);
    if (threadIdx.x < kHeadDim) p.k_variance[static_cast<i64>(head_at * kHeadDim + threadIdx.x) * blocks + block] = variance;
  }

  constexpr int kRowBytes = kHeadDim * key_bytes(kElement);
  u8* tile = p.k_tiles + static_cast<i64>(block_at) * (kKeyBlock * kRowBytes);
  if constexpr (is_quantized(kElement)) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, smem.amax[w]);
    const float inverse_scale = int8_inverse_scale(amax);
    // A block with holes must not pass for one without: NaN says so in every row that attends to it.
    if (threadIdx.x == 0) p.k_scale[block_at] = smem.whole ? int8_scale(amax) : kNotANumber;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const i32 token = thread.token + pass * kTokensPerPass;
      const u32 offset = tile_offset<kRowBytes>(token, thread.channel / 16) + thread.channel % 16;
      *reinterpret_cast<Vec8*>(tile + offset) = {pack_int8(x[pass], inverse_scale), pack_int8(x[pass] + 4, inverse_scale)};
    }
  } else {
    auto pack = [](float low, float high) {
      return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
    };
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const i32 token = thread.token + pass * kTokensPerPass;
      const float* row = x[pass];
      *reinterpret_cast<Vec16*>(tile + tile_offset<kRowBytes>(token, thread.channel / 8)) = {
          pack(row[0], row[1]), pack(row[2], row[3]), pack(row[4], row[5]), pack(row[6], row[7])};
    }
  }
}

}  // namespace sparge::quantize
