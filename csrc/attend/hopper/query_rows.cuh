// SPDX-License-Identifier: Apache-2.0
// How the feeder turns the 128 query rows of a work item into swizzled tiles in shared memory.
//
// All loads of a warp are in flight at once, straight into shared memory: 24 registers a thread hold one at a time.
// A lane finds 16 bytes of 16-bit rows where they belong. INT8 rows are quantized from where they arrived: a lane rotates what it
// fetched where the head is balanced, then each warp takes groups of eight rows, four lanes a row.
#pragma once

#include "../../common/balance.cuh"
#include "../../common/chunks.cuh"
#include "../../common/int8.cuh"
#include "../../common/reduce.cuh"
#include "../../ptx/special.cuh"
#include "rows.cuh"

namespace sparge::hopper {

// Among the feeder's. Read again wherever it is used: 24 registers keep nothing.
SPARGE_DEVICE i32 feeder_thread() { return ptx::thread_index() % kGroupThreads - kWarpSize; }

struct QueryRows {
  const AttendParams& p;
  Smem& smem;
  Queries& queries;
  // One code for all types: with one for each, the compiler keeps more in registers than there are.
  const Chunks<Source::kAny> rows;

  SPARGE_DEVICE QueryRows(const AttendParams& params, Smem& s, Queries& q)
      : p(params), smem(s), queries(q), rows(p.q, uniform(q.work.b), uniform(q.work.head), p.problem.channels) {}

  // Infinite queries become NaN.
  SPARGE_DEVICE void copy(u8* tiles) const {
#pragma unroll 1
    for (i32 row = first_row(); row < kQueryBlock; row += kRows * kFeederWarps)
      rows.fetch(chunk_of(tiles, row), queries.token[row], channel());
    wait_for_chunks();
#pragma unroll 1
    for (i32 row = first_row(); row < kQueryBlock; row += kRows * kFeederWarps) {
      Chunk chunk = chunk_of(tiles, row);
#pragma unroll
      for (int i = 0; i < kLaneChannels / 2; ++i) {
        float low, high;
        rows.unpack(chunk.word[i], low, high);
        chunk.word[i] = kElement == Element::kBf16 ? ptx::nan_if_infinite_bf16(ptx::pack_bf16(low, high))
                                                   : ptx::nan_if_infinite_fp16(ptx::pack_fp16(low, high));
      }
      chunk_of(tiles, row) = chunk;
    }
  }

  SPARGE_DEVICE void quantize(u8* tile) const {
    fetch_groups();
    const bool balanced = p.balance[queries.work.kv_at * kHeadDim] != kNoBalance;
    wait_for_chunks();
    if (balanced) rotate();
    __syncwarp();
    if (rows.half() && !balanced)
      quantize_groups<DType::kFp16>(tile);
    else
      quantize_groups<DType::kBf16>(tile);
    __syncwarp();
    bound_scales();
  }

  // For the log-sum-exp alone.
  SPARGE_DEVICE void multiply_by_mean() const {
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
      dot = lane_sum<1, kRowChunks>(dot);
      if (channel() == 0) queries.dot_mean[row] = dot;
    }
  }

 private:
  static constexpr int kRows = kWarpSize / kRowChunks;  // rows that a warp reads by one load
  static constexpr int kGroup = kWarpSize / kShare;     // rows that a warp quantizes at once
  static constexpr int kChunks = kRowChunks / kShare;   // chunks of a row that a lane quantizes
  static constexpr u32 kMagnitudes = 0x7FFF7FFF;

  SPARGE_DEVICE static i32 first_row() { return feeder_thread() / kRowChunks; }
  SPARGE_DEVICE static i32 channel() { return ptx::thread_index() % kRowChunks * kLaneChannels; }

  SPARGE_DEVICE static Chunk& chunk_of(u8* tiles, i32 row) {
    const u32 at = row / kGroupRows * kQueryTileBytes + key_offset<kGroupRows>(row % kGroupRows, channel() / kLaneChannels);
    return *reinterpret_cast<Chunk*>(tiles + at);
  }

  SPARGE_DEVICE static void wait_for_chunks() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  // First row of this warp's groups, which are dealt out among the warps.
  SPARGE_DEVICE static i32 group(i32 pass) { return (pass * kFeederWarps + feeder_thread() / kWarpSize) * kGroup; }

