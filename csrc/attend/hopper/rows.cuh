// SPDX-License-Identifier: Apache-2.0
// Which rows of a query block a consumer thread has, and barriers of fewer than all threads.
#pragma once

#include "../../ptx/barrier.cuh"
#include "../../ptx/special.cuh"
#include "layout.cuh"

namespace sparge::hopper {

// Of the two rows of a thread.
using PerRow = float[2];

// Row 0 of this thread's two, within the query block; the other one is eight rows on.
SPARGE_DEVICE i32 first_row() { return threadIdx.x / kWarpSize * 16 + threadIdx.x % kWarpSize / 4; }
// The same, but not kept in a register until it is asked for again.
SPARGE_DEVICE i32 first_row_anew() {
  const i32 thread = ptx::thread_index();
  return thread / kWarpSize * 16 + thread % kWarpSize / 4;
}
// As an item begins: which of the two gives the faster loop ptxas decides (attend_hopper.cu, how ptxas orders the loop).
SPARGE_DEVICE i32 first_row_of_item() { return kHeadDim == 128 ? first_row() : first_row_anew(); }
SPARGE_DEVICE i32 quad_lane() { return threadIdx.x % 4; }
SPARGE_DEVICE i32 quad_lane_anew() { return ptx::thread_index() % 4; }

// The first of the columns 8 j + c (c < 2) of this thread's part of a block that a row does not see.
SPARGE_DEVICE i32 unseen_from(const Step& step, int block, int half, bool causal) {
  const i32 row = step.first_query + first_row() + 8 * half;
  const i32 keys = step.keys[block];
  const i32 end = causal ? smaller(keys, row + 1 - step.block[block] * kKeyBlock) : keys;
  return end - ptx::thread_index() % 4 * 2;
}

// Barrier 0 is __syncthreads. The consumer warpgroups of the 16-bit kernel take turns, each at a barrier of its own; the PV
// filter's votes are one warpgroup's.
enum NamedBarrier { kBarrierTurn = 1, kBarrierFeeder = kBarrierTurn + kConsumerGroups, kBarrierVote };

SPARGE_DEVICE void sync_feeder() { ptx::barrier_sync<kFeederThreads>(kBarrierFeeder); }

}  // namespace sparge::hopper
