// SPDX-License-Identifier: Apache-2.0
// Blocks of 64 values, transposed, a swizzled tile of head_dim rows x 64 keys, one scale a channel; INT8 has one a block besides.
#pragma once

#include "../common/swizzle.cuh"
#include "pool.cuh"

namespace sparge::quantize {

constexpr int kValueBytes = value_bytes(kElement);
constexpr int kValueRowBytes = kKeyBlock * kValueBytes;
constexpr int kValueTileBytes = kHeadDim * kValueRowBytes;

// A warp has 4 lanes of neighbouring channels by 8 of tokens, so that its transposed words hit 32 banks. A thread has the four
// tokens at neighbouring positions in a row of the tile.
struct ValueThread {
  static constexpr int kChannelLanes = 4, kLaneGroups = kWarpSize / kChannelLanes;
  static constexpr int kChannelWarps = kTokenLanes / kChannelLanes;
  i32 index = ptx::thread_index();
  i32 lane = index % kWarpSize;
  i32 warp = index / kWarpSize;
  i32 channel = (warp % kChannelWarps * kChannelLanes + lane % kChannelLanes) * kLaneChannels;
  i32 half = warp / kChannelWarps;  // of the tokens
  i32 position = (half * kLaneGroups + lane / kChannelLanes) * kPasses;
};
constexpr int kTokenHalves = kWarps / ValueThread::kChannelWarps;

// Place of a 16-byte chunk of the tile in shared memory: the channel lane, too, permutes the chunks of a 128-byte line.
SPARGE_DEVICE u32 staged(u32 tile_byte) {
  const u32 row = tile_byte / kValueRowBytes;
  return tile_byte ^ ((row >> 3 & 1) * 64 + (row >> 4 & 1) * 32);
}

struct alignas(16) ValueSmem {
  u8 tile[kValueTileBytes];
  alignas(16) float shift[kHeadDim];  // minus the mean in units of v_scale, as rounded: a mean off by its last bit
  alignas(16) float inverse_scale[kHeadDim];
  alignas(16) float scale[kHeadDim];
  alignas(16) ChannelSums<kTokenHalves> sums;
  alignas(16) ChannelSums<kTokenHalves> squares;
  float largest[kWarps];  // magnitude of a warp's values, in units of v_scale
};

// For functions whose work on a block depends on whether it has all of its tokens: most do.
template <bool kFull>
struct Fullness {
  static constexpr bool full = kFull;
};
template <typename Work>
SPARGE_DEVICE void with_fullness(i32 count, Work&& work) {
  if (count == kKeyBlock)
    work(Fullness<true>{});
  else
    work(Fullness<false>{});
}

// The values of neighbouring positions of one channel, in units of v_scale where quantized. INT8 takes the inverse scale of the block.
SPARGE_DEVICE void store_positions(u8* at, const float (&x)[kPasses], float inverse_block_scale) {
  if constexpr (kElement == Element::kInt8Int8) {
    *reinterpret_cast<u32*>(at) = pack_int8(x, inverse_block_scale);
    return;
  }
#if SPARGE_ARCH >= 89
  if constexpr (kElement == Element::kInt8E4M3) {
    *reinterpret_cast<u32*>(at) = ptx::pack_e4m3(x[0], x[1]) | static_cast<u32>(ptx::pack_e4m3(x[2], x[3])) << 16;
    return;
  }
#endif
  auto pack = [](float low, float high) {
    return kElement == Element::kBf16 ? ptx::pack_bf16(low, high) : ptx::pack_fp16(low, high);
  };
  *reinterpret_cast<Vec8*>(at) = {pack(x[0], x[1]), pack(x[2], x[3])};
}

// By two warps. The first stores the mean of each channel, in the caller's units and as a pooled key's value; the second its
// square and the variance, each summed over channels in the caller's units.
SPARGE_DEVICE void value_statistics(const QuantizeParams& p, const ValueSmem& smem, const Run& run, i32 block, i32 count) {
  const i32 warp = ptx::thread_index() / kWarpSize, lane = ptx::thread_index() % kWarpSize;
  if (warp > 1) return;
  const i32 block_at = run.at(block);
  const float inverse = inverse_count(count);
  float mean[kLaneShare], in_units[kLaneShare], scale[kLaneShare];
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) scale[i] = is_quantized(kElement) ? smem.scale[lane * kLaneShare + i] : 1.0f;
  over_parts(smem.sums, lane, mean);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) {
    mean[i] *= inverse;
    in_units[i] = rounded_to_bf16(mean[i] * scale[i]);
  }
  if (warp == 0) {
    store_bf16(p.v_block_mean + static_cast<i64>(block_at) * kHeadDim + lane * kLaneShare, in_units);
    pool_value(p, run, lane, block, mean);
    return;
  }
  float square[kLaneShare], variances = 0.0f, squares = 0.0f;
  over_parts(smem.squares, lane, square);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) {
    variances += fmaxf(0.0f, square[i] * inverse - mean[i] * mean[i]) * scale[i] * scale[i];
    squares += in_units[i] * in_units[i];
  }
  variances = lane_sum<1, kWarpSize>(variances);
  squares = lane_sum<1, kWarpSize>(squares);
  if (lane == 0) {
    p.v_variance[block_at] = variances;
    p.v_square[block_at] = squares;
  }
}

