// SPDX-License-Identifier: Apache-2.0
// A block of tokens spread over a thread block, and its per-channel sums.
#pragma once

#include "../common/chunks.cuh"
#include "../common/config.cuh"
#include "../common/floats.cuh"
#include "../common/reduce.cuh"
#include "../ptx/special.cuh"

namespace sparge::quantize {

// Sixteen tokens at a time, eight channels a thread: four of its chunks are a key block.
constexpr int kTokenLanes = kHeadDim / kLaneChannels;
constexpr int kTokensPerPass = 16;
constexpr int kThreads = kTokenLanes * kTokensPerPass;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kPasses = kKeyBlock / kTokensPerPass;
// 64 registers a thread hold a key tile; what else lives as long is in shared memory. docs/experiments.md, "Registers of quantize".
constexpr int kBlocksPerSm = 1024 / kThreads;

// Whether loads of a run's next keys and values start before the statistics of a block. Elsewhere ptxas spills.
constexpr bool kLoadsEarly = kArch == 90 && is_quantized(kElement);

// Made where it is used: registers hold the loads of the next block.
struct Thread {
  i32 index = ptx::thread_index();
  i32 lane = index % kWarpSize;
  i32 warp = index / kWarpSize;
  i32 token = index / kTokenLanes;
  i32 channel = (index % kTokenLanes) * kLaneChannels;
};

// As Problem::order_start, without divisions in the usual case. Inside Problem it would change the order of attend's loop.
SPARGE_DEVICE i32 order_start_of_keys(const Problem& problem, i32 kv) {
  if (problem.heads != problem.kv_heads) return problem.order_start(kv);
  return problem.head_order_kind ? larger(0, smaller(problem.head_order_kind[kv], problem.order_kinds - 1)) * problem.keys : 0;
}
SPARGE_DEVICE i32 order_start_of_queries(const Problem& problem, i32 head) {
  return order_start_of_keys(problem, problem.heads == problem.kv_heads ? head : problem.kv_head(head));
}

// What a thread block knows of its head and of its run: the blocks of the head that it takes one after another, the last first.
// In shared memory, as registers hold the blocks.
struct Run {
  const char* base;  // of the tensor's rows
  i32 head_at;       // the head's place among those of all batches
  i32 blocks;        // of the head
  i32 first;         // block of the run
  i32 start;         // of the head's token order in slot_token
  i32 length;        // number of keys
  bool whole;        // see KeySlots

  SPARGE_DEVICE i32 at(i32 block) const { return head_at * blocks + block; }
  SPARGE_DEVICE i64 pool_tile_at(i32 block) const {
    return static_cast<i64>(head_at) * ceil_div(blocks, kKeyBlock) + block / kKeyBlock;
  }
  template <Source kSource>
  SPARGE_DEVICE Chunks<kSource> rows(Chunks<kSource> same) const {
    same.base = base;
    return same;
  }
};

// The tokens of a key block, and how many there are. They come first in the block. Key lengths that cut into the grid of a token
// order would leave holes; Run::whole is false then, for the block entered last.
struct KeySlots {
  const Problem& problem;
  Run& run;
  i32 block, count;

  SPARGE_DEVICE KeySlots(const Problem& p, Run& shared) : problem(p), run(shared) {}

  // By all threads, after the last read of `whole`. Returns whether the run has the block.
  SPARGE_DEVICE bool enter(i32 next) {
    block = next;
    if (block < run.first) return false;
    count = larger(0, smaller(kKeyBlock, run.length - block * kKeyBlock));
    if (!problem.slot_token) return true;
    if (!problem.key_lengths) {
      count = problem.slot_counts[block];
      return true;
    }
    const i32 place = ptx::thread_index();
    const bool here = place < kKeyBlock && token(place) >= 0;
    count = __syncthreads_count(here);
    const bool holes = __syncthreads_or(here && place >= count);
    if (ptx::thread_index() == 0) run.whole = !holes;
    return true;
  }

  // A thread's tokens of the block; zeros where the block does not exist. One condition for all of them: with one each, a lookup
  // would wait for the one before.
  template <Source kSource, typename PlaceOf>
  SPARGE_DEVICE void load(Chunk (&chunk)[kPasses], const Chunks<kSource>& rows, bool exists, i32 channel,
                          PlaceOf&& place_of) const {
    const Chunks<kSource> there = run.rows(rows);
    i32 tokens[kPasses];
    if (exists)
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) tokens[pass] = token(place_of(pass));
    else
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) tokens[pass] = -1;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) chunk[pass] = there.load(tokens[pass], channel);
  }

  // -1: none.
  SPARGE_DEVICE i32 token(i32 place) const { return problem.key_token(run.start, block * kKeyBlock + place, run.length); }
};

