// SPDX-License-Identifier: Apache-2.0
// A block of tokens spread over a thread block, and its per-channel sums.
#pragma once

#include "../common/config.cuh"
#include "../common/reduce.cuh"
#include "../common/rows.cuh"

namespace sparge::quantize {

constexpr int kThreads = 256;
// 64 registers a thread hold a key tile; for Blackwell at head_dim 128 ptxas wants 80.
constexpr int kBlocksPerSm = kHeadDim == 128 && kArch >= 100 ? 3 : 4;
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

// Finishes the sums over the thread block; thread c < kHeadDim receives the mean of channel c, every thread the
// self-similarity |sum of unit rows|^2 / count^2.
SPARGE_DEVICE float finish_sums(SumsSmem& smem, const Thread& thread, const ChannelSums& sums, i32 count, float& mean) {
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const float rows = lane_sum<kTokenLanes, kWarpSize>(sums.rows[i]);
    const float unit_rows = lane_sum<kTokenLanes, kWarpSize>(sums.unit_rows[i]);
    if (thread.lane < kTokenLanes) {
      smem.rows[thread.warp][thread.channel + i] = rows;
      smem.unit_rows[thread.warp][thread.channel + i] = unit_rows;
    }
  }
  __syncthreads();
  float rows = 0.0f, unit_rows = 0.0f;
  if (threadIdx.x < kHeadDim) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      rows += smem.rows[w][threadIdx.x];
      unit_rows += smem.unit_rows[w][threadIdx.x];
    }
  }
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
