// SPDX-License-Identifier: Apache-2.0
// One warp walks the block map rows of its work items and keeps the pipeline full, two key blocks a step.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/special.cuh"
#include "layout.cuh"

namespace sparge::hopper {

struct Producer {
  const AttendParams& p;
  Smem& smem;
  const i32 lane;
  Ring ring;

  SPARGE_DEVICE Producer(const AttendParams& params, Smem& s) : p(params), smem(s), lane(threadIdx.x % kWarpSize) {}

  // Work items are handed out one by one, for their lists differ in length. Each thread block asks once more than it
  // gets items, so whoever asks last leaves the counter at zero for the next launch.
  SPARGE_DEVICE i32 next_turn(i32 turns) const {
    i32 turn = 0;
    if (lane == 0) {
      turn = atomicAdd(p.next_turn, 1);
      if (turn == turns + static_cast<i32>(gridDim.x) - 1) *p.next_turn = 0;
    }
    turn = __shfl_sync(kFullWarp, turn, 0);
    return turn < turns ? turn : -1;
  }

  SPARGE_DEVICE void run() {
    const Problem& problem = p.problem;
    const i32 turns = problem.batch * problem.heads * problem.query_blocks();
    for (i32 turn = next_turn(turns); turn >= 0; turn = next_turn(turns)) walk(Work(p, turn), turn);
    push_mark(-1);
  }

  // The set bits of a row in ascending order. 32 lanes hold 32 words of the map, and the scales of one word's blocks. A
  // complete step waits until the next block shows that it is not the last.
  SPARGE_DEVICE void walk(const Work& work, i32 turn) {
    const i32 words = p.problem.map_words(), key_blocks = p.problem.key_blocks();
    const u32* row = p.block_map + work.map_row(p.problem) * words;
    Step step = {turn, {-1, -1}, {}, work.pvthreshd, false, false, work.first_query, work.key_length};
    for (i32 first = 0; first < words; first += kWarpSize) {
      const u32 mine = first + lane < words ? row[first + lane] : 0;
      u32 filled = __ballot_sync(kFullWarp, mine != 0);
      float next_scale = scale_of(work, filled ? first + __ffs(filled) - 1 : words, key_blocks);
      while (filled) {
        const i32 word = __ffs(filled) - 1;
        filled &= filled - 1;
        const float scale = next_scale;
        next_scale = scale_of(work, filled ? first + __ffs(filled) - 1 : words, key_blocks);
        for (u32 bits = __shfl_sync(kFullWarp, mine, word); bits; bits &= bits - 1) {
          const i32 bit = __ffs(bits) - 1;
          add(step, work, (first + word) * kMapBits + bit, __shfl_sync(kFullWarp, scale, bit));
        }
      }
    }
    step.last = true;
    if (step.block[0] >= 0)
      push(work, step);
    else
      push_mark(turn);
  }

  SPARGE_DEVICE void add(Step& step, const Work& work, i32 block, float scale) {
    if (block >= p.problem.key_blocks()) return;  // a plan made by hand may hold stray bits
    if (step.block[1] >= 0) {
      push(work, step);
      step.block[0] = step.block[1] = -1;
    }
    if (step.block[0] < 0) {
      step.block[0] = block;
      step.k_scale[0] = scale;
    } else {
      step.block[1] = block;
    }
    step.k_scale[1] = scale;
  }

  // Of this lane's block of a word of the map.
  SPARGE_DEVICE float scale_of(const Work& work, i32 word, i32 key_blocks) const {
    const i32 block = word * kMapBits + lane;
    return block < key_blocks ? p.k_scale[work.first_tile + block] : 0.0f;
  }

  // A missing second block is the first once more: masked, but finite.
  SPARGE_DEVICE void push(const Work& work, Step step) {
    const i32 last_key = step.block[1] * kKeyBlock + kKeyBlock - 1;
    step.masked = step.block[1] < 0 || last_key >= work.key_length || (p.causal && last_key > work.first_query);
    const i64 first = work.first_tile + step.block[0];
    const i64 second = step.block[1] < 0 ? first : work.first_tile + step.block[1];
    wait_free();
    if (lane == 0) {
      u64& full = smem.full[ring.stage];
      Stage& stage = smem.stage[ring.stage];
      smem.step[ring.stage] = step;
      ptx::mbarrier_arrive_expect(full, kStepBytes);
      load(stage.k, p.k_tiles, first, second, full);
      load(stage.v, p.v_tiles, first, second, full);
    }
    ring.advance();
  }

  // An empty list, or the end of all work.
  SPARGE_DEVICE void push_mark(i32 turn) {
    wait_free();
    if (lane == 0) {
      smem.step[ring.stage] = {turn, {-1, -1}, {}, 0.0f, false, true, 0, 0};
      ptx::mbarrier_arrive(smem.full[ring.stage]);
    }
    ring.advance();
  }

  // A fresh barrier counts as free: the phase before its first has completed.
  SPARGE_DEVICE void wait_free() const { ptx::mbarrier_wait(smem.free[ring.stage], ring.parity ^ 1); }

  static SPARGE_DEVICE void load(u8* to, const u8* tiles, i64 first, i64 second, u64& barrier) {
    ptx::bulk_copy(to, tiles + first * kTileBytes, kTileBytes, barrier);
    ptx::bulk_copy(to + kTileBytes, tiles + second * kTileBytes, kTileBytes, barrier);
  }
};

}  // namespace sparge::hopper
