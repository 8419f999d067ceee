// SPDX-License-Identifier: Apache-2.0
// One warpgroup: scores, softmax and values of 64 query rows, step after step, work item after work item.
#pragma once

#include "../../common/pairs.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../../ptx/schedule.cuh"
#include "../../ptx/wgmma.cuh"
#include "softmax.cuh"

namespace sparge::hopper {

using Sums = float[kSums];
using ValueSums = float[kValueSums];  // of values, then of probabilities

// What a warpgroup carries from step to step of a work item.
struct Item {
  Queries queries;
  Softmax softmax;
  Levels levels[kStepBlocks];  // scores, then probabilities
  Probabilities probabilities;
  PerRow alpha;     // by which the step whose maxima were taken last shrinks what was before
  ValueSums fresh;  // of one step
  Sums out = {};    // of the steps before it

  SPARGE_DEVICE Item(const AttendParams& p, const Work& work, Smem& smem) : queries(p, work, smem), softmax(p.problem, work) {}
};

struct Consumer {
  const AttendParams& p;
  Smem& smem;
  const i32 group;
  const u32 queries, keys, values;  // descriptor addresses, of stage 0
  Ring ring;

  SPARGE_DEVICE Consumer(const AttendParams& params, Smem& s)
      : p(params),
        smem(s),
        group(uniform(threadIdx.x / kGroupThreads)),
        queries(ptx::descriptor_address(ptx::shared_address(s.q[group]))),
        keys(ptx::descriptor_address(ptx::shared_address(s.stage[0].k))),
        values(ptx::descriptor_address(ptx::shared_address(s.stage[0].v[0].v))) {}

  SPARGE_DEVICE static bool leads() { return threadIdx.x % kGroupThreads == 0; }

  SPARGE_DEVICE void run() {
    if (leads()) smem.skipped_pairs[group] = 0;
    if (group == kLowerRows) pass_turn(group);
    while (next_step(), uniform(smem.step[ring.stage].turn >= 0)) attend_item();
  }

  SPARGE_DEVICE void next_step() { ptx::mbarrier_wait(smem.full[ring.stage], ring.parity); }

  // Every lane speaks for its own reads: racecheck does not see what __syncwarp orders before the arrival of one lane.
  SPARGE_DEVICE void release(i32 stage) const { ptx::mbarrier_arrive(smem.free[stage]); }

  SPARGE_DEVICE void attend_item() {
    const Step& first = smem.step[ring.stage];
    const bool empty = uniform(first.block[0] < 0);
    Item item(p, Work(p, first.turn), smem);
    if (empty) {
      ring.advance();
    } else {
      start_scores(item, 0);
      start_scores(item, 1);
      ptx::wgmma_wait<0>();
      PerRow block_most[kStepBlocks];
#pragma unroll
      for (int block = 0; block < kStepBlocks; ++block) {
        mask(item, block, uniform(first.masked));
        find_maximum(item, block_most[block], block);
      }
      raise_maxima(item, block_most);
      while (!uniform(smem.step[ring.stage].last)) advance(item);
      finish(item);
    }
    store(item, Work(p, smem.step[ring.stage_before()].turn));
    release(ring.stage_before());
  }

  // From the maxima of one step to those of the next. Scores of a block of the next step start as soon as their registers
  // are free, and its maximum is found among the exponentials of the block after: a warp alone must fill the gaps of eight
  // clocks between them. Nothing is in flight where the loop closes: ptxas would wait for each product.
  SPARGE_DEVICE void advance(Item& item) {
    const i32 stage = ring.stage;
    ring.advance();
    next_step();
    const bool masked = uniform(smem.step[ring.stage].masked);  // before the products are waited for
    PerRow scale, block_most[kStepBlocks];
    scale_of(scale, item, stage, 0);
    await_turn(group);
    const u32 skips = skipped(stage);
    Scores x;
    item.softmax.exponents(x, item.levels[0], scale);
    start_scores(item, 0);
    Softmax::exponentials(item.probabilities, x, 0, skips & 1);
    take_exponents(x, item, stage, 1);
    start_scores(item, 1);
    ptx::wgmma_wait<1>();
    mask(item, 0, masked);
    Softmax::exponentials(item.probabilities, x, 1, skips & 2);
    find_maximum(item, block_most[0], 0);
    pass_turn(group);
    start_values(item, stage);
    ptx::wgmma_wait<1>();
    mask(item, 1, masked);
    find_maximum(item, block_most[1], 1);
    settle(block_most[1]);
    ptx::wgmma_wait<0>();
    const PerRow alpha = {item.alpha[0], item.alpha[1]};
    raise_maxima(item, block_most);
    promote(item, alpha);
    release(stage);
  }

  SPARGE_DEVICE void finish(Item& item) {
    const i32 stage = ring.stage;
    ring.advance();
    await_turn(group);
    const u32 skips = skipped(stage);
#pragma unroll
    for (int block = 0; block < kStepBlocks; ++block) {
      Scores x;
      take_exponents(x, item, stage, block);
      Softmax::exponentials(item.probabilities, x, block, skips >> block & 1);
    }
    pass_turn(group);
    start_values(item, stage);
    ptx::wgmma_wait<0>();
    promote(item, item.alpha);
  }

