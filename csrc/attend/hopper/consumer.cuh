// SPDX-License-Identifier: Apache-2.0
// One warpgroup: scores, softmax and values of 64 query rows, step after step, work item after work item.
#pragma once

#include "../../common/pairs.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/schedule.cuh"
#include "../../ptx/wgmma.cuh"
#include "softmax.cuh"
#include "store_item.cuh"

namespace sparge::hopper {

using Sums = float[kSums];
using ValueSums = float[kValueSums];  // sums of values, then of probabilities

// What a warpgroup carries from step to step of a work item.
struct Item {
  PerRow scale[kStepBlocks];  // of the scores that wait: factor from sums of products of levels to log2 units
  PerRow query_scale;
  Softmax softmax;
  Levels levels[kStepBlocks];  // scores, then probabilities
  Probabilities probabilities;
  PerRow alpha;     // factor on earlier sums, from the step whose maxima were taken last
  ValueSums fresh;  // sums of one step
  Sums out = {};    // sums of the steps before it

  SPARGE_DEVICE explicit Item(const Queries& queries) : softmax(queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) query_scale[half] = queries.scale[first_row_of_item() + 8 * half];
  }
};

struct Consumer {
  const AttendParams& p;
  Smem& smem;
  const i32 group;
  u32 queries;  // descriptor address
  ItemSlot items;
  Ring ring;

  SPARGE_DEVICE Consumer(const AttendParams& params, Smem& s) : p(params), smem(s), group(uniform(threadIdx.x / kGroupThreads)) {}

  SPARGE_DEVICE const Step& step(u32 at) const { return smem.stage_at(at).step; }

  SPARGE_DEVICE static bool leads() { return threadIdx.x % kGroupThreads == 0; }

  SPARGE_DEVICE void run() {
    if (leads()) smem.skipped_pairs[group] = 0;
    while (next_step(), uniform(step(ring.at).item >= 0)) attend_item();
  }

  SPARGE_DEVICE void next_step() { ptx::mbarrier_wait(smem.stage_at(ring.at).full[kKeys], ring.parity); }

  // Every lane arrives for its own reads (docs/experiments.md, "Who frees a stage").
  SPARGE_DEVICE void release(u32 at) const { ptx::mbarrier_arrive(smem.stage_at(at).free[kKeys]); }

  SPARGE_DEVICE void attend_item() {
    const Step& first = step(ring.at);
    const bool empty = uniform(first.block[0] < 0);
    Queries& mine = smem.queries[items.place()];
    ptx::mbarrier_wait(mine.ready, items.parity());
    queries = ptx::descriptor_address(ptx::shared_address(smem.q[items.place()][group]));
    Item item(mine);
    if (empty) {
      release(ring.at);
      ring.advance();
    } else {
      Head head = first.head;
      start_scores(item, 0);
      start_scores(item, 1);
      ptx::wgmma_wait<0>();
      PerRow block_most[kStepBlocks];
#pragma unroll
      for (int block = 0; block < kStepBlocks; ++block) {
        if (uniform(head.masked))
          complete_block<true>(item, block_most[block], block, head);
        else
          complete_block<false>(item, block_most[block], block, head);
      }
      Softmax::over_columns(block_most);
      raise_maxima(item, block_most);
      while (!uniform(head.last)) {
        const u32 at = ring.at;
        ring.advance();
        next_step();
        const Head next = step(ring.at).head;
        advance(item, at, next);
        head = next;
      }
      finish(item);
    }
    store_item(p, item, mine, smem.exchange[ptx::thread_index() / kWarpSize]);
    if (kPvFilter && leads()) count_skips(p, smem.skipped_pairs[group]);
    ptx::mbarrier_arrive(mine.free);
    ++items.count;
  }

  // From the maxima of one step to those of the next. Scores of a block of the next step start as soon as their registers are
  // free. Its maximum is found among the exponentials of the block after it. Nothing is in flight where the loop closes, else
  // ptxas would wait for each product. `next` is read before the products are waited for, like all that a branch needs.
  SPARGE_DEVICE void advance(Item& item, u32 before, const Head& next) {
    const u32 skips = skipped(before);
    Exponents x;
    item.softmax.exponents(x, item.levels[0], item.scale[0]);
    start_scores(item, 0);
    Softmax::exponentials(item.probabilities, x, 0, skips & 1);
    item.softmax.exponents(x, item.levels[1], item.scale[1]);
    start_scores(item, 1);
    ptx::wgmma_wait<1>();
    if (uniform(next.masked))
      complete<true>(item, x, before, next, skips);
    else
      complete<false>(item, x, before, next, skips);
  }

  // The rest of a step, from the complete scores of the next step's first block on. Masked steps have code of their own, so that
  // all others may take their maxima as integers.
  template <bool kMasked>
  SPARGE_DEVICE void complete(Item& item, Exponents& x, u32 before, const Head& next, u32 skips) {
    PerRow block_most[kStepBlocks];
    mask(item, 0, kMasked);
    Softmax::exponentials(item.probabilities, x, 1, skips & 2);
    find_maximum<kMasked>(item, block_most[0], 0, next);
    start_values(item, before);
    ptx::wgmma_wait<1>();
    complete_block<kMasked>(item, block_most[1], 1, next);
    Softmax::over_columns(block_most);
    settle({fmaxf(block_most[0][0], block_most[1][0]), fmaxf(block_most[0][1], block_most[1][1])});
    ptx::wgmma_wait<0>();
    const PerRow alpha = {item.alpha[0], item.alpha[1]};
    raise_maxima(item, block_most);
    promote(item, alpha);
    release(before);
  }