// Adds 0 times x: zero stays 0, or becomes NaN where x is not finite.
SPARGE_DEVICE void trace(float& zero, float x) { zero = __fmaf_rn(x, 0.0f, zero); }

// By one thread, for 16 bits: nothing else tells of keys or values that a row drops.
SPARGE_DEVICE void note_finite(const QuantizeParams& p, const Run& run, i32 block, bool values, bool finite) {
  p.finite[(static_cast<i64>(run.head_at) * 2 + values) * run.blocks + block] = finite;
}
// Bits of numbers that are not negative are ordered as the numbers are, and those of NaN are above them all.
SPARGE_DEVICE void note_reach(const QuantizeParams& p, const Run& run, float reach) {
  atomicMax(p.reach + run.head_at, __float_as_uint(reach));
}

constexpr float kLeastNormal = 0x1p-126f;

// 1 / |row| of the token that kTokenLanes lanes hold together; 0 for a row of zeros, or next to it: shorter than 2^-63.
SPARGE_DEVICE float inverse_norm(const float (&x)[kLaneChannels]) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) squares += x[i] * x[i];
  squares = lane_sum<1, kTokenLanes>(squares);
  return squares >= kLeastNormal ? ptx::rsqrt_approx(squares) : 0.0f;
}

// Sums of a block's tokens by channel, one row a part of the thread block.
template <int kParts>
using ChannelSums = float[kParts][kHeadDim];

struct alignas(16) SumsSmem {
  ChannelSums<kWarps> rows;
  ChannelSums<kWarps> unit_rows;
};

static_assert(kTokenLanes == kWarpSize / 2 || kTokenLanes == kWarpSize / 4, "two or four lanes have the same channels");

// Adds over the threads of a warp that have the same channels; each of these keeps a share of the sums.
SPARGE_DEVICE void store_sums(ChannelSums<kWarps>& sums, const Thread& thread, const float (&x)[kLaneChannels]) {
  float four[4], two[2];
  float* at = &sums[thread.warp][thread.channel + (thread.lane & kTokenLanes ? 4 : 0)];
#pragma unroll
  for (int i = 0; i < 4; ++i) four[i] = lane_sum_of_two(x[i], x[i + 4], thread.lane, kTokenLanes);
  if constexpr (kTokenLanes == kWarpSize / 2) {
    store_floats(at, four);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) two[i] = lane_sum_of_two(four[i], four[i + 2], thread.lane, 2 * kTokenLanes);
    at += thread.lane & 2 * kTokenLanes ? 2 : 0;
    store_floats(at, two);
  }
}

// Channels of a lane where one warp finishes a statistic alone, without a barrier: neighbouring ones.
constexpr int kLaneShare = kHeadDim / kWarpSize;

template <int kParts>
SPARGE_DEVICE void over_parts(const ChannelSums<kParts>& sums, i32 lane, float (&total)[kLaneShare]) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float x[kLaneShare];
    load_floats(x, &sums[part][lane * kLaneShare]);
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) total[i] = part == 0 ? x[i] : total[i] + x[i];
  }
}

// Exact for powers of two, such as full blocks have; 0 for none.
SPARGE_DEVICE float inverse_count(i32 count) { return count ? ptx::reciprocal_approx(static_cast<float>(count)) : 0.0f; }

// Self-similarity |sum of unit rows|^2 / count^2.
SPARGE_DEVICE float similarity(const SumsSmem& smem, i32 lane, i32 count) {
  float sum[kLaneShare], squares = 0.0f;
  over_parts(smem.unit_rows, lane, sum);
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) squares += sum[i] * sum[i];
  squares = lane_sum<1, kWarpSize>(squares);
  const float inverse = inverse_count(count);
  return squares * inverse * inverse;
}

// Similarity where no threshold asks for one: 1, or NaN for a block whose mean is no number, which is never dropped.
SPARGE_DEVICE float similarity_of_finite(const float (&mean)[kLaneShare]) {
  float difference = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneShare; ++i) difference += mean[i] - mean[i];
  return __all_sync(kFullWarp, difference == 0.0f) ? 1.0f : kNotANumber;
}

}  // namespace sparge::quantize
