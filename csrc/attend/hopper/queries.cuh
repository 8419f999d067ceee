// SPDX-License-Identifier: Apache-2.0
// The 64 query rows of a warpgroup, read once from the caller's tensor into a swizzled INT8 tile. (Operand fragments in
// registers were tried: the 16 registers are wanted for two products in flight.)
//
// A thread reads rows g and g + 8 of its warp's 16 (g = lane / 4), those whose scores it gets, and of each row the
// channels 4t .. 4t + 3 of every 16 (t = lane % 4): four neighbouring lanes read whole 32-byte sectors.
#pragma once

#include "../../common/int8.cuh"
#include "../../common/reduce.cuh"
#include "../../common/rows.cuh"
#include "../../ptx/barrier.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/special.cuh"
#include "layout.cuh"

namespace sparge::hopper {

// Of the two rows of a thread.
using PerRow = float[2];

// Row 0 of this thread's two, within the query block.
SPARGE_DEVICE i32 first_row() { return threadIdx.x / kWarpSize * 16 + threadIdx.x % kWarpSize / 4; }
SPARGE_DEVICE i32 quad_lane() { return threadIdx.x % 4; }

// Barrier 0 is __syncthreads. Each consumer warpgroup meets at its own, and awaits its turn at another.
enum NamedBarrier { kBarrierRows = 1, kBarrierTurn = kBarrierRows + kConsumerGroups };

SPARGE_DEVICE void sync_group(i32 group) { ptx::barrier_sync<kGroupThreads>(kBarrierRows + group); }

// The warpgroups compute exponentials in turns: at the same time, both would wait for one pipe and then leave it idle.
// Each keeps the names of both barriers in registers (Consumer).
SPARGE_DEVICE void await_turn(i32 barrier) { ptx::barrier_sync<kConsumerGroups * kGroupThreads>(barrier); }
SPARGE_DEVICE void pass_turn(i32 barrier) { ptx::barrier_arrive<kConsumerGroups * kGroupThreads>(barrier); }

struct Queries {
  PerRow scale;  // INT8 level of each row

  SPARGE_DEVICE Queries(const AttendParams& p, const Work& work, Smem& smem) {
    with_rows(p.q, work.b, work.head, p.problem.channels, [&](auto rows) {
      Row x[2] = {};
      load_rows(x, p, work, rows);
#pragma unroll
      for (int half = 0; half < 2; ++half) quantize_row(p, work, x[half], half, smem);
    });
    ptx::fence_proxy_async();
    sync_group(uniform(threadIdx.x / kGroupThreads));
  }

 private:
  static constexpr int kChunks = kHeadDim / 16;
  using Row = float[kChunks][4];

  // All loads of both rows start before the first is waited for: an item begins with the latency of the memory, once.
  template <DType kType>
  SPARGE_DEVICE static void load_rows(Row (&x)[2], const AttendParams& p, const Work& work, const Rows<kType>& rows) {
    i32 token[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) token[half] = work.token(p.problem, first_row() + 8 * half);
    if (rows.whole(kHeadDim)) {
      constexpr int kWords = 4 * Rows<kType>::kBytes / 4;  // of four channels
      u32 bits[2][kChunks][kWords] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (token[half] >= 0) {
#pragma unroll
          for (int chunk = 0; chunk < kChunks; ++chunk)
            rows.load_bits(bits[half][chunk], token[half], 16 * chunk + 4 * quad_lane());
        }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) rows.unpack(bits[half][chunk], x[half][chunk]);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          if (token[half] >= 0) rows.load(token[half], 16 * chunk + 4 * quad_lane(), x[half][chunk]);
    }
  }

  SPARGE_DEVICE void quantize_row(const AttendParams& p, const Work& work, const Row& x, int half, Smem& smem) {
    const i32 row = first_row() + 8 * half;
    float amax = 0.0f, dot = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
      for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(x[chunk][i]));
    if (p.lse) {
      const float* mean = p.k_mean + work.kv_at * kHeadDim + 4 * quad_lane();
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
        for (int i = 0; i < 4; ++i) dot += x[chunk][i] * mean[16 * chunk + i];
    }
    amax = lane_max<1, 4>(amax);
    dot = lane_sum<1, 4>(dot);
    if (quad_lane() == 0) smem.q_dot_mean[row] = dot;
    scale[half] = int8_scale(amax);
    const float inverse_scale = int8_inverse_scale(amax);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      u8* at = smem.q[row / kGroupRows] + tile_offset<kHeadDim>(row % kGroupRows, chunk) + 4 * quad_lane();
      *reinterpret_cast<u32*>(at) = pack_int8(x[chunk], inverse_scale);
    }
  }
};

}  // namespace sparge::hopper
