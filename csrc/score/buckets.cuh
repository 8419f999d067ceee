// SPDX-License-Identifier: Apache-2.0
// The key blocks of a query block in the order in which densities drop them: first what every density drops, then bucket by
// bucket what only less dense ones drop. So what a density drops is a beginning of the list, and no block counts twice.
//
// A bucket is filled up to a multiple of eight places with its last block, at a bias of minus infinity.
#pragma once

#include "../common/reduce.cuh"
#include "place.cuh"

namespace sparge::score {

constexpr int kStep = 8;  // places in a product

struct Buckets {
  i32 ends[kMostDensities];  // end of density t's dropped blocks in the list; 0 for the last density
};

// Blocks of a word that density t is the last to drop. Denser ones keep what less dense ones keep.
SPARGE_DEVICE u32 bucket_word(const ScoreParams& p, const u32* maps, i32 stride, i32 t, i32 word) {
  const i32 left = p.key_blocks - word * kMapBits;
  const u32 all = left >= kMapBits ? 0xFFFFFFFFu : (1u << left) - 1,
            next = t + 2 < p.densities ? maps[(t + 1) * stride + word] : all;
  return next & ~maps[t * stride + word] & all;
}

// By all threads of the block, for which the list is complete on return.
SPARGE_DEVICE void list_buckets(const ScoreParams& p, const Place& place, const Shared& shared, Buckets& buckets) {
  const i32 pooling = p.densities - 1, words = ceil_div(p.key_blocks, kMapBits), stride = p.blocks * words;
  const u32* maps = p.kept + (static_cast<i64>(place.head_at) * pooling * p.blocks + place.block) * words;
  const i32 warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  for (i32 t = warp; t < pooling; t += kWarps) {
    u32 count = 0;
    for (i32 word = lane; word < words; word += kWarpSize) count += __popc(bucket_word(p, maps, stride, t, word));
    count = warp_sum(count);
    if (lane == 0) buckets.ends[t] = ceil_div<i32>(count, kStep) * kStep;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    i32 end = 0;
    buckets.ends[pooling] = 0;
    for (i32 t = pooling - 1; t >= 0; --t) buckets.ends[t] = end += buckets.ends[t];
  }
  __syncthreads();
  for (i32 t = warp; t < pooling; t += kWarps) {
    i32 at = buckets.ends[t + 1];
    for (i32 first = 0; first < words; first += kWarpSize) {
      const i32 word = first + lane;
      u32 bits = word < words ? bucket_word(p, maps, stride, t, word) : 0;
      i32 end = __popc(bits);
#pragma unroll
      for (int step = 1; step < kWarpSize; step *= 2) {
        const i32 before = __shfl_up_sync(kFullWarp, end, step);
        if (lane >= step) end += before;
      }
      for (i32 own = at + end - __popc(bits); bits; bits &= bits - 1, ++own) {
        shared.list[own] = static_cast<u16>(word * kMapBits + __ffs(bits) - 1);
        shared.bias[own] = 0.0f;
      }
      at += __shfl_sync(kFullWarp, end, kWarpSize - 1);
    }
    __syncwarp();
    if (at + lane < buckets.ends[t]) {
      shared.list[at + lane] = shared.list[at - 1];
      shared.bias[at + lane] = kMinusInfinity;
    }
  }
  __syncthreads();
  const i32* counts = p.key_counts + place.kv_at(p) * p.key_blocks;
  for (i32 i = threadIdx.x; i < buckets.ends[0]; i += kThreads)
    shared.bias[i] += log2f(static_cast<float>(counts[shared.list[i]]));
  __syncthreads();
}

}  // namespace sparge::score