// Hands `each` four channels of the thread at a time, their numbers and values; less the mean and in units of v_scale where quantized.
template <Source kSource, typename Full, typename Each>
SPARGE_DEVICE void for_channels(const Chunks<kSource>& rows, const ValueSmem& smem, const Chunk (&chunk)[kPasses], i32 count,
                                Full, Each&& each) {
  const ValueThread thread;
  const i32 first_key = key_at(thread.position);  // of four; key_at moves bits, so key_at(a + b) is key_at(a) + key_at(b) here
#pragma unroll
  for (int i = 0; i < kLaneChannels; i += 4) {
    float x[4][kPasses];
#pragma unroll
    for (int j = 0; j < 4; j += 2)
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) rows.unpack(chunk[pass].word[(i + j) / 2], x[j][pass], x[j + 1][pass]);
    if constexpr (is_quantized(kElement)) {
      float shift[4], inverse_scale[4];
      load_floats(shift, &smem.shift[thread.channel + i]);
      load_floats(inverse_scale, &smem.inverse_scale[thread.channel + i]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          x[j][pass] = __fmaf_rn(x[j][pass], inverse_scale[j], shift[j]);
          if constexpr (!Full::full)
            if (first_key + key_at(pass) >= count) x[j][pass] = 0.0f;
        }
    }
    each(i, x);
  }
}

// Largest magnitude of the block's values, in units of v_scale. By all threads.
template <Source kSource>
SPARGE_DEVICE float largest_value(const Chunks<kSource>& rows, ValueSmem& smem, const Chunk (&chunk)[kPasses], i32 count) {
  float largest = 0.0f;
  with_fullness(count, [&](auto block_is) {
    for_channels(rows, smem, chunk, count, block_is, [&](int, const float (&x)[4][kPasses]) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) largest = fmaxf(largest, fabsf(x[j][pass]));
    });
  });
  largest = lane_max<1, kWarpSize>(largest);
  if (ptx::thread_index() % kWarpSize == 0) smem.largest[ptx::thread_index() / kWarpSize] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, smem.largest[warp]);
  return largest;
}

