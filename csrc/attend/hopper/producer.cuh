// SPDX-License-Identifier: Apache-2.0
// One warp reads the block map rows of its work items and keeps the pipeline full, two key blocks a step.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/special.cuh"
#include "../pool.cuh"
#include "layout.cuh"

namespace sparge::hopper {

struct Producer {
  const AttendParams& p;
  Smem& smem;
  const i32 lane;
  Ring ring;
  bool started = false;  // whether there is a step before the ring's

  SPARGE_DEVICE Producer(const AttendParams& params, Smem& s) : p(params), smem(s), lane(threadIdx.x % kWarpSize) {}

  // Factor from products of levels, times both scales, to logits in log2 units. The producer multiplies it into the scales of the
  // keys, once a step, instead of each of 256 threads.
  SPARGE_DEVICE float log2_scale() const { return p.scale * kLog2E; }

  // The feeder hands out work items, one ahead.
  SPARGE_DEVICE void run() {
    for (ItemSlot items;; ++items.count) {
      const Queries& queries = smem.queries[items.place()];
      ptx::mbarrier_wait(smem.queries[items.place()].asked, items.parity());
      const i32 item = uniform(queries.item);
      if (item < 0) break;
      walk(Work(p, item), item);
    }
    push_mark(-1);
  }

  // Takes the set bits of a row in ascending order. 32 lanes hold 32 words of the map, and the scales of one word's blocks. A
  // complete step waits until the next block shows that it is not the last.
  SPARGE_DEVICE void walk(const Work& work, i32 item) {
    const i32 words = p.problem.map_words(), key_blocks = p.problem.key_blocks();
    const u32* row = work.map_row(p);
    Step step = {};
    step.item = item;
    step.block[0] = step.block[1] = -1;
    step.pvthreshd = work.pvthreshd;
    step.first_query = work.first_query;
    for (i32 first = 0; first < words; first += kWarpSize) {
      const u32 mine = first + lane < words ? attend::map_word(p, row, first + lane) : 0;
      u32 filled = __ballot_sync(kFullWarp, mine != 0);
      Facts next = facts_of(work, filled ? first + __ffs(filled) - 1 : words, key_blocks);
      while (filled) {
        const i32 word = __ffs(filled) - 1;
        filled &= filled - 1;
        const Facts facts = next;
        next = facts_of(work, filled ? first + __ffs(filled) - 1 : words, key_blocks);
        for (u32 bits = __shfl_sync(kFullWarp, mine, word); bits; bits &= bits - 1) {
          const i32 bit = __ffs(bits) - 1;
          add(step, work, (first + word) * kMapBits + bit,
              {__shfl_sync(kFullWarp, facts.scale, bit), __shfl_sync(kFullWarp, facts.keys, bit)});
        }
      }
    }
    Pair pair = work.pools() ? next_open(work, row, 0) : Pair{-1, 0};
    step.head.last = pair.index < 0;
    if (step.block[0] >= 0)
      push(work, step);
    else if (step.head.last)
      push_mark(item);
    while (pair.index >= 0) {
      const Pair after = next_open(work, row, pair.index + 1);
      push_pooled(work, item, pair, after.index < 0);
      pair = after;
    }
  }

  // Of one block.
  struct Facts {
    float scale;
    i32 keys;
  };

  SPARGE_DEVICE void add(Step& step, const Work& work, i32 block, const Facts& facts) {
    if (block >= p.problem.key_blocks()) return;  // without a map there are bits of such blocks
    if (step.block[1] >= 0) {
      push(work, step);
      step.block[0] = step.block[1] = -1;
    }
    const i32 place = step.block[0] < 0 ? 0 : 1;
    if (place == 0) {
      step.block[0] = block;
      step.head.k_scale[0] = facts.scale;
      step.keys[0] = facts.keys;
    } else {
      step.block[1] = block;
    }
    step.head.k_scale[1] = facts.scale;
    step.keys[1] = place == 0 ? 0 : facts.keys;
  }

  // For this lane's block of a word of the map.
  SPARGE_DEVICE Facts facts_of(const Work& work, i32 word, i32 key_blocks) const {
    const i32 block = word * kMapBits + lane;
    if (block >= key_blocks) return {0.0f, 0};
    return {kSixteenBits ? 1.0f : p.k_scale[work.first_tile + block], p.key_counts[work.first_tile + block]};
  }

  // Two tiles of pooled keys: their place in the head, and in lanes 0 to 3 the bits of those that take part.
  struct Pair {
    i32 index;
    u32 open;
  };

  // The next pair from `index` on that leaves something to pool, index -1 when there is none.
  SPARGE_DEVICE Pair next_open(const Work& work, const u32* row, i32 index) const {
    const i32 words = p.problem.map_words(), end = work.poolable(p);
    for (; index * kStepPseudoKeys < end; ++index) {
      const i32 word = index * (kStepPseudoKeys / kMapBits) + lane;
      u32 open = 0;
      if (lane < kStepPseudoKeys / kMapBits && word < words) open = attend::open_blocks(row[word], word, end);
      if (__any_sync(kFullWarp, open != 0)) return {index, open};
    }
    return {-1, 0};
  }