  // Scores of a block of the ring's step are complete.
  SPARGE_DEVICE void mask(Item& item, int block, bool masked) const {
    ptx::in_flight(item.levels[block]);
    if (!masked) return;
    const Step& step = smem.step[ring.stage];
    if (uniform(step.pooled))
      pool_scores(item.levels[block], smem.stage[ring.stage], block, item.queries.scale, p.scale * kLog2E);
    else
      mask_scores(item.levels[block], step, block, p.causal);
  }

  SPARGE_DEVICE void find_maximum(const Item& item, PerRow& block_most, int block) const {
    PerRow scale;
    scale_of(scale, item, ring.stage, block);
    Softmax::block_maximum(block_most, item.levels[block], scale);
    ptx::compute_here(block_most);
  }

  // Computes the values before the wait that follows; left to itself ptxas finds maxima only when the values' products are
  // complete. Nothing reads what a NaN would store.
  SPARGE_DEVICE void settle(const PerRow& values) const { ptx::store_if_nan(smem.never_read, values[0], values[1]); }

  SPARGE_DEVICE void raise_maxima(Item& item, PerRow (&block_most)[kStepBlocks]) {
    const Step& step = smem.step[ring.stage];
    if constexpr (kPvFilter) {
      const u32 vote = item.softmax.negligible(block_most, step.pvthreshd);
      const i32 thread = threadIdx.x % kGroupThreads;
      if (thread % kWarpSize == 0) smem.votes[ring.stage][group][thread / kWarpSize] = vote;
    }
    item.softmax.raise(block_most, item.alpha);
  }

  // Blocks of a stage's step that the PV filter leaves out, a bit each: those that all four warps voted for. The barrier of
  // the turn lies between the votes and this, so that no warp waits for another's vote on its own.
  SPARGE_DEVICE u32 skipped(i32 stage) const {
    if constexpr (!kPvFilter) return 0;
    u32 votes = ~0u;
#pragma unroll
    for (int warp = 0; warp < kGroupWarps; ++warp) votes &= smem.votes[stage][group][warp];
    votes = uniform(votes);
    if (votes && leads()) smem.skipped_pairs[group] += pairs_of(smem.step[stage], votes);
    return votes;
  }

  // From scores to log2 units.
  SPARGE_DEVICE void scale_of(PerRow& scale, const Item& item, i32 stage, int block) const {
    const float key_scale = p.scale * kLog2E * smem.step[stage].k_scale[block];
#pragma unroll
    for (int half = 0; half < 2; ++half) scale[half] = item.queries.scale[half] * key_scale;
  }

  SPARGE_DEVICE void take_exponents(Scores& x, const Item& item, i32 stage, int block) const {
    PerRow scale;
    scale_of(scale, item, stage, block);
    item.softmax.exponents(x, item.levels[block], scale);
  }

  SPARGE_DEVICE void start_scores(Item& item, int block) const {
    Levels& levels = item.levels[block];
    const u32 tile = keys + ring.stage * (sizeof(Stage) / ptx::kDescriptorUnit) + block * (kTileBytes / ptx::kDescriptorUnit);
#pragma unroll
    for (int i = 0; i < kScores; ++i) levels[i] = ptx::set_register<__builtin_bit_cast(i32, kScoreZero)>();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step)
      ptx::wgmma_m64n64k32_s8(levels, ptx::operand_descriptor<kHeadDim>(queries + step * ptx::kKStep),
                              ptx::operand_descriptor<kHeadDim>(tile + step * ptx::kKStep));
    ptx::wgmma_commit();
  }

  // Sums of one step alone: E4M3 tensor cores keep about 14 bits while they add.
  SPARGE_DEVICE void start_values(Item& item, i32 stage) const {
    const u32 tiles = values + stage * (sizeof(Stage) / ptx::kDescriptorUnit);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 tile = tiles + step / kBlockValueSteps * (sizeof(ValueTile) / ptx::kDescriptorUnit);
      ptx::wgmma_e4m3(item.fresh, item.probabilities[step],
                      ptx::operand_descriptor<kKeyBlock>(tile + step % kBlockValueSteps * ptx::kKStep), step > 0);
    }
    ptx::wgmma_commit();
  }

  // Takes the sums of one step in; alpha is what it shrinks those before it by.
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

  SPARGE_DEVICE void store(const Item& item, const Work& work) const {
    const Softmax& softmax = item.softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = first_row() + 8 * half, token = work.token(p.problem, row);
      if (token < 0) continue;
      if (quad_lane() == 0) attend::store_row_facts(p, work, token, softmax.most[half], softmax.sum[half], smem.q_dot_mean[row]);
      const attend::RowStore to(p, work, token, softmax.sum[half]);
#pragma unroll
      for (int n = 0; n < kChannelTiles; ++n)
        to.store(8 * n + 2 * quad_lane(), item.out[4 * n + 2 * half], item.out[4 * n + 2 * half + 1]);
    }
    if (kPvFilter && leads()) {
      if (p.counters) atomicAdd(p.counters + kSkippedPairs, static_cast<u64>(smem.skipped_pairs[group]));
      smem.skipped_pairs[group] = 0;
    }
  }
};

}  // namespace sparge::hopper
