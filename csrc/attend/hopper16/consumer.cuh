// SPDX-License-Identifier: Apache-2.0
// One warpgroup: scores, softmax and values of 64 query rows, step after step, work item after work item.
#pragma once

#include "../../common/pairs.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/schedule.cuh"
#include "../../ptx/wgmma.cuh"
#include "../hopper/store_item.cuh"
#include "softmax.cuh"

namespace sparge::hopper16 {

// What a warpgroup carries from step to step of a work item.
struct Item {
  Softmax softmax;
  Scores scores;  // then probabilities
  Probabilities probabilities;
  PerRow alpha;           // factor on earlier sums, from the last step
  float out[kSums] = {};  // sums of the steps before it

  SPARGE_DEVICE explicit Item(const Queries& queries) : softmax(queries) {}
};

struct Consumer {
  const AttendParams& p;
  Smem& smem;
  const i32 group;
  const float log2_scale;
  u32 queries;  // descriptor address
  ItemSlot items;
  Ring ring;

  SPARGE_DEVICE Consumer(const AttendParams& params, Smem& s)
      : p(params), smem(s), group(uniform(threadIdx.x / kGroupThreads)), log2_scale(params.scale * kLog2E) {}

  SPARGE_DEVICE static bool leads() { return threadIdx.x % kGroupThreads == 0; }

  // The warpgroups start their products alternately, so that the softmax of one runs beside the products of the other.
  SPARGE_DEVICE void await_turn() const { ptx::barrier_sync<kConsumerGroups * kGroupThreads>(kBarrierTurn + group); }
  SPARGE_DEVICE void pass_turn() const {
    ptx::barrier_arrive<kConsumerGroups * kGroupThreads>(kBarrierTurn + kConsumerGroups - 1 - group);
  }

  SPARGE_DEVICE void run() {
    if (leads()) smem.skipped_pairs[group] = 0;
    if (group == kLowerRows) pass_turn();
    while (wait(ring, kKeys), uniform(smem.stage_at(ring.at).step.item >= 0)) attend_item();
  }

  SPARGE_DEVICE void wait(const Ring& place, Transfer part) const {
    ptx::mbarrier_wait(smem.stage_at(place.at).full[part], place.parity);
  }

  // Every lane arrives for its own reads (docs/experiments.md, "Who frees a stage").
  SPARGE_DEVICE void release(const Ring& place, Transfer part) const { ptx::mbarrier_arrive(smem.stage_at(place.at).free[part]); }

  SPARGE_DEVICE void attend_item() {
    const Step& first = smem.stage_at(ring.at).step;
    const bool empty = uniform(first.block[0] < 0);
    Queries& mine = smem.queries[items.place()];
    ptx::mbarrier_wait(mine.ready, items.parity());
    queries = ptx::descriptor_address(ptx::shared_address(smem.q[items.place()][group]));
    Item item(mine);
    if (empty) {
      // Not before all are done with the last use of the stage's values.
      wait(ring, kValues);
      release(ring, kKeys);
      release(ring, kValues);
      ring.advance();
    } else {
      attend_steps(item, first.head);
    }
    item.softmax.finish(mine);
    store_item(p, item, mine, smem.exchange[ptx::thread_index() / kWarpSize]);
    if (kPvFilter && leads()) count_skips(p, smem.skipped_pairs[group]);
    ptx::mbarrier_arrive(mine.free);
    ++items.count;
  }

  SPARGE_DEVICE void attend_steps(Item& item, Head head) {
    ptx::wgmma_fence();
    start_scores(item);
    ptx::wgmma_wait<0>();
    soften(item, head);
    pack(item.probabilities, item.scores);
    while (!uniform(head.last)) {
      const Ring before = ring;
      ring.advance();
      wait(ring, kKeys);
      wait(before, kValues);
      head = smem.stage_at(ring.at).step.head;
      advance(item, before, head);
    }
    wait(ring, kValues);
    ptx::wgmma_fence();
    start_values(item, ring);
    ptx::wgmma_wait<0>();
    ptx::in_flight(item.out);
    release(ring, kValues);
    ring.advance();
  }

  // From the probabilities of one step to those of the next. Scores of a step and values of the step before it are in flight
  // together. The other warpgroup's softmax runs beside these products.
  SPARGE_DEVICE void advance(Item& item, const Ring& before, const Head& head) {
    await_turn();
    ptx::wgmma_fence();
    start_scores(item);
    start_values(item, before);
    pass_turn();
    ptx::wgmma_wait<1>();
    soften(item, head);
    // Else ptxas begins the softmax only when the values' products are complete. Nothing reads what a NaN would store.
    ptx::store_if_nan(smem.never_read, item.softmax.sum[0], item.softmax.sum[1]);
    ptx::wgmma_wait<0>();
    ptx::in_flight(item.out);
    release(before, kValues);
#pragma unroll
    for (int i = 0; i < kSums; ++i) item.out[i] *= item.alpha[i % 4 / 2];
    pack(item.probabilities, item.scores);
  }

