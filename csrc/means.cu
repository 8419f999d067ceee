// SPDX-License-Identifier: Apache-2.0
// Launch 1: mean of K, and mean and scale of V, per (batch, kv head, channel), over the valid keys.
//
// Semantics   k_mean = sum K / n (0 without smooth_k); v_mean = sum V / n;
//             v_scale = max(max V - v_mean, v_mean - min V) / 448, 1 when that is 0.
// Strategy    One thread block owns 32 channels (64 bytes of a 16-bit token: two DRAM sectors) of one head and
//             walks every token, so no partial sums, counters or atomics exist and the bits never change.
//             Blocks of neighbouring channels walk in step and share the DRAM pages.
// Tried       Nothing else yet. The bound is one read of K and V.
#include "common/config.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "params.cuh"

namespace sparge::means {

SPARGE_CHECK_PARAMS(MeansParams);

constexpr int kThreads = 256;
constexpr int kChannels = 32;
constexpr int kSlices = kHeadDim / kChannels;
constexpr int kTokenLanes = kChannels / kLaneChannels;
constexpr int kTokensPerPass = kThreads / kTokenLanes;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kUnroll = 6;       // 16-byte loads in flight a thread; the resident threads then cover the HBM latency
constexpr int kBlocksPerSm = 2;  // all 192 blocks of the Mochi shape run at once on 132 SMs

struct Smem {
  float sum[kWarps][kChannels];
  float low[kWarps][kChannels];
  float high[kWarps][kChannels];
};

template <DType kType>
SPARGE_DEVICE void reduce_slice(const MeansParams& p, Smem& smem, const Rows<kType>& rows, i32 b, i32 head, i32 slice,
                                bool values) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const i32 channel = slice * kChannels + (lane % kTokenLanes) * kLaneChannels;
  const i32 length = p.problem.key_length(b);
  float sum[kLaneChannels], low[kLaneChannels], high[kLaneChannels];
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    sum[i] = 0.0f;
    low[i] = -kMinusInfinity;
    high[i] = kMinusInfinity;
  }

  auto add = [&](const float (&x)[kLaneChannels]) {
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      sum[i] += x[i];
      low[i] = fminf(low[i], x[i]);
      high[i] = fmaxf(high[i], x[i]);
    }
  };
  i32 token = threadIdx.x / kTokenLanes;
  for (; token + (kUnroll - 1) * kTokensPerPass < length; token += kUnroll * kTokensPerPass) {
    float x[kUnroll][kLaneChannels];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rows.load(token + u * kTokensPerPass, channel, x[u]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) add(x[u]);
  }
  for (; token < length; token += kTokensPerPass) {
    float x[kLaneChannels];
    rows.load(token, channel, x);
    add(x);
  }

#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const i32 c = (lane % kTokenLanes) * kLaneChannels + i;
    const float warp_sum = lane_sum<kTokenLanes, kWarpSize>(sum[i]);
    const float warp_low = lane_min<kTokenLanes, kWarpSize>(low[i]);
    const float warp_high = lane_max<kTokenLanes, kWarpSize>(high[i]);
    if (lane < kTokenLanes) {
      smem.sum[warp][c] = warp_sum;
      smem.low[warp][c] = warp_low;
      smem.high[warp][c] = warp_high;
    }
  }
  __syncthreads();
  if (threadIdx.x >= kChannels) return;

  float total = 0.0f, least = -kMinusInfinity, most = kMinusInfinity;
  for (int w = 0; w < kWarps; ++w) {
    total += smem.sum[w][threadIdx.x];
    least = fminf(least, smem.low[w][threadIdx.x]);
    most = fmaxf(most, smem.high[w][threadIdx.x]);
  }
  const float mean = length ? total / static_cast<float>(length) : 0.0f;
  const i64 at = (static_cast<i64>(b) * p.problem.kv_heads + head) * kHeadDim + slice * kChannels + threadIdx.x;
  if (values) {
    const float reach = length ? fmaxf(most - mean, mean - least) : 0.0f;
    p.v_mean[at] = mean;
    p.v_scale[at] = reach > 0.0f ? reach / kValueLevels : 1.0f;
  } else {
    p.k_mean[at] = p.smooth_k ? mean : 0.0f;
  }
}

}  // namespace sparge::means

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::means::kThreads, 0};

// Grid: batch x kv_heads x (K, then V when with_values) x channel slices, slices fastest.
extern "C" __global__ void __launch_bounds__(sparge::means::kThreads, sparge::means::kBlocksPerSm)
    means(const __grid_constant__ sparge::MeansParams p) {
  using namespace sparge;
  __shared__ means::Smem smem;
  const i32 tensors = p.with_values ? 2 : 1;
  i32 index = blockIdx.x;
  const i32 slice = index % means::kSlices;
  index /= means::kSlices;
  const bool values = index % tensors == 1;
  index /= tensors;
  const i32 head = index % p.problem.kv_heads, b = index / p.problem.kv_heads;
  with_rows(values ? p.v : p.k, b, head, p.problem.channels,
            [&](auto rows) { means::reduce_slice(p, smem, rows, b, head, slice, values); });
}
