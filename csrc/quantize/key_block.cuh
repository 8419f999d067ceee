// SPDX-License-Identifier: Apache-2.0
// Blocks of 64 keys: a swizzled tile of INT8 (one scale a block) or 16-bit keys, the block's mean and its self-similarity.
#pragma once

#include "../common/balance.cuh"
#include "../common/int8.cuh"
#include "../common/key_tile.cuh"
#include "pool.cuh"

namespace sparge::quantize {

struct KeySmem {
  SumsSmem sums;
  float amax[kWarps];
  // A point near the block's keys, so that squares around it lose little: the mean of the head's keys where it is subtracted from
  // each, else the block's first key. In shared memory, as registers hold the tile. In 16 bits there are two: of the block at
  // hand and of the one before, whose statistics may still be computed.
  alignas(16) float origin[is_quantized(kElement) ? 1 : 2][kHeadDim];
  alignas(16) float factor[kHeadDim];  // of each channel of K on the way to INT8, where they are balanced
  bool balances;
  alignas(16) ChannelSums<kWarps> squares;
};

// Mean of a lane's neighbouring channels, by one warp. Each statistic has a warp of its own: a thread block's room is free for
// the next when its last warp ends.
SPARGE_DEVICE void key_mean(const KeySmem& smem, i32 lane, i32 count, float (&mean)[kLaneShare]) {
  const float inverse = inverse_count(count);
  over_parts(smem.sums.rows, lane, mean);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) mean[i] *= inverse;
}

SPARGE_DEVICE i32 origin_of(i32 block) { return is_quantized(kElement) ? 0 : block % 2; }

SPARGE_DEVICE void key_variance(const QuantizeParams& p, const KeySmem& smem, i32 lane, i32 block_at, i32 block, i32 count) {
  const float inverse = inverse_count(count);
  float mean[kLaneShare], square[kLaneShare];
  key_mean(smem, lane, count, mean);
  over_parts(smem.squares, lane, square);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) {
    const float off = is_quantized(kElement) ? mean[i] : mean[i] - smem.origin[origin_of(block)][lane * kLaneShare + i];
    square[i] = fmaxf(0.0f, square[i] * inverse - off * off);
  }
  store_bf16(p.k_variance + static_cast<i64>(block_at) * kHeadDim + lane * kLaneShare, square);
}

SPARGE_DEVICE void key_statistics(const QuantizeParams& p, const KeySmem& smem, const Run& run, i32 block, i32 count) {
  const Thread thread;
  const i32 block_at = run.at(block);
  if (thread.warp == 0) {
    float mean[kLaneShare];
    key_mean(smem, thread.lane, count, mean);
    store_floats(p.k_block_mean + static_cast<i64>(block_at) * kHeadDim + thread.lane * kLaneShare, mean);
    if (p.pool_k) pool_key(p, run, thread.lane, block, mean, smem.balances ? smem.factor : nullptr);
    if (p.with_similarity) return;
    const float similar = similarity_of_finite(mean);
    if (thread.lane == 0) p.k_similarity[block_at] = similar;
  } else if (thread.warp == 1) {
    if (p.pool_k) key_variance(p, smem, thread.lane, block_at, block, count);
  } else if (thread.warp == 2) {
    if (!p.with_similarity) return;
    const float similar = similarity(smem.sums, thread.lane, count);
    if (thread.lane == 0) p.k_similarity[block_at] = similar;
  } else if (thread.warp == 3 && thread.lane == 0) {
    p.key_counts[block_at] = count;
    if (p.pool_k) pool_bias(p, run, block, count);
  }
}

// Factor of the origin: 0 where there is no token and zeros were read. So a subtraction is one operation.
SPARGE_DEVICE float one_if(bool inside) { return inside ? 1.0f : 0.0f; }

// x: the block's keys. Their sums and squares, less the mean where they are quantized, go to shared memory. Then quantized ones
// are balanced, where the head is, and their largest magnitude is stored too.
// False where one of this thread's 16-bit keys is not finite.
template <Source kSource>
SPARGE_DEVICE bool sum_keys(const QuantizeParams& p, const Chunks<kSource>& rows, KeySmem& smem, i32 block, i32 count,
                            const Chunk (&chunk)[kPasses], float (&x)[kPasses][kLaneChannels]) {
  const Thread thread;
  const float* origin = &smem.origin[origin_of(block)][thread.channel];
  float amax = 0.0f, zero = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    rows.unpack(chunk[pass], x[pass]);
    if constexpr (!is_quantized(kElement))
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) trace(zero, x[pass][i]);
    if constexpr (is_quantized(kElement)) {
      const float inside = one_if(thread.token + pass * kTokensPerPass < count);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        x[pass][i] = __fmaf_rn(-inside, origin[i], x[pass][i]);
        amax = ptx::max_or_nan(amax, fabsf(x[pass][i]));
      }
    }
  }
  float sums[kLaneChannels];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    sums[i] = x[0][i];