  // Row of the groups that this lane reads by a load of its warp.
  SPARGE_DEVICE static i32 row_of(i32 load) {
    constexpr int kLoads = kGroup / kRows;
    return group(load / kLoads) + load % kLoads * kRows + ptx::thread_index() % kWarpSize / kRowChunks;
  }

  SPARGE_DEVICE void fetch_groups() const {
#pragma unroll 1
    for (i32 load = 0, row; (row = row_of(load)) < kQueryBlock; ++load)
      rows.fetch(smem.raw[row][ptx::thread_index() % kRowChunks], queries.token[row], channel());
  }

  SPARGE_DEVICE float* balance_of_warp() const { return smem.balance[feeder_thread() / kWarpSize]; }

  SPARGE_DEVICE void rotate() const {
#pragma unroll 1
    for (i32 at = ptx::thread_index() % kWarpSize; at < kHeadDim; at += kWarpSize)
      balance_of_warp()[at] = p.balance[queries.work.kv_at * kHeadDim + at];
    __syncwarp();
    if (rows.half())
      rotate_groups<DType::kFp16>();
    else
      rotate_groups<DType::kBf16>();
  }

  // Volatile: each factor is read when it is needed, for there are no registers for eight.
  template <DType kType>
  SPARGE_DEVICE void rotate_groups() const {
    const volatile float* balance = balance_of_warp() + channel();
#pragma unroll 1
    for (i32 load = 0, row; (row = row_of(load)) < kQueryBlock; ++load)
      rotate_queries<kType>(smem.raw[row][ptx::thread_index() % kRowChunks], balance);
  }

  // Reads the numbers twice instead of keeping them.
  template <DType kType>
  SPARGE_DEVICE void quantize_groups(u8* tile) const {
#pragma unroll 1
    for (i32 pass = 0;; ++pass) {
      const i32 lane = ptx::thread_index() % kWarpSize, share = lane % kShare, row = group(pass) + lane / kShare;
      if (row >= kQueryBlock) return;
      const Chunk* chunks = &smem.raw[row][share];
      const float amax = largest_magnitude<kType>(chunks);
      const float inverse_scale = int8_inverse_scale(amax);
#pragma unroll(kChunks / 2)
      for (int i = 0; i < kChunks; ++i) {
        const Chunk chunk = chunks[i * kShare];
        const i32 place = share + i * kShare;
        const u32 at = tile_offset<kHeadDim>(row, place / 2) + place % 2 * kLaneChannels;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[4];
          unpack_pair(kType, chunk.word[2 * half], x[0], x[1]);
          unpack_pair(kType, chunk.word[2 * half + 1], x[2], x[3]);
          reinterpret_cast<u32*>(tile + at)[half] = pack_int8(x, inverse_scale);
        }
      }
      if (share == 0) queries.scale[row] = int8_scale(amax);
    }
  }

  // Largest magnitude of a row, NaN if one of its numbers is. Bits of magnitudes are ordered as the numbers are, NaN above all.
  template <DType kType>
  SPARGE_DEVICE static float largest_magnitude(const Chunk* chunks) {
    u32 largest = 0;
#pragma unroll(kChunks / 2)
    for (int i = 0; i < kChunks; ++i) {
      const Chunk chunk = chunks[i * kShare];
#pragma unroll
      for (int word = 0; word < kLaneChannels / 2; ++word) largest = ptx::max_of_halves(largest, chunk.word[word] & kMagnitudes);
    }
#pragma unroll
    for (int step = 1; step < kShare; step *= 2) largest = ptx::max_of_halves(largest, __shfl_xor_sync(kFullWarp, largest, step));
    float low, high;
    unpack_pair(kType, largest, low, high);
    return ptx::max_or_nan(low, high);
  }

  // For the rows that this warp has quantized, a lane each.
  SPARGE_DEVICE void bound_scales() const {
    const attend::ScaleBounds bounds(p, queries.work.kv_at);
#pragma unroll 1
    for (i32 index = ptx::thread_index() % kWarpSize;; index += kWarpSize) {
      const i32 row = group(index / kGroup) + index % kGroup;
      if (row >= kQueryBlock) return;
      const float scale = queries.scale[row], bounded = bounds.bounded(scale);
      queries.scale[row] = bounded;
      queries.sharpness[row] = bounds.sharpness(scale, bounded);
    }
  }
};

}  // namespace sparge::hopper
