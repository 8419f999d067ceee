// SPDX-License-Identifier: Apache-2.0
// K and V tiles on their way from L2 to shared memory, a few blocks ahead of the products.
#pragma once

#include "../ptx/cp_async.cuh"
#include "block_list.cuh"
#include "layout.cuh"

namespace sparge::attend {

// The thread index is read where it is used: sums of it and the tensors' pointers would be kept across the main loop.
template <int kBytes>
SPARGE_DEVICE void copy_tile(u8* destination, const u8* source) {
  const u32 to = ptx::shared_address(destination) + ptx::thread_index() * 16;
  const u8* from = source + ptx::thread_index() * 16;
#pragma unroll
  for (int offset = 0; offset < kBytes; offset += kThreads * 16) ptx::cp_async_16(to + offset, from + offset);
}

// Usage:
//   for (i32 block = wait_keys(); block >= 0; block = wait_keys()) { ... scores ...; wait_values(); ... PV ...; }
//
// With several stages K and V of a block travel together, kStages - 1 blocks ahead, at one barrier a block; the slot that
// was handed out last is the next to fill, once every warp is done with it. With one stage V of a block travels during its
// scores and K of the next block during its PV, at two barriers a block.
struct Pipeline {
  Smem& smem;
  const AttendParams& p;
  BlockList ahead;
  i32 slot = 0;

  SPARGE_DEVICE Pipeline(Smem& s, const AttendParams& params, const BlockList& list) : smem(s), p(params), ahead(list) {
#pragma unroll
    for (int i = 0; i < (kStages > 1 ? kStages - 1 : 1); ++i) fill();
  }

  SPARGE_DEVICE void load_keys(i32 block) {
    const i32 tile = smem.work.first_tile + block;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.k_tiles + static_cast<i64>(tile) * kKeyTileBytes);
    if (is_quantized(kElement) && threadIdx.x == 0)
      ptx::cp_async_4(ptx::shared_address(&smem.stage[slot].k_scale), p.k_scale + tile);
  }
  SPARGE_DEVICE void load_values(i32 block) {
    const i64 tile = smem.work.first_tile + block;
    copy_tile<kValueTileBytes>(smem.v[slot], p.v_tiles + tile * kValueTileBytes);
  }

  // Asks for the next block of the list; an empty group at its end keeps the group count regular.
  SPARGE_DEVICE void fill() {
    i32 block = ahead.next();
    if (block * kKeyBlock >= p.problem.keys) block = -1;
    if (threadIdx.x == 0) smem.stage[slot].block = block;
    if (block >= 0) {
      load_keys(block);
      if constexpr (kStages > 1) load_values(block);
    }
    if constexpr (kStages > 1) slot = slot + 1 == kStages ? 0 : slot + 1;
    ptx::cp_async_commit();
  }

  // The next block of the list, its keys in shared memory; -1 at the end.
  SPARGE_DEVICE i32 wait_keys() {
    ptx::cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();  // tiles of all threads have landed, and every warp is done with what is filled below
    if constexpr (kStages > 1) {
      fill();
      return smem.stage[slot].block;
    } else {
      const i32 block = smem.stage[0].block;
      if (block >= 0) load_values(block);
      ptx::cp_async_commit();
      return block;
    }
  }

  SPARGE_DEVICE void wait_values() {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      fill();
    }
  }

  SPARGE_DEVICE const u8* keys() const { return smem.k[slot]; }
  SPARGE_DEVICE const u8* values() const { return smem.v[slot]; }
  SPARGE_DEVICE float key_scale() const { return is_quantized(kElement) ? smem.stage[slot].k_scale : 1.0f; }
};

}  // namespace sparge::attend
