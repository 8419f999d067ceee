// SPDX-License-Identifier: Apache-2.0
// K and V tiles on their way from L2 to shared memory, a few blocks ahead of the products.
#pragma once

#include "../ptx/cp_async.cuh"
#include "../ptx/schedule.cuh"
#include "block_list.cuh"
#include "layout.cuh"

namespace sparge::attend {

// Blocks whose copies are under way while one is computed.
constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;

// Usage:
//   for (i32 place = wait_keys(); place >= 0; place = wait_keys()) { ... scores ...; wait_values(); ... PV ...; }
//
// With several stages K and V of a block travel together, kStages - 1 blocks ahead, at one barrier a block; the slot that
// was handed out last is the next to fill, once every warp is done with it. With one stage V of a block travels during its
// scores and K of the next block during its PV, at two barriers a block.
// Every warp walks the list by itself, a block before it copies: so no load or vote stands between a barrier and the copies.
struct Pipeline {
  Smem& smem;
  const AttendParams& p;
  const u32* list;
  i32 slot = 0;
  i32 ahead
      [kAhead];  // places of those blocks in the list, the next to compute first; kPooled more for pooled keys, negative: ended
  u32 bits;      // of the list's word, behind the last of them
  // Where they fit in registers, else read afresh (layout.cuh).
  u32 kept_bytes;
  i32 kept_tile;

  static constexpr i32 kPooled = 1 << 30;

