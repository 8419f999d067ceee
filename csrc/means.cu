// SPDX-License-Identifier: Apache-2.0
// Launch 1: mean and extent of K, mean and scale of V, per (batch, kv head, channel), over the valid keys.
//
// Semantics   k_mean = sum K / n over one of every k_stride runs of 64 keys (0 without smooth_k), and k_extent the largest
//             |K - k_mean| of these; v_mean = sum V / n;
//             v_scale = max(max V - v_mean, v_mean - min V) / 448, at least 2^-126, 1 when that is 0.
// Strategy    On Hopper a cluster of four thread blocks has K or V of one head: its blocks share out whole tokens, and each then
//             adds up a quarter of the channels of all. Elsewhere each block reads its 32 channels (64 bytes) of every token.
//             V comes first: with a token order K is a seventh of the work, and fills what V leaves free.
//             No counters or atomics exist, and the bits never change. A thread keeps ten copies of 16 bytes on their way to
//             shared memory, and waits for its own only.
// Tried       docs/experiments.md, "Means".
#include "common/chunks.cuh"
#include "common/config.cuh"
#include "common/reduce.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"

namespace sparge::means {

SPARGE_CHECK_PARAMS(MeansParams);

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr bool kClustered = ptx::kClusters;
// Thread blocks that share a head's K or V.
constexpr int kSlices = kClustered ? 4 : kHeadDim / 32;
constexpr int kChannels = kHeadDim / kSlices;  // that a thread block answers for
constexpr int kReadChannels = kClustered ? kHeadDim : kChannels;
constexpr int kReaders = kClustered ? kSlices : 1;  // thread blocks that share out the tokens
constexpr int kTokenLanes = kReadChannels / kLaneChannels;
constexpr int kTokensPerPass = kThreads / kTokenLanes;
constexpr int kRunReaders = kKeyBlock / kTokensPerPass;  // readers that pass over a run of 64 tokens together
constexpr int kRuns = kReaders / kRunReaders;            // runs that all readers pass over together
constexpr int kStages = 10;      // copies in flight a thread: 40 KB a block, as much as static shared memory has room for
constexpr int kBlocksPerSm = 3;  // all 384 blocks of the Mochi shape run at once on 132 SMs

constexpr float kLeastValueScale = 0x1p-126f;  // its reciprocal, by which quantize multiplies, is finite
constexpr float kSumUnit = 0x1p-24f;           // factor of each number, so that no sum of 16 million of them overflows

struct Sums {
  float of_warps[3][kWarps][kReadChannels];  // sum, least, most
  float of_block[3][kReadChannels];
};

union Smem {
  Chunk stages[kStages][kThreads];
  Sums sums;
};

// Sums of a thread's tokens, and their extremes as 16-bit pairs.
template <Source kSource>
struct Channels {
  const Chunks<kSource>& rows;
  float sum[kLaneChannels] = {};
  Chunk low, high;

  SPARGE_DEVICE explicit Channels(const Chunks<kSource>& r) : rows(r) {
    const u32 infinity = rows.half() ? 0x7C007C00u : 0x7F807F80u;
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; ++i) low.word[i] = infinity, high.word[i] = infinity | 0x80008000u;
  }

  SPARGE_DEVICE void add(const Chunk& chunk) {
    float x[kLaneChannels];
    rows.unpack(chunk, x);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) sum[i] = __fmaf_rn(x[i], kSumUnit, sum[i]);
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; ++i) {
      low.word[i] = rows.half() ? ptx::min_fp16(low.word[i], chunk.word[i]) : ptx::min_bf16(low.word[i], chunk.word[i]);
      high.word[i] = rows.half() ? ptx::max_fp16(high.word[i], chunk.word[i]) : ptx::max_bf16(high.word[i], chunk.word[i]);
    }
  }
};

static_assert(kRunReaders * kTokensPerPass == kKeyBlock && kRuns * kRunReaders == kReaders, "Readers pass over whole runs.");

// Adds one token of every `kRuns * stride`-th run, from `token` on.
template <Source kSource>
SPARGE_DEVICE void add_tokens(Channels<kSource>& channels, Chunk (&stages)[kStages][kThreads], i32 token, i32 channel, i32 length,
                              i32 stride) {
  const i32 step = kRuns * stride * kKeyBlock;
  const Chunks<kSource>& rows = channels.rows;
  if constexpr (kSource == Source::kOther) {
    for (; token < length; token += step) channels.add(rows.load(token, channel));
  } else {
    const char* source = rows.at(token, channel);
    const i64 step_bytes = step * rows.token_bytes;
    i32 ahead = channel < rows.channels ? token : length;  // padding is never read
    auto fetch = [&](i32 stage) {
      const bool inside = ahead < length;
      ptx::cp_async_16_or_zero(ptx::shared_address(&stages[stage][threadIdx.x]), inside ? source : rows.base, inside);
      ptx::cp_async_commit();
      source += step_bytes;
      ahead += step;
    };
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) fetch(stage);
    while (token < length) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage, token += step) {
        ptx::cp_async_wait<kStages - 1>();
        const Chunk chunk = stages[stage][threadIdx.x];
        fetch(stage);
        if (token < length) channels.add(chunk);
      }
    }
    ptx::cp_async_wait<0>();
  }
}