#pragma unroll
    for (int pass = 1; pass < kPasses; ++pass) sums[i] += x[pass][i];
  }
  store_sums(smem.sums.rows, thread, sums);
  if (p.with_similarity) {
    float unit_sums[kLaneChannels] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const float inverse = inverse_norm(x[pass]);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) unit_sums[i] += x[pass][i] * inverse;
    }
    store_sums(smem.sums.unit_rows, thread, unit_sums);
  }
  if (p.pool_k) {
    float squares[kLaneChannels] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const float inside = one_if(thread.token + pass * kTokensPerPass < count);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) {
        const float off = is_quantized(kElement) ? x[pass][i] : __fmaf_rn(-inside, origin[i], x[pass][i]);
        squares[i] += off * off;
      }
    }
    store_sums(smem.squares, thread, squares);
  }
  if constexpr (is_quantized(kElement)) {
    if (smem.balances) {
      // Volatile: each factor is read when it is needed, as registers hold the keys.
      const volatile float* factor = &smem.factor[thread.channel];
      amax = 0.0f;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        scale_and_rotate(x[pass], factor);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) amax = ptx::max_or_nan(amax, fabsf(x[pass][i]));
      }
    }
    amax = lane_max_or_nan<1, kWarpSize>(amax);
    if (thread.lane == 0) smem.amax[thread.warp] = amax;
  }
  return zero == 0.0f;
}

// The tile, and its scale.
SPARGE_DEVICE void store_keys(const QuantizeParams& p, const KeySmem& smem, const Run& run, i32 block,
                              const float (&x)[kPasses][kLaneChannels]) {
  const Thread thread;
  const i32 block_at = run.at(block);
  // A thread's rows are multiples of eight apart: their chunks are swizzled alike.
  constexpr int kPassBytes = kTokensPerPass * kKeyPartRowBytes;
  u8* at = p.k_tiles + static_cast<i64>(block_at) * (kKeyBlock * kKeyRowBytes) +
           key_offset<kKeyBlock>(thread.token, thread.channel * key_bytes(kElement) / 16) +
           thread.channel * key_bytes(kElement) % 16;
  if constexpr (is_quantized(kElement)) {
    float amax = smem.amax[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) amax = ptx::max_or_nan(amax, smem.amax[w]);
    const float inverse_scale = int8_inverse_scale(amax);
    if (thread.index == kThreads - 1) {
      p.k_scale[block_at] = int8_scale(amax);
      note_reach(p, run, amax + (run.whole ? amax - amax : kNotANumber));
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
      *reinterpret_cast<Vec8*>(at + pass * kPassBytes) = {pack_int8(x[pass], inverse_scale),
                                                          pack_int8(x[pass] + 4, inverse_scale)};
  } else {
    auto pack = [](float low, float high) {
      return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
    };
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const float* row = x[pass];
      *reinterpret_cast<Vec16*>(at + pass * kPassBytes) = {pack(row[0], row[1]), pack(row[2], row[3]), pack(row[4], row[5]),
                                                           pack(row[6], row[7])};
    }
  }
}

// By one warp. The first run of a head tells attend, too.
SPARGE_DEVICE void balance_keys(const QuantizeParams& p, KeySmem& smem, const Run& run, i32 lane) {
  const i32 channel = lane * kLaneShare, at = run.head_at * kHeadDim + channel;
  float balance[kLaneShare], factor[kLaneShare];
  load_floats(balance, p.k_extent + at);
  balance_channels(balance, p.problem.channels);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) factor[i] = key_factor(balance[i]);
  store_floats(smem.factor + channel, factor);
  if (lane == 0) smem.balances = balance[0] != kNoBalance;
  if (run.first == 0) store_floats(p.balance + at, balance);
}

template <Source kSource>
SPARGE_DEVICE void quantize_keys(const QuantizeParams& p, const Chunks<kSource>& rows, KeySmem& smem, Run& run, i32 last) {
  constexpr bool kEarly = kLoadsEarly && kSource != Source::kOther;
  KeySlots slots(p.problem, run);
  Chunk chunk[kPasses];
  auto load = [&](bool exists) {
    const Thread thread;
    slots.load(chunk, rows, exists, thread.channel, [&](int pass) { return thread.token + pass * kTokensPerPass; });
  };
  slots.enter(last);
  if constexpr (kEarly) load(true);
  if constexpr (is_quantized(kElement)) {
    if (const i32 channel = threadIdx.x; channel < kHeadDim) smem.origin[0][channel] = p.k_mean[run.head_at * kHeadDim + channel];
    if (const Thread thread; thread.warp == kWarps - 1) balance_keys(p, smem, run, thread.lane);
  }
#pragma unroll 1
  while (slots.block >= run.first) {
    const i32 count = slots.count;
    if constexpr (!kEarly) load(true);
    if constexpr (!is_quantized(kElement))
      if (const Thread thread; p.pool_k && thread.token == 0) {
        float x[kLaneChannels];
        rows.unpack(chunk[0], x);
#pragma unroll
        for (int i = 0; i < kLaneChannels; ++i) smem.origin[origin_of(slots.block)][thread.channel + i] = x[i];
      }
    __syncthreads();  // the statistics of the block before have read what is overwritten now
    float x[kPasses][kLaneChannels];
    const bool finite = sum_keys(p, rows, smem, slots.block, count, chunk, x);
    if constexpr (is_quantized(kElement)) {
      __syncthreads();
    } else {
      const bool all = __syncthreads_and(finite);
      if (ptx::thread_index() == kThreads - 1) note_finite(p, run, slots.block, false, all && run.whole);
    }
    store_keys(p, smem, run, slots.block, x);
    const bool more = slots.enter(slots.block - 1);
    if constexpr (kEarly) load(more);
    key_statistics(p, smem, run, slots.block + 1, count);
  }
}

}  // namespace sparge::quantize
