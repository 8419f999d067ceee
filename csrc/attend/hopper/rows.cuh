// SPDX-License-Identifier: Apache-2.0
// Which rows of a query block a consumer thread has, and barriers of fewer than all threads.
#pragma once

#include "../../ptx/barrier.cuh"
#include "../../ptx/special.cuh"
#include "layout.cuh"

namespace sparge::hopper {

// One number for each of a thread's two rows.
using PerRow = float[2];

// First of this thread's two rows, within the query block. The other one is eight rows on.
SPARGE_DEVICE i32 first_row() { return threadIdx.x / kWarpSize * 16 + threadIdx.x % kWarpSize / 4; }
// The same, but computed anew instead of kept in a register.
SPARGE_DEVICE i32 first_row_anew() {
  const i32 thread = ptx::thread_index();
  return thread / kWarpSize * 16 + thread % kWarpSize / 4;
}
// The one with the faster loop, where a work item begins (docs/experiments.md, "Bounds of scales move the order").
SPARGE_DEVICE i32 first_row_of_item() { return kHeadDim == 128 ? first_row() : first_row_anew(); }
SPARGE_DEVICE i32 quad_lane() { return threadIdx.x % 4; }
SPARGE_DEVICE i32 quad_lane_anew() { return ptx::thread_index() % 4; }

// Bound of this thread's columns 8 j + c (c < 2) of a block: a row does not see those from it on.
SPARGE_DEVICE i32 unseen_from(const Step& step, int block, int half, bool causal) {
  const i32 row = step.first_query + first_row() + 8 * half;
  const i32 keys = step.keys[block];
  const i32 end = causal ? smaller(keys, row + 1 - step.block[block] * kKeyBlock) : keys;
  return end - ptx::thread_index() % 4 * 2;
}

// Score (key tile j, row half, column c) of this thread.
SPARGE_DEVICE constexpr int at(int j, int half, int c) { return 4 * j + 2 * half + c; }

// Maximum of a row that met no key yet, -FLT_MAX: below every finite logit, and finite, so that the difference of two such maxima
// is 0 and not a NaN. Scores that do not exist are minus infinity, also less this maximum. So neither the exponents nor alpha ask
// whether there was a key. Outside the kernel it is minus infinity (reported).
constexpr float kNoKey = __builtin_bit_cast(float, 0xFF7FFFFFu);

// Running maxima of a thread's rows.
struct Maxima {
  PerRow most;  // log2 units, kNoKey before the first key

  // As partial results report it.
  SPARGE_DEVICE float reported(int half) const { return most[half] == kNoKey ? kMinusInfinity : most[half]; }

  // Raises the running maxima to the step's; alpha is the factor on earlier sums.
  SPARGE_DEVICE void raise(const PerRow (&block_most)[kStepBlocks], PerRow& alpha) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = most[half];
      most[half] = fmaxf(before, fmaxf(block_most[0][half], block_most[1][half]));
      alpha[half] = ptx::exp2_approx(before - most[half]);
    }
  }
};

// Barrier 0 is __syncthreads. The consumer warpgroups of the 16-bit kernel alternate, each at a barrier of its own. The PV
// filter's votes are one warpgroup's.
enum NamedBarrier { kBarrierTurn = 1, kBarrierFeeder = kBarrierTurn + kConsumerGroups, kBarrierVote };

SPARGE_DEVICE void sync_feeder() { ptx::barrier_sync<kFeederThreads>(kBarrierFeeder); }

}  // namespace sparge::hopper
