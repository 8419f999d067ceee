// SPDX-License-Identifier: Apache-2.0
// The warps beside the producer put the queries of the next work item into shared memory, as swizzled tiles of INT8 or 16-bit
// rows, and what else the consumers need of it. Else an item would begin with the latencies of finding and loading its rows.
#pragma once

#include "../../common/chunks.cuh"
#include "../../common/int8.cuh"
#include "../../common/reduce.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/prefetch.cuh"
#include "../../ptx/special.cuh"
#include "../background.cuh"
#include "../finite.cuh"
#include "rows.cuh"

namespace sparge::hopper {

struct Feeder {
  const AttendParams& p;
  Smem& smem;

  SPARGE_DEVICE Feeder(const AttendParams& params, Smem& s) : p(params), smem(s) {}

  // Read again wherever it is used: 24 registers keep nothing.
  SPARGE_DEVICE static i32 thread() { return ptx::thread_index() % kGroupThreads - kWarpSize; }

  SPARGE_DEVICE void run() {
    for (ItemTurn items;; ++items.count) {
      const u32 place = uniform(items.place());
      Queries& queries = smem.queries[place];
      if (uniform(thread() / kWarpSize) == 0) ask(queries, items.parity() ^ 1);
      ptx::mbarrier_wait(queries.asked, items.parity());
      if (uniform(queries.turn) < 0) return;
      const u16 flags = kSixteenBits ? attend::first_flags(p, queries.work.kv_at, thread()) : attend::kBothFinite;
      lay_down_facts(queries);
      sync_feeder();
      const AnyChunks rows(p.q, uniform(queries.work.b), uniform(queries.work.head), p.problem.channels);
      if constexpr (kSixteenBits) {
        copy(rows, queries, smem.q[place][0]);
        if (!attend::sees_finite(p, queries.work.kv_at, thread(), kFeederThreads, flags)) queries.zero_if_finite = kNotANumber;
      } else {
        quantize(rows, queries, smem.q[place][0]);
        if (p.lse) multiply_by_mean(rows, queries);
      }
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(queries.ready);
    }
  }

 private:
  // One code for all types: with one for each, the compiler keeps more in registers than there are.
  using AnyChunks = Chunks<Source::kAny>;

  static constexpr int kFeederWarps = kGroupWarps - 1;
  static constexpr int kRowLanes = kHeadDim / kLaneChannels;
  static constexpr int kRows = kWarpSize / kRowLanes;  // rows that a warp reads by one load

  // Takes the next work item as soon as the consumers have left the item before the last, so that its queries are read while they
  // are at the last. One by one, as lists differ in length. Each thread block asks once more than it gets items, so whoever asks
  // last leaves the counter at zero for the next launch.
  SPARGE_DEVICE void ask(Queries& queries, u32 free_parity) const {
    ptx::mbarrier_wait(queries.free, free_parity);
    if (thread() != 0) return;
    const i32 turns = p.problem.batch * p.problem.heads * p.problem.query_blocks();
    i32 turn = atomicAdd(p.next_turn, 1);
    if (turn == turns + static_cast<i32>(gridDim.x) - 1) *p.next_turn = 0;
    if (turn >= turns) turn = -1;
    queries.turn = turn;
    if (turn >= 0) queries.work.read(p, turn);
    ptx::mbarrier_arrive(queries.asked);
  }

  SPARGE_DEVICE static i32 first_row() { return thread() / kRowLanes; }
  SPARGE_DEVICE static i32 channel() { return ptx::thread_index() % kRowLanes * kLaneChannels; }

  SPARGE_DEVICE void lay_down_facts(Queries& queries) const {
#pragma unroll 1
    for (i32 row = thread(); row < kQueryBlock; row += kFeederThreads) {
      const i32 token = queries.work.token(p.problem, row);
      queries.token[row] = token;
      if (token >= 0) prefetch_row(queries.work, token);
    }
    if constexpr (kSixteenBits) {
      if (thread() == 0) queries.zero_if_finite = 0.0f;
    } else {
      lay_down_means(queries);
      if (uniform(thread() / kWarpSize) == 0) lay_down_terms(queries);
    }
  }

  SPARGE_DEVICE void lay_down_means(Queries& queries) const {
#pragma unroll 1
    for (i32 at = thread(); at < kHeadDim; at += kFeederThreads) {
      queries.v_mean[at] = p.v_mean[queries.work.kv_at * kHeadDim + at];
      queries.v_scale[at] = p.v_scale[queries.work.kv_at * kHeadDim + at];
    }
  }

