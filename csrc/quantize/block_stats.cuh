// SPDX-License-Identifier: Apache-2.0
// A block of tokens spread over a thread block, and its per-channel sums.
#pragma once

#include "../common/config.cuh"
#include "../common/reduce.cuh"
#include "../common/rows.cuh"

namespace sparge::quantize {

constexpr int kThreads = 256;
// 64 registers a thread, which hold a key tile: what else lives as long as it is in shared memory. Three blocks take 18 % longer
// (H200); sm_89 gets them with E4M3 tiles of 128 channels, where ptxas spills 32 bytes at 64 registers.
constexpr bool kNeedsRegisters = kArch == 89 && kHeadDim == 128 && kElement == Element::kInt8E4M3;
constexpr int kBlocksPerSm = kNeedsRegisters ? 3 : 4;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTokenLanes = kHeadDim / kLaneChannels;
constexpr int kTokensPerPass = kThreads / kTokenLanes;
constexpr int kPasses = kKeyBlock / kTokensPerPass;

struct Thread {
  i32 lane = threadIdx.x % kWarpSize;
  i32 warp = threadIdx.x / kWarpSize;
  i32 token = threadIdx.x / kTokenLanes;
  i32 channel = (threadIdx.x % kTokenLanes) * kLaneChannels;
};

// The tokens of a key block, and how many there are. They come first in the block; key lengths that cut into an order's
// grid would leave holes, and `whole` tells so.
struct KeySlots {
  const Problem& problem;
  i32 start, first, length, count;
  bool whole = true;

  SPARGE_DEVICE KeySlots(const Problem& p, i32 b, i32 kv, i32 block)
      : problem(p),
        start(p.walk_start(kv)),
        first(block * kKeyBlock),
        length(p.key_length(b)),
        count(larger(0, smaller(kKeyBlock, length - first))) {
    if (!problem.slot_token) return;
    const i32 place = threadIdx.x;
    const bool here = place < kKeyBlock && token(place) >= 0;
    count = __syncthreads_count(here);
    whole = !__syncthreads_or(here && place >= count);
  }

  // -1: none.
  SPARGE_DEVICE i32 token(i32 place) const { return problem.key_token(start, first + place, length); }
};

// Sums over tokens of the rows and of the rows divided by their norm.
struct ChannelSums {
  float rows[kLaneChannels] = {};
  float unit_rows[kLaneChannels] = {};

  SPARGE_DEVICE void add(const float (&x)[kLaneChannels]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) squares += x[i] * x[i];
    squares = lane_sum<1, kTokenLanes>(squares);
    const float inverse_norm = squares > 0.0f ? rsqrtf(squares) : 0.0f;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      rows[i] += x[i];
      unit_rows[i] += x[i] * inverse_norm;
    }
  }
};

struct SumsSmem {
  float rows[kWarps][kHeadDim];
  float unit_rows[kWarps][kHeadDim];
  float squares[kWarps];
};

// The sum over the thread block of what each thread adds for its channels: thread c < kHeadDim receives that of channel c.
SPARGE_DEVICE float channel_sum(float (&sums)[kWarps][kHeadDim], const Thread& thread, const float (&x)[kLaneChannels]) {
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const float of_warp = lane_sum<kTokenLanes, kWarpSize>(x[i]);
    if (thread.lane < kTokenLanes) sums[thread.warp][thread.channel + i] = of_warp;
  }
  __syncthreads();
  float sum = 0.0f;
  if (threadIdx.x < kHeadDim)
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][threadIdx.x];
  return sum;
}

// Finishes the sums over the thread block; thread c < kHeadDim receives the mean of channel c, every thread the
// self-similarity |sum of unit rows|^2 / count^2.
SPARGE_DEVICE float finish_sums(SumsSmem& smem, const Thread& thread, const ChannelSums& sums, i32 count, float& mean) {
  const float rows = channel_sum(smem.rows, thread, sums.rows);
  const float unit_rows = channel_sum(smem.unit_rows, thread, sums.unit_rows);
  mean = count ? rows / static_cast<float>(count) : 0.0f;
  const float squares = lane_sum<1, kWarpSize>(unit_rows * unit_rows);
  if (thread.lane == 0) smem.squares[thread.warp] = squares;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += smem.squares[w];
  return count ? total / (static_cast<float>(count) * static_cast<float>(count)) : 0.0f;
}

}  // namespace sparge::quantize
