// SPDX-License-Identifier: Apache-2.0
// K and V tiles on their way from L2 to shared memory, a few blocks ahead of the products.
#pragma once

#include "../ptx/cp_async.cuh"
#include "block_list.cuh"
#include "layout.cuh"

namespace sparge::attend {

template <int kBytes>
SPARGE_DEVICE void copy_tile(u8* destination, const u8* source) {
  const u32 to = ptx::shared_address(destination) + threadIdx.x * 16;
  const u8* from = source + threadIdx.x * 16;
#pragma unroll
  for (int offset = 0; offset < kBytes; offset += kThreads * 16) ptx::cp_async_16(to + offset, from + offset);
}

// Stages advance one block an iteration. Usage:
//   for (i32 block = wait_keys(); block >= 0; block = wait_keys()) { ... scores ...; wait_values(); ... PV ...; }
//
// The slot whose tiles were handed out last is also the slot to fill next, once every warp is done with it.
struct Pipeline {
  Smem& smem;
  const AttendParams& p;
  BlockList ahead;
  i32 slot = 0;
  i32 value_block = -1;  // one value stage: V of this block still has to be asked for

  SPARGE_DEVICE Pipeline(Smem& s, const AttendParams& params, const BlockList& list) : smem(s), p(params), ahead(list) {
#pragma unroll
    for (int i = 0; i < kKeyStages - 1; ++i) fill();
  }

  SPARGE_DEVICE void load_keys(i32 block) {
    const i32 tile = smem.work.first_tile + block;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.k_tiles + static_cast<i64>(tile) * kKeyTileBytes);
    if (is_quantized(kElement) && threadIdx.x == 0) ptx::cp_async_4(ptx::shared_address(&smem.k_scale[slot]), p.k_scale + tile);
  }
  SPARGE_DEVICE void load_values(i32 block) {
    const i64 tile = smem.work.first_tile + block;
    copy_tile<kValueTileBytes>(smem.v[kValueStages == 1 ? 0 : slot], p.v_tiles + tile * kValueTileBytes);
  }

  // Asks for the next block of the list; an empty group at its end keeps the group count regular.
  SPARGE_DEVICE void fill() {
    const i32 block = ahead.next();
    if (threadIdx.x == 0) smem.block[slot] = block;
    if (block >= 0) {
      load_keys(block);
      if constexpr (kValueStages > 1) load_values(block);
    }
    value_block = block;
    slot = slot + 1 == kKeyStages ? 0 : slot + 1;
    ptx::cp_async_commit();
  }

  // The next block of the list, its keys in shared memory; -1 at the end.
  SPARGE_DEVICE i32 wait_keys() {
    ptx::cp_async_wait<kKeyStages - 2>();
    __syncthreads();  // tiles of all threads have landed, and every warp is done with the slot filled below
    if constexpr (kValueStages == 1) {
      if (value_block >= 0) load_values(value_block);
      ptx::cp_async_commit();
    }
    fill();
    return smem.block[slot];
  }

  SPARGE_DEVICE void wait_values() {
    if constexpr (kValueStages == 1) {
      ptx::cp_async_wait<1>();
      __syncthreads();
    }
  }

  SPARGE_DEVICE const u8* keys() const { return smem.k[slot]; }
  SPARGE_DEVICE const u8* values() const { return smem.v[kValueStages == 1 ? 0 : slot]; }
  SPARGE_DEVICE float key_scale() const { return is_quantized(kElement) ? smem.k_scale[slot] : 1.0f; }
};

}  // namespace sparge::attend