  SPARGE_DEVICE void finish(Item& item) {
    const u32 at = ring.at;
    ring.advance();
    const u32 skips = skipped(at);
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      Exponents x;
      item.softmax.exponents(x, item.levels[block], item.scale[block]);
      Softmax::exponentials(item.probabilities, x, block, skips >> block & 1);
    }
    start_values(item, at);
    ptx::wgmma_wait<0>();
    promote(item, item.alpha);
    release(at);
  }

  // Once the scores of a block of the ring's step are complete.
  SPARGE_DEVICE void mask(Item& item, int block, bool masked) const {
    ptx::in_flight(item.levels[block]);
    if (!masked) return;
    const Stage& stage = smem.stage_at(ring.at);
    if (uniform(stage.step.pooled))
      pool_scores(item.levels[block], stage, block, item.query_scale, p.scale * kLog2E);
    else
      mask_scores(item.levels[block], stage.step, block, p.causal);
  }

  template <bool kMasked>
  SPARGE_DEVICE void complete_block(Item& item, PerRow& block_most, int block, const Head& head) const {
    mask(item, block, kMasked);
    find_maximum<kMasked>(item, block_most, block, head);
  }

  template <bool kMasked>
  SPARGE_DEVICE void find_maximum(Item& item, PerRow& block_most, int block, const Head& head) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) item.scale[block][half] = item.query_scale[half] * head.k_scale[block];
    Softmax::block_maximum<kMasked>(block_most, item.levels[block], item.scale[block]);
    ptx::compute_here(block_most);
  }

  // Makes ptxas compute the values before the wait that follows. Else it finds maxima only when the values' products are
  // complete. Nothing reads what a NaN would store.
  SPARGE_DEVICE void settle(const PerRow& values) const { ptx::store_if_nan(smem.never_read, values[0], values[1]); }

  SPARGE_DEVICE void raise_maxima(Item& item, PerRow (&block_most)[kStepBlocks]) {
    if constexpr (kPvFilter) {
      Stage& stage = smem.stage_at(ring.at);
      const u32 vote = item.softmax.negligible(block_most, stage.step.pvthreshd);
      const i32 thread = ptx::thread_index() % kGroupThreads;
      if (thread % kWarpSize == 0) stage.votes[group][thread / kWarpSize] = vote;
    }
    item.softmax.raise(block_most, item.alpha);
  }

  // Blocks of a stage's step that the PV filter leaves out, a bit each: those that all four warps voted for.
  SPARGE_DEVICE u32 skipped(u32 at) const {
    if constexpr (!kPvFilter) return 0;
    ptx::barrier_sync<kGroupThreads>(kBarrierVote + group);
    u32 votes = ~0u;
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) votes &= smem.stage_at(at).votes[group][warp];
    votes = uniform(votes);
    if (votes && leads()) smem.skipped_pairs[group] += pairs_of(step(at), votes);
    return votes;
  }

  // Fills the scores with kScoreZero, by 16 loads a step, all lanes from the same 16 bytes, instead of 64 moves. Each register
  // must be written before the fence, by an instruction of its own.
  SPARGE_DEVICE void start_from_zero(Levels& levels) const {
    static_assert(kScores % 4 == 0, "a load fills four registers");
#pragma unroll
    for (int i = 0; i < kScores; i += 4) ptx::load_registers(levels + i, ptx::shared_address(&smem.score_zero));
  }

  SPARGE_DEVICE void start_scores(Item& item, int block) const {
    Levels& levels = item.levels[block];
    const u32 tile =
        ptx::descriptor_address(ptx::shared_address(smem.stage_at(ring.at).k)) + block * (kTileBytes / ptx::kDescriptorUnit);
    start_from_zero(levels);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step)
      ptx::wgmma_m64n64k32_s8(levels, ptx::operand_descriptor<kHeadDim>(queries + step * ptx::kKStep),
                              ptx::operand_descriptor<kHeadDim>(tile + step * ptx::kKStep));
    ptx::wgmma_commit();
  }

  // Sums of one step alone: E4M3 tensor cores keep about 14 bits while they add.
  SPARGE_DEVICE void start_values(Item& item, u32 at) const {
    const u32 tiles = ptx::descriptor_address(ptx::shared_address(smem.stage_at(at).v[0].v));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 tile = tiles + step / kBlockValueSteps * (sizeof(ValueTile) / ptx::kDescriptorUnit);
      ptx::wgmma_e4m3(item.fresh, item.probabilities[step],
                      ptx::operand_descriptor<kKeyBlock>(tile + step % kBlockValueSteps * ptx::kKStep), step > 0);
    }
    ptx::wgmma_commit();
  }

  // Adds the sums of one step to those before it, which alpha shrinks.
  SPARGE_DEVICE static void promote(Item& item, const PerRow& alpha) {
    ptx::in_flight(item.fresh);
#pragma unroll
    for (int i = 0; i < kSums; ++i) item.out[i] = item.out[i] * alpha[i % 4 / 2] + item.fresh[i];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      item.softmax.sum[half] = item.softmax.sum[half] * alpha[half] + item.fresh[kSums + 2 * half];
  }

  SPARGE_DEVICE u32 pairs_of(const Step& step, u32 skips) const {
    const i32 first_row = step.first_query + group * kGroupRows;
    const i32 rows = p.problem.rows_from(first_row);
    u32 pairs = 0;
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      if (!(skips >> block & 1) || step.block[block] < 0) continue;
      pairs += block_pairs(p.causal, first_row, rows, step.block[block] * kKeyBlock, step.keys[block]);
    }
    return pairs;
  }
};

}  // namespace sparge::hopper