  // The PV filter lets pooled keys pass.
  SPARGE_DEVICE void push_pooled(const Work& work, i32 item, const Pair& pair, bool last) {
    const i64 first = work.first_pool + kStepBlocks * pair.index;
    const i64 second = kStepBlocks * pair.index + 1 < p.problem.pool_tiles() ? first + 1 : first;
    PoolColumn columns[kStepPseudoKeys / kMapBits];
#pragma unroll
    for (int word = 0; word < kStepPseudoKeys / kMapBits; ++word) {
      const u32 open = __shfl_sync(kFullWarp, pair.open, word);
      const i64 tile = word * kMapBits < kKeyBlock ? first : second;
      const PoolColumn& column = p.pool_columns[tile * kKeyBlock + word * kMapBits % kKeyBlock + lane];
      columns[word] = attend::prepared(column, work, open >> lane & 1);
    }
    wait_free();
    Stage& stage = smem.stage_at(ring.at);
#pragma unroll
    for (int word = 0; word < kStepPseudoKeys / kMapBits; ++word) stage.columns[word * kMapBits + lane] = columns[word];
    if (lane == 0) {
      Step& step = stage.step;
      step = {};
      step.item = item;
      step.pooled = step.head.masked = true;
      step.head.last = last;
      step.head.k_scale[0] = step.head.k_scale[1] = attend::kPoolScale * log2_scale();
      step.pvthreshd = attend::kNeverNegligible;
    }
    fill(stage, p.pool_k, p.pool_v, first, second);
  }

  // A missing second block is the first once more: masked, but with finite numbers.
  SPARGE_DEVICE void push(const Work& work, Step step) {
    const i32 last_key = step.block[1] * kKeyBlock + kKeyBlock - 1;
    step.head.masked = step.keys[0] < kKeyBlock || step.keys[1] < kKeyBlock || (p.causal && last_key > work.first_query);
    step.head.k_scale[0] *= log2_scale();
    step.head.k_scale[1] *= log2_scale();
    const i64 first = work.first_tile + step.block[0];
    const i64 second = step.block[1] < 0 ? first : work.first_tile + step.block[1];
    wait_free();
    Stage& stage = smem.stage_at(ring.at);
    if (lane == 0) stage.step = step;
    fill(stage, p.k_tiles, p.v_tiles, first, second);
  }

  // An empty list, or the end of all work.
  SPARGE_DEVICE void push_mark(i32 item) {
    wait_free();
    Stage& stage = smem.stage_at(ring.at);
    if (lane == 0) {
      stage.step.item = item;
      stage.step.block[0] = -1;
    }
    ptx::mbarrier_arrive(stage.full[kKeys]);
    if constexpr (kTransfers > 1) {
      if (lane == 0) stage.values[0] = nullptr;
      copy_values_before();
    }
    ring.advance();
  }

  // A fresh barrier counts as free: the phase before its first has completed.
  SPARGE_DEVICE void wait_free() const { ptx::mbarrier_wait(smem.stage_at(ring.at).free[kKeys], ring.parity ^ 1); }

  // Every lane arrives, as it may have written columns. One arrival after __syncwarp would do, but racecheck would report a race.
  SPARGE_DEVICE void fill(Stage& stage, const u8* keys, const u8* values, i64 first, i64 second) {
    u64& full = stage.full[kKeys];
    if (lane != 0) {
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_arrive_expect(full, kTransferBytes);
#pragma unroll
      for (int block = 0; block < kStepBlocks; ++block) {
        const i64 at = (block == 0 ? first : second) * kTileBytes;
        copy_keys(stage, block, keys + at, full);
        if constexpr (kTransfers == 1)
          ptx::bulk_copy(stage.v[block].v, values + at, kTileBytes, full);
        else
          stage.values[block] = values + at;
      }
    }
    if constexpr (kTransfers > 1) copy_values_before();
    ring.advance();
  }

  // Values of the step before the ring's, as its stage is given back after the one that the ring's keys wait for.
  SPARGE_DEVICE void copy_values_before() {
    if (started) {
      Stage& stage = smem.stage_at(ring.before());
      u64& full = stage.full[kValues];
      ptx::mbarrier_wait(stage.free[kValues], ring.parity_before() ^ 1);
      if (lane != 0 || !stage.values[0]) {
        ptx::mbarrier_arrive(full);
      } else {
        ptx::mbarrier_arrive_expect(full, kTransferBytes);
#pragma unroll
        for (int block = 0; block < kStepBlocks; ++block) ptx::bulk_copy(stage.v[block].v, stage.values[block], kTileBytes, full);
      }
    }
    started = true;
  }

  SPARGE_DEVICE static void copy_keys(Stage& stage, int block, const u8* tile, u64& full) {
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part)
      ptx::bulk_copy(stage.k[part][block], tile + part * kKeyPartBytes, kKeyPartBytes, full);
  }
};

}  // namespace sparge::hopper