  SPARGE_DEVICE Pipeline(Smem& s, const AttendParams& params, const u32* blocks)
      : smem(s), p(params), list(blocks), bits(blocks[0]), kept_bytes(16 * ptx::thread_index()), kept_tile(s.work.first_tile) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = place_after(i ? ahead[i - 1] : 0);
      load_keys(ahead[i]);
      if constexpr (kStages > 1) {
        load_values(ahead[i]);
        next_slot();
      }
      ptx::cp_async_commit();
    }
  }

  // Offset of this thread in a tile that all threads copy: 16 bytes each.
  SPARGE_DEVICE u32 thread_bytes() const { return kAddressesInRegisters ? ptx::opaque(kept_bytes) : 16 * ptx::thread_index(); }
  SPARGE_DEVICE i32 first_tile() const { return kAddressesInRegisters ? kept_tile : smem.work.first_tile; }
  SPARGE_DEVICE void next_slot() {
    if constexpr (kStages > 1) slot = slot + 1 == kStages ? 0 : slot + 1;
  }

  // The place in the list behind the last one that was found. The last word has bits enough for walks past the end, which stay negative.
  SPARGE_DEVICE i32 place_after(i32 last) {
    static_assert(kAhead + 1 < kMapBits);
    i32 word = (last & ~kPooled) / kMapBits;
    while (bits == 0) bits = list[++word];
    const i32 place = word * kMapBits + __ffs(bits) - 1;
    bits &= bits - 1;
    return place < smem.first_pool_place ? place : place < smem.end_of_list ? place + kPooled : -1;
  }

  template <int kBytes>
  SPARGE_DEVICE void copy_tile(u8* tile, const u8* tiles, i64 number) const {
    const u32 bytes = thread_bytes(), to = ptx::shared_address(tile) + bytes;
    const u8* from = tiles + number * kBytes + bytes;
#pragma unroll
    for (int offset = 0; offset < kBytes; offset += kThreads * 16) ptx::cp_async_16(to + offset, from + offset);
  }
  // By one thread, without a branch.
  SPARGE_DEVICE void copy_number(const void* to, const void* from) const {
    ptx::cp_async_4_if(thread_bytes() == 0, ptx::shared_address(to), from);
  }

  // Numbers of the stage that is filled. Where the compiler knows `slot`, NVRTC 12.8 keeps their address across the main loop and
  // spills it. Where it does not (`opaque`), NVRTC 13.0 spills with the PV filter.
  SPARGE_DEVICE Stage& filled() const { return smem.stage[kPvFilter ? slot : static_cast<i32>(ptx::opaque(slot))]; }

  SPARGE_DEVICE void load_keys(i32 place) {
    if (place < 0) return;
    if (place >= kPooled) return load_pooled_keys(pool_tile(place));
    const i32 tile = first_tile() + place;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.k_tiles, tile);
    if constexpr (is_quantized(kElement)) copy_number(&filled().k_scale, p.k_scale + tile);
    copy_number(&filled().keys, p.key_counts + tile);
  }
  SPARGE_DEVICE void load_values(i32 place) {
    if (place < 0) return;
    if (place >= kPooled) return load_pooled_values(pool_tile(place));
    const i32 tile = first_tile() + place;
    copy_tile<kValueTileBytes>(smem.v[slot], p.v_tiles, tile);
    if constexpr (kIntegerValues) copy_number(&smem.stage[slot].v_block_scale, p.v_block_scale + tile);
  }

  // Number of a tile of pooled keys among those of the head.
  SPARGE_DEVICE i32 pool_tile(i32 place) const { return place - kPooled - smem.first_pool_place; }
  // Whether a pooled key of a tile takes part.
  SPARGE_DEVICE bool stands(i32 pool, i32 key) const {
    return pooled_blocks(list, 2 * pool + key / kMapBits, smem.poolable) >> key % kMapBits & 1;
  }
  SPARGE_DEVICE float value_scale(i32 pool, i32 key, bool open) const {
    return open ? p.pool_value_scale[(smem.work.first_pool + static_cast<i64>(pool)) * kKeyBlock + key] : 1.0f;
  }
  SPARGE_DEVICE void load_pooled_keys(i32 pool) {
    const i64 tile = smem.work.first_pool + pool;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.pool_k, tile);
    if (const i32 key = ptx::thread_index(); key < kKeyBlock) {
      const bool open = stands(pool, key);
      PoolColumn column = prepared(p.pool_columns[tile * kKeyBlock + key], smem.work, open);
      if constexpr (kIntegerValues) column.bias += ptx::log2_approx(value_scale(pool, key, open));
      smem.columns[slot][key] = column;
    }
    if (ptx::thread_index() > 0) return;
    smem.stage[slot].k_scale = kPoolScale;
    smem.stage[slot].keys = -1;
  }
  SPARGE_DEVICE void load_pooled_values(i32 pool) {
    copy_tile<kValueTileBytes>(smem.v[slot], p.pool_v, smem.work.first_pool + pool);
    if constexpr (!kIntegerValues) return;
    if (const i32 key = ptx::thread_index(); key < kKeyBlock)
      smem.inverse_value_scale[slot][key] = ptx::reciprocal_approx(value_scale(pool, key, stands(pool, key)));
    if (ptx::thread_index() == 0) smem.stage[slot].v_block_scale = kPoolValueStep;
  }

  // The next place of the list, its keys in shared memory; negative at the end. Empty groups of copies behind the end keep the number
  // of groups regular.
  SPARGE_DEVICE i32 wait_keys() {
    ptx::cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();  // tiles of all threads have arrived, and every warp is done with what is filled below
    const i32 arrived = ahead[0];
    if constexpr (kStages == 1) load_values(arrived);
    const i32 next = place_after(ahead[kAhead - 1]);
#pragma unroll
    for (int i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
    ahead[kAhead - 1] = next;
    if constexpr (kStages > 1) {
      load_keys(next);
      load_values(next);
      next_slot();
    }
    ptx::cp_async_commit();
    return arrived;
  }

  // For the place that wait_keys gave.
  SPARGE_DEVICE void wait_values() {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      load_keys(ahead[0]);
      ptx::cp_async_commit();
    }
  }

  SPARGE_DEVICE const float* inverse_value_scales() const { return smem.inverse_value_scale[slot]; }
  SPARGE_DEVICE const PoolColumn* columns() const { return smem.columns[slot]; }
  // Negative: pooled keys.
  SPARGE_DEVICE i32 key_count() const { return smem.stage[slot].keys; }
  SPARGE_DEVICE float value_scale() const { return smem.stage[slot].v_block_scale; }
  SPARGE_DEVICE float key_scale() const { return is_quantized(kElement) ? smem.stage[slot].k_scale : 1.0f; }
};

}  // namespace sparge::attend
