// SPDX-License-Identifier: Apache-2.0
// The list of a query block, as bits in shared memory that are read in ascending order: its row of the block map, then the tiles
// of pooled keys that take part, then a word of ones, so that reading needs no bound.
#pragma once

#include "finite.cuh"
#include "layout.cuh"
#include "output_scale.cuh"
#include "pool.cuh"

namespace sparge::attend {

constexpr u32 kEndOfList = 0xFFFFFFFFu;

// Words of the list that say which tiles of pooled keys take part.
SPARGE_DEVICE i32 pool_words(const Problem& problem) { return ceil_div(problem.pool_tiles(), kMapBits); }

// Which of the 32 key blocks of a word of the map take part as pooled keys; 0 for words after the map.
SPARGE_DEVICE u32 pooled_blocks(const u32* map, i32 index, i32 end) {
  return index * kMapBits < end ? open_blocks(map[index], index, end) : 0;
}

// By all threads of the block, for which the list and the bounds of scales are complete afterwards. Key block j has place j in
// the list; tiles of pooled keys begin at `first_pool_place`. False where 16-bit keys or values of the head are not finite.
SPARGE_DEVICE bool load_list(u32* list, Smem& smem, const AttendParams& p) {
  const Problem& problem = p.problem;
  const Work& work = smem.work;
  const i32 words = problem.map_words(), tile_words = pool_words(problem), blocks = problem.key_blocks();
  const u32* map = work.map_row(p);
  for (int word = threadIdx.x; word < words; word += kThreads) list[word] = map_word(p, map, word) & open_blocks(0, word, blocks);
  const i32 end = work.pools() ? work.poolable(p) : 0, lane = threadIdx.x % kWarpSize;
  for (int word = threadIdx.x / kWarpSize; word < tile_words; word += kWarps) {
    const i32 tile = word * kMapBits + lane;
    const u32 tiles = __ballot_sync(kFullWarp, pooled_blocks(map, 2 * tile, end) | pooled_blocks(map, 2 * tile + 1, end));
    if (lane == 0) list[words + word] = tiles;
  }
  if (is_quantized(kElement) && threadIdx.x < kWarpSize) {
    const float factor = inverse_output_scale(p, work);
    if (lane == 0) smem.inverse_output_scale = factor;
  }
  if (threadIdx.x == 0) {
    if constexpr (is_quantized(kElement)) smem.bounds = ScaleBounds(p, work.kv_at);
    list[words + tile_words] = kEndOfList;
    smem.poolable = end;
    smem.first_pool_place = words * kMapBits;
    smem.end_of_list = (words + tile_words) * kMapBits;
  }
  if constexpr (is_quantized(kElement)) {
    __syncthreads();
    return true;
  }
  return __syncthreads_and(sees_finite(p, work.kv_at, threadIdx.x, kThreads, first_flags(p, work.kv_at, threadIdx.x)));
}

}  // namespace sparge::attend