  // Turns the complete scores of the ring's step into probabilities.
  SPARGE_DEVICE void soften(Item& item, const Head& head) {
    ptx::in_flight(item.scores);
    Stage& stage = smem.stage_at(ring.at);
    if (uniform(head.masked)) {
      if (uniform(stage.step.pooled))
        pool_scores(item.scores, stage.columns, log2_scale);
      else
        mask_scores(item.scores, stage.step, p.causal);
    }
    PerRow block_most[kStepBlocks];
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block)
#pragma unroll
      for (int half = 0; half < 2; ++half) block_most[block][half] = Softmax::largest(item.scores, block, half) * log2_scale;
    over_columns(block_most);
    if constexpr (kPvFilter) leave_out(item, block_most, stage.step);
    release(ring, kKeys);
    item.softmax.raise(block_most, item.alpha);
    item.softmax.exponentials(item.scores, log2_scale, item.alpha);
  }

  // From the maxima of this thread's columns to those of the rows. Only the PV filter needs them block by block.
  SPARGE_DEVICE static void over_columns(PerRow (&block_most)[kStepBlocks]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kPvFilter) {
#pragma unroll
        for (int block = 0; block < kStepBlocks; ++block) block_most[block][half] = lane_max<1, 4>(block_most[block][half]);
      } else {
        block_most[0][half] = block_most[1][half] = lane_max<1, 4>(fmaxf(block_most[0][half], block_most[1][half]));
      }
    }
  }

  // A block that all 64 rows find negligible is masked: it costs the same, but adds nothing.
  SPARGE_DEVICE void leave_out(Item& item, const PerRow (&block_most)[kStepBlocks], const Step& step) {
    const u32 vote = item.softmax.negligible(block_most, step.pvthreshd);
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      if (!uniform(ptx::barrier_all<kGroupThreads>(kBarrierVote + group, vote >> block & 1))) continue;
      if (leads()) smem.skipped_pairs[group] += pairs_of(step, block);
#pragma unroll
      for (int i = 0; i < kScores; ++i) item.scores[block * kScores + i] = kMinusInfinity;
    }
  }

  SPARGE_DEVICE u32 pairs_of(const Step& step, int block) const {
    if (step.pooled || step.block[block] < 0) return 0;
    const i32 first_row = step.first_query + group * kGroupRows;
    return block_pairs(p.causal, first_row, p.problem.rows_from(first_row), step.block[block] * kKeyBlock, step.keys[block]);
  }

  // A product takes 128 keys: their tiles lie one after another.
  SPARGE_DEVICE void start_scores(Item& item) const {
    constexpr int kPartSteps = kQuerySteps / kKeyParts;
    constexpr u32 kQueryPart = kQueryTileBytes / kKeyParts / ptx::kDescriptorUnit;
    constexpr u32 kKeyPart = kStepBlocks * kKeyPartBytes / ptx::kDescriptorUnit;
    const u32 keys = ptx::descriptor_address(ptx::shared_address(smem.stage_at(ring.at).k));
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const int part = step / kPartSteps, offset = step % kPartSteps * ptx::kKStep;
      const u64 rows = ptx::operand_descriptor<kKeyPartRowBytes>(queries + part * kQueryPart + offset);
      const u64 columns = ptx::operand_descriptor<kKeyPartRowBytes>(keys + part * kKeyPart + offset);
      if constexpr (kElement == Element::kBf16)
        ptx::wgmma_scores_bf16(item.scores, rows, columns, step > 0);
      else
        ptx::wgmma_scores_fp16(item.scores, rows, columns, step > 0);
    }
    ptx::wgmma_commit();
  }

  SPARGE_DEVICE void start_values(Item& item, const Ring& place) const {
    const u32 tiles = ptx::descriptor_address(ptx::shared_address(smem.stage_at(place.at).v));
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 tile = tiles + step / kBlockValueSteps * (sizeof(ValueTile) / ptx::kDescriptorUnit);
      const u64 columns = ptx::operand_descriptor<kValueRowBytes>(tile + step % kBlockValueSteps * ptx::kKStep);
      if constexpr (kElement == Element::kBf16)
        ptx::wgmma_values_bf16(item.out, item.probabilities[step], columns);
      else
        ptx::wgmma_values_fp16(item.out, item.probabilities[step], columns);
    }
    ptx::wgmma_commit();
  }
};

}  // namespace sparge::hopper16