// Stores the block's values in the tile, and their sums. False where one of this thread's 16-bit values is not finite.
template <Source kSource>
SPARGE_DEVICE bool transpose(const QuantizeParams& p, const Chunks<kSource>& rows, ValueSmem& smem, const Chunk (&chunk)[kPasses],
                             i32 count, float inverse_block_scale) {
  const ValueThread thread;
  // Likewise the rows of a thread's eight channels differ in bits that neither the first row nor the byte has.
  const i32 byte = thread.position * kValueBytes;
  const u32 first_row = staged(tile_offset<kValueRowBytes>(thread.channel, byte / 16) + byte % 16);
  float sums[kLaneChannels] = {}, squares[kLaneChannels] = {}, zero = 0.0f;
  with_fullness(count, [&](auto block_is) {
    for_channels(rows, smem, chunk, count, block_is, [&](int i, const float (&x)[4][kPasses]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if constexpr (!is_quantized(kElement)) trace(zero, x[j][pass]);
          if (p.pool_v) {
            sums[i + j] += x[j][pass];
            squares[i + j] += x[j][pass] * x[j][pass];
          }
        }
        store_positions(&smem.tile[first_row ^ tile_offset<kValueRowBytes>(i + j, 0)], x[j], inverse_block_scale);
      }
    });
  });
  if (p.pool_v) {
    // Eight lanes add their eight channels; each keeps one of them.
    const i32 own = thread.channel + lane_channel<ValueThread::kChannelLanes>(thread.lane);
    smem.sums[thread.half][own] = lane_sum_of_eight<ValueThread::kChannelLanes>(sums, thread.lane);
    smem.squares[thread.half][own] = lane_sum_of_eight<ValueThread::kChannelLanes>(squares, thread.lane);
  }
  return zero == 0.0f;
}

template <Source kSource>
SPARGE_DEVICE void quantize_values(const QuantizeParams& p, const Chunks<kSource>& rows, ValueSmem& smem, Run& run, i32 last) {
  constexpr bool kEarly = kLoadsEarly && kSource != Source::kOther;
  KeySlots slots(p.problem, run);
  Chunk chunk[kPasses];
  auto load = [&](bool exists) {
    const ValueThread thread;
    const i32 first_key = key_at(thread.position);
    slots.load(chunk, rows, exists, thread.channel, [&](int pass) { return first_key + key_at(pass); });
  };
  slots.enter(last);
  if constexpr (kEarly) load(true);
  if constexpr (is_quantized(kElement))
    if (const i32 channel = threadIdx.x; channel < kHeadDim) {
      const i32 at = run.head_at * kHeadDim + channel;
      const float scale = p.v_scale[at], inverse_scale = 1.0f / scale;
      const float zero = p.v_mean[at] - p.v_mean[at];
      if (zero != 0.0f) note_reach(p, run, zero);  // not a number
      smem.scale[channel] = scale;
      smem.inverse_scale[channel] = inverse_scale;
      smem.shift[channel] = -p.v_mean[at] * inverse_scale;
    }
#pragma unroll 1
  while (slots.block >= run.first) {
    const i32 count = slots.count;
    if constexpr (!kEarly) load(true);
    __syncthreads();  // the tile and the sums of the block before have been read
    float largest = 0.0f;
    if constexpr (kElement == Element::kInt8Int8) {
      largest = largest_value(rows, smem, chunk, count);
      if (ptx::thread_index() == 0) p.v_block_scale[run.at(slots.block)] = int8_scale(largest);
    }
    const bool finite = transpose(p, rows, smem, chunk, count, int8_inverse_scale(largest));
    const bool more = slots.enter(slots.block - 1);
    if constexpr (kEarly) load(more);
    const i32 block = slots.block + 1;
    if constexpr (is_quantized(kElement)) {
      __syncthreads();
    } else {
      const bool all = __syncthreads_and(finite);
      if (ptx::thread_index() == 0) note_finite(p, run, block, true, all);
    }
    if (p.pool_v) value_statistics(p, smem, run, block, count);
    u8* tile = p.v_tiles + static_cast<i64>(run.at(block)) * kValueTileBytes;
#pragma unroll
    for (int byte = 16 * ptx::thread_index(); byte < kValueTileBytes; byte += 16 * kThreads)
      *reinterpret_cast<Vec16*>(tile + byte) = *reinterpret_cast<const Vec16*>(&smem.tile[staged(byte)]);
  }
}

}  // namespace sparge::quantize