  SPARGE_DEVICE void lay_down_terms(Queries& queries) const {
    const attend::MeanTerms terms = attend::mean_terms(p, queries.work);
    if (thread() == 0) queries.mean_terms = terms;
  }

  static constexpr i32 kSectorBytes = 32;

  // Into the L2: the row loop has one load in flight.
  SPARGE_DEVICE void prefetch_row(const Work& work, i32 token) const {
    const i32 bytes_each = p.q.dtype == DType::kFp32 ? 4 : 2, row_bytes = p.problem.channels * bytes_each;
    const i64 at = work.b * p.q.batch_stride + work.head * p.q.head_stride + token * p.q.token_stride;
    const char* row = static_cast<const char*>(p.q.data) + at * bytes_each;
#pragma unroll 1
    for (i32 byte = 0; byte < row_bytes; byte += kSectorBytes) ptx::prefetch_l2(row + byte);
  }

  // Infinite queries become NaN.
  SPARGE_DEVICE void copy(const AnyChunks& rows, const Queries& queries, u8* tiles) const {
#pragma unroll 1
    for (i32 row = first_row(); row < kQueryBlock; row += kRows * kFeederWarps) {
      Chunk chunk = rows.load(queries.token[row], channel());
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) {
        float low, high;
        rows.unpack(chunk.word[i], low, high);
        chunk.word[i] = kElement == Element::kBf16 ? ptx::nan_if_infinite_bf16(ptx::pack_bf16(low, high))
                                                   : ptx::nan_if_infinite_fp16(ptx::pack_fp16(low, high));
      }
      const u32 at = row / kGroupRows * kQueryTileBytes + key_offset<kGroupRows>(row % kGroupRows, channel() / kLaneChannels);
      *reinterpret_cast<Vec16*>(tiles + at) = {chunk.word[0], chunk.word[1], chunk.word[2], chunk.word[3]};
    }
  }

  // Takes a few rows at a time and unpacks their numbers twice: the producer's warpgroup has 24 registers a thread.
  SPARGE_DEVICE void quantize(const AnyChunks& rows, Queries& queries, u8* tile) const {
#pragma unroll 1
    for (i32 row = first_row(); row < kQueryBlock; row += kRows * kFeederWarps) {
      const Chunk chunk = rows.load(queries.token[row], channel());
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) {
        float low, high;
        rows.unpack(chunk.word[i], low, high);
        amax = ptx::max_or_nan(amax, ptx::max_or_nan(fabsf(low), fabsf(high)));
      }
      amax = lane_max_or_nan<1, kRowLanes>(amax);
      const float inverse_scale = int8_inverse_scale(amax);
      const u32 at = tile_offset<kHeadDim>(row, channel() / 16) + channel() % 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x[4];
        rows.unpack(chunk.word[2 * i], x[0], x[1]);
        rows.unpack(chunk.word[2 * i + 1], x[2], x[3]);
        reinterpret_cast<u32*>(tile + at)[i] = pack_int8(x, inverse_scale);
      }
      if (channel() == 0) queries.scale[row] = int8_scale(amax);
    }
    __syncwarp();
    bound_scales(queries);
  }

  // For the rows that this warp has quantized, a lane each.
  SPARGE_DEVICE void bound_scales(Queries& queries) const {
    const attend::ScaleBounds bounds(p, queries.work.kv_at);
    const i32 warp = thread() / kWarpSize;
#pragma unroll 1
    for (i32 index = ptx::thread_index() % kWarpSize;; index += kWarpSize) {
      const i32 row = (index / kRows * kFeederWarps + warp) * kRows + index % kRows;
      if (row >= kQueryBlock) return;
      const float scale = queries.scale[row], bounded = bounds.bounded(scale);
      queries.scale[row] = bounded;
      queries.sharpness[row] = bounds.sharpness(scale, bounded);
    }
  }

  // For the log-sum-exp alone.
  SPARGE_DEVICE void multiply_by_mean(const AnyChunks& rows, Queries& queries) const {
#pragma unroll 1
    for (i32 row = first_row(); row < kQueryBlock; row += kRows * kFeederWarps) {
      const Chunk chunk = rows.load(queries.token[row], channel());
      const float* mean = p.k_mean + queries.work.kv_at * kHeadDim + channel();
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) {
        float low, high;
        rows.unpack(chunk.word[i], low, high);
        dot += low * mean[2 * i] + high * mean[2 * i + 1];
      }
      dot = lane_sum<1, kRowLanes>(dot);
      if (channel() == 0) queries.dot_mean[row] = dot;
    }
  }
};

}  // namespace sparge::hopper