struct Extent {
  float sum = 0.0f, low = -kMinusInfinity, high = kMinusInfinity;

  SPARGE_DEVICE void add(float other_sum, float other_low, float other_high) {
    sum += other_sum;
    low = fminf(low, other_low);
    high = fmaxf(high, other_high);
  }
};

// Over the thread block, then over the cluster: of channel threadIdx.x of the slice.
SPARGE_DEVICE Extent over_blocks(Sums& sums, i32 slice) {
  const i32 channel = threadIdx.x;
  Extent extent;
  if (channel < kReadChannels)
    for (int w = 0; w < kWarps; ++w)
      extent.add(sums.of_warps[0][w][channel], sums.of_warps[1][w][channel], sums.of_warps[2][w][channel]);
#if SPARGE_ARCH == 90
  if (channel < kReadChannels) {
    sums.of_block[0][channel] = extent.sum;
    sums.of_block[1][channel] = extent.low;
    sums.of_block[2][channel] = extent.high;
  }
  ptx::cluster_sync();
  if (channel < kChannels) {
    const i32 own = slice * kChannels + channel;
    extent = {};
    for (int rank = 0; rank < kReaders; ++rank)
      extent.add(ptx::load_cluster(sums.of_block[0][own], rank), ptx::load_cluster(sums.of_block[1][own], rank),
                 ptx::load_cluster(sums.of_block[2][own], rank));
  }
  ptx::cluster_sync();  // nobody leaves while another reads its sums
#endif
  return extent;
}

template <Source kSource>
SPARGE_DEVICE void reduce_slice(const MeansParams& p, Smem& smem, const Chunks<kSource>& rows, i32 b, i32 head, i32 slice,
                                bool values) {
  const i32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const i32 own_channel = (lane % kTokenLanes) * kLaneChannels;
  const i32 length = p.problem.key_length(b);
  Channels<kSource> channels(rows);
  const i32 stride = values ? 1 : p.k_stride, reader = kClustered ? slice : 0;
  const i32 token = threadIdx.x / kTokenLanes + reader % kRunReaders * kTokensPerPass + reader / kRunReaders * stride * kKeyBlock;
  add_tokens(channels, smem.stages, token, own_channel + (kClustered ? 0 : slice * kChannels), length, stride);
  __syncthreads();  // sums lie where copies did
  float low[kLaneChannels], high[kLaneChannels];
  rows.unpack(channels.low, low);
  rows.unpack(channels.high, high);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const float of_warp[3] = {lane_sum<kTokenLanes, kWarpSize>(channels.sum[i]), lane_min<kTokenLanes, kWarpSize>(low[i]),
                              lane_max<kTokenLanes, kWarpSize>(high[i])};
    if (lane < kTokenLanes)
#pragma unroll
      for (int k = 0; k < 3; ++k) smem.sums.of_warps[k][warp][own_channel + i] = of_warp[k];
  }
  __syncthreads();
  const Extent extent = over_blocks(smem.sums, slice);
  if (threadIdx.x >= kChannels) return;

  const i32 period = stride * kKeyBlock, counted = length / period * kKeyBlock + smaller<i32>(length % period, kKeyBlock);
  const float mean = length ? extent.sum / static_cast<float>(counted) / kSumUnit : 0.0f;
  const i64 at = (static_cast<i64>(b) * p.problem.kv_heads + head) * kHeadDim + slice * kChannels + threadIdx.x;
  auto reach_around = [&](float centre) { return length ? fmaxf(extent.high - centre, centre - extent.low) : 0.0f; };
  if (values) {
    const float reach = reach_around(mean);
    p.v_mean[at] = mean;
    p.v_scale[at] = reach > 0.0f ? fmaxf(reach / kValueLevels, kLeastValueScale) : 1.0f;
  } else {
    const float centre = p.smooth_k ? mean : 0.0f;
    p.k_mean[at] = centre;
    p.k_extent[at] = reach_around(centre);
    if (p.reach && slice == 0 && threadIdx.x == 0) p.reach[b * p.problem.kv_heads + head] = 0;
  }
}

}  // namespace sparge::means

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::means::kThreads, 0};
extern "C" __device__ const sparge::MeansSizes launch_sizes = {sparge::means::kSlices};

// Grid: (V, then K) x batch x kv_heads x channel slices, slices fastest: a cluster has those of one tensor.
extern "C" __global__ void SPARGE_CLUSTER(sparge::means::kSlices)
    __launch_bounds__(sparge::means::kThreads, sparge::means::kBlocksPerSm) means(const __grid_constant__ sparge::MeansParams p) {
  using namespace sparge;
  __shared__ means::Smem smem;
  const i32 slice = blockIdx.x % means::kSlices, heads = p.problem.batch * p.problem.kv_heads;
  i32 index = blockIdx.x / means::kSlices;
  const bool values = index < heads;
  if (!values) index -= heads;
  const i32 head = index % p.problem.kv_heads, b = index / p.problem.kv_heads;
  with_chunks(values ? p.v : p.k, b, head, p.problem.channels,
              [&](auto rows) { means::reduce_slice(p, smem, rows, b, head, slice, values); });
}
