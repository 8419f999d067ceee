// SPDX-License-Identifier: Apache-2.0
// K and V tiles on their way from L2 to shared memory, a few blocks ahead of the products.
#pragma once

#include "../ptx/cp_async.cuh"
#include "block_list.cuh"
#include "layout.cuh"

namespace sparge::attend {

// The thread index is read where it is used: else its sums with the tensors' pointers are kept across the main loop. Where there is
// room for them, that saves waits (docs/experiments.md, "Integer values").
SPARGE_DEVICE i32 copier() {
  if constexpr (kIntegerValues && kArch < 90) return threadIdx.x;
  return ptx::thread_index();
}
template <int kBytes>
SPARGE_DEVICE void copy_tile(u8* destination, const u8* source) {
  const u32 to = ptx::shared_address(destination) + copier() * 16;
  const u8* from = source + copier() * 16;
#pragma unroll
  for (int offset = 0; offset < kBytes; offset += kThreads * 16) ptx::cp_async_16(to + offset, from + offset);
}

// Usage:
//   for (i32 place = wait_keys(); place >= 0; place = wait_keys()) { ... scores ...; wait_values(place); ... PV ...; }
//
// With several stages K and V of a block travel together, kStages - 1 blocks ahead, at one barrier a block; the slot that
// was handed out last is the next to fill, once every warp is done with it. With one stage V of a block travels during its
// scores and K of the next block during its PV, at two barriers a block.
struct Pipeline {
  Smem& smem;
  const AttendParams& p;
  const u32* list;
  i32 slot = 0;

  SPARGE_DEVICE Pipeline(Smem& s, const AttendParams& params, const u32* blocks) : smem(s), p(params), list(blocks) {
    i32 last = -1;
#pragma unroll
    for (int i = 0; i < (kStages > 1 ? kStages - 1 : 1); ++i) last = fill(last);
  }

  SPARGE_DEVICE bool is_pool(i32 place) const { return place >= smem.first_pool_place; }
  // Negative for a key block, else the number of a tile of pooled keys.
  SPARGE_DEVICE i32 pool_tile(i32 place) const { return place - smem.first_pool_place; }

  SPARGE_DEVICE void load_keys(i32 place) {
    if (const i32 pool = pool_tile(place); pool >= 0) return load_pseudo_keys(pool);
    const i32 tile = smem.work.first_tile + place;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.k_tiles + static_cast<i64>(tile) * kKeyTileBytes);
    if (copier() > 0) return;
    if (is_quantized(kElement)) ptx::cp_async_4(ptx::shared_address(&smem.stage[slot].k_scale), p.k_scale + tile);
    ptx::cp_async_4(ptx::shared_address(&smem.stage[slot].keys), p.key_counts + tile);
  }
  // Whether a pooled key of a tile takes part.
  SPARGE_DEVICE bool stands(i32 pool, i32 key) const {
    return pooled_blocks(list, 2 * pool + key / kMapBits, smem.poolable) >> key % kMapBits & 1;
  }
  SPARGE_DEVICE float value_scale(i32 pool, i32 key, bool open) const {
    return open ? p.pool_value_scale[(smem.work.first_pool + static_cast<i64>(pool)) * kKeyBlock + key] : 1.0f;
  }
  SPARGE_DEVICE void load_pseudo_keys(i32 pool) {
    const i64 tile = smem.work.first_pool + pool;
    copy_tile<kKeyTileBytes>(smem.k[slot], p.pool_k + tile * kKeyTileBytes);
    if (const i32 key = copier(); key < kKeyBlock) {
      const bool open = stands(pool, key);
      PoolColumn column = prepared(p.pool_columns[tile * kKeyBlock + key], smem.work, open);
      if constexpr (kIntegerValues) column.bias += log2f(value_scale(pool, key, open));
      smem.columns[slot][key] = column;
    }
    if (copier() > 0) return;
    smem.stage[slot].k_scale = kPoolScale;
    smem.stage[slot].keys = -1;
  }
  SPARGE_DEVICE void load_values(i32 place) {
    const i32 pool = pool_tile(place);
    const u8* tiles = pool >= 0 ? p.pool_v : p.v_tiles;
    const i64 tile = pool >= 0 ? smem.work.first_pool + pool : smem.work.first_tile + place;
    copy_tile<kValueTileBytes>(smem.v[slot], tiles + tile * kValueTileBytes);
    if constexpr (!kIntegerValues) return;
    if (const i32 key = copier(); pool >= 0 && key < kKeyBlock)
      smem.inverse_value_scale[slot][key] = 1.0f / value_scale(pool, key, stands(pool, key));
    if (copier() > 0) return;
    if (pool >= 0)
      smem.stage[slot].v_block_scale = kPoolValueStep;
    else
      ptx::cp_async_4(ptx::shared_address(&smem.stage[slot].v_block_scale), p.v_block_scale + tile);
  }

  SPARGE_DEVICE bool ended(i32 place) const { return place >= smem.end_of_list; }

  // Starts the copies of what comes after `last` in the list, and returns its place. An empty group at the end keeps the number
  // of groups regular.
  SPARGE_DEVICE i32 fill(i32 last) {
    const i32 place = next_place(list, last);
    if (copier() == 0) smem.stage[slot].place = place;
    if (!ended(place)) {
      load_keys(place);
      if constexpr (kStages > 1) load_values(place);
    }
    if constexpr (kStages > 1) slot = slot + 1 == kStages ? 0 : slot + 1;
    ptx::cp_async_commit();
    return place;
  }

  // The next place of the list, its keys in shared memory; -1 at the end.
  SPARGE_DEVICE i32 wait_keys() {
    ptx::cp_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
    __syncthreads();  // tiles of all threads have arrived, and every warp is done with what is filled below
    if constexpr (kStages > 1) {
      fill(smem.stage[slot == 0 ? kStages - 1 : slot - 1].place);
      const i32 place = smem.stage[slot].place;
      return ended(place) ? -1 : place;
    } else {
      const i32 place = smem.stage[0].place;
      if (!ended(place)) load_values(place);
      ptx::cp_async_commit();
      return ended(place) ? -1 : place;
    }
  }

  // For the place that wait_keys gave.
  SPARGE_DEVICE void wait_values(i32 place) {
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      fill(place);
    }
  }

  SPARGE_DEVICE const u8* keys() const { return smem.k[slot]; }
  SPARGE_DEVICE const u8* values() const { return smem.v[slot]; }
  SPARGE_DEVICE const float* inverse_value_scales() const { return smem.inverse_value_scale[slot]; }
  SPARGE_DEVICE const PoolColumn* columns() const { return smem.columns[slot]; }
  SPARGE_DEVICE i32 key_count() const { return smem.stage[slot].keys; }
  SPARGE_DEVICE float value_scale() const { return smem.stage[slot].v_block_scale; }
  SPARGE_DEVICE float key_scale() const { return is_quantized(kElement) ? smem.stage[slot].k_scale : 1.0f; }
};

}  // namespace sparge::attend
