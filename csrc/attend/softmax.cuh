// SPDX-License-Identifier: Apache-2.0
// Online softmax in log2 units over the blocks of the list, with the true running maximum.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/barrier.cuh"
#include "pool.cuh"
#include "products.cuh"
#include "store.cuh"

namespace sparge::attend {

// Scales of the thread's rows, where there is room for them in registers.
struct RowScales {
  PerRow x;

  SPARGE_DEVICE explicit RowScales(const Smem& smem) {
    if constexpr (kRowsInRegisters)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) x[m][half] = smem.q_scale[first_row() + row_step(m, half)];
  }
};

// From raw scores to log2 units.
struct ScoreScale {
  const Smem& smem;
  const RowScales& kept;
  float block;  // softmax scale * log2 e * the K tile's scale

  SPARGE_DEVICE float of(i32 row, i32 m, i32 half) const {
    if constexpr (!is_quantized(kElement)) return block;
    return (kRowsInRegisters ? kept.x[m][half] : smem.q_scale[row + row_step(m, half)]) * block;
  }
};

struct Softmax {
  RowNumbers<kRowsInRegisters> max;  // log2 units
  RowNumbers<kRowsInRegisters> sum;  // this thread's columns only, until finish()

  SPARGE_DEVICE Softmax(Smem& smem, const Problem& problem) : max(smem.row_max), sum(smem.row_sum) {
    const i32 row = first_row();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max.at(m, half, threadIdx.x) = smem.work.token(problem, row + row_step(m, half)) >= 0 ? kMinusInfinity : kNoRow;
        sum.at(m, half, threadIdx.x) = 0.0f;
      }
  }

  // Row maxima of the block in log2 units.
  SPARGE_DEVICE void block_max(const Scores& s, const ScoreScale& scale, PerRow& block) const {
    const i32 row = first_row();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = kMinusInfinity;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) most = fmaxf(most, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        const float level = lane_max<1, 4>(most) - kScoreZero;
        block[m][half] = is_quantized(kElement) ? level * scale.of(row, m, half) : __fmul_rd(level, scale.of(row, m, half));
      }
  }

  // Whether the block is negligible for all rows of this warp's row group. None is where `pvthreshd` is NaN.
  SPARGE_DEVICE bool negligible(const PerRow& block, float pvthreshd) const {
    const i32 thread = ptx::thread_index();
    bool all = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        all = all && (block[m][half] == kMinusInfinity ? pvthreshd == pvthreshd
                                                       : block[m][half] - max.at(m, half, thread) < -pvthreshd);  // not of NaN
    return thread < kRowGroupThreads ? ptx::barrier_all<kRowGroupThreads>(kBarrierUpperRows, all)
                                     : ptx::barrier_all<kRowGroupThreads>(kBarrierLowerRows, all);
  }

  // Raises the running maxima to the block's and shrinks earlier sums to match. After the first blocks a maximum rarely moves.
  // Where none of the warp moves, every factor is 1.
  SPARGE_DEVICE void raise_max(const PerRow& block, Accumulators& out) {
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) moved = moved || block[m][half] > max.at(m, half, threadIdx.x);
    if (!__any_sync(kFullWarp, moved)) return;
    const i32 thread = ptx::thread_index();  // read again, as this branch is rare
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = max.at(m, half, thread), most = fmaxf(before, block[m][half]);
        const float alpha = most == kMinusInfinity ? 1.0f : ptx::exp2_approx(before - most);
        max.at(m, half, thread) = most;
        sum.at(m, half, thread) *= alpha;
#pragma unroll
        for (int n = 0; n < kChannelTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) out[m][n][2 * half + i] *= alpha;
      }
  }

  // The scores of row tile m become probabilities relative to the running maximum; with integer values relative to the block's,
  // and not summed.
  SPARGE_DEVICE void exponentials(Scores& s, i32 m, const ScoreScale& score_scale, const PerRow& block) {
    const i32 row = first_row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = score_scale.of(row, m, half);
      const float most = kIntegerValues ? block[m][half] : max.at(m, half, threadIdx.x);
      const float reference = most == kMinusInfinity ? 0.0f : most;
      float added = 0.0f;
      const float bias = kShift - reference - kScoreZero * scale;
      // Maxima are rounded downwards. Beyond 2^27, which logits of quantized rows do not reach (row_scale.cuh), that is so much
      // that P would overflow.
      auto capped = [](float x) { return is_quantized(kElement) ? x : ptx::min_or_nan(x, 0.0f); };
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        float* pair = &s[m][n][2 * half];
        pair[0] = ptx::exp2_approx(capped(pair[0] * scale + bias));
        pair[1] = ptx::exp2_approx(capped(pair[1] * scale + bias));
        if constexpr (!kIntegerValues) added += pair[0] + pair[1];
      }
      if constexpr (!kIntegerValues) sum.at(m, half, threadIdx.x) += added;
    }
  }

  // Integer values: adds what P stands for to the row sums. Of keys these are its levels, of pooled keys P over their value scales.
  // By `product_factors`.
  SPARGE_DEVICE void add_levels(const Probabilities& p, const PerRow& factor) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 levels = 0;
#pragma unroll
        for (int step = 0; step < kValueSteps; ++step)
#pragma unroll
          for (int chunk = 0; chunk < 2; ++chunk) levels = __dp4a(p[m][step][2 * chunk + half], 0x01010101u, levels);
        sum.at(m, half, threadIdx.x) = __fmaf_rn(__uint2float_rn(levels), factor[m][half], sum.at(m, half, threadIdx.x));
      }
  }
  SPARGE_DEVICE void add_pooled(const Scores& p, const PerRow& factor, const float* inverse_value_scales) {
    const u32 of_thread = ptx::shared_address(inverse_value_scales) + ptx::thread_index() % 4 * (2 * sizeof(float));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          float left, right;
          ptx::load_shared(left, right, of_thread + 8 * n * sizeof(float));
          added += p[m][n][2 * half] * left + p[m][n][2 * half + 1] * right;
        }
        sum.at(m, half, threadIdx.x) = __fmaf_rn(added, factor[m][half], sum.at(m, half, threadIdx.x));
      }
  }

  // Integer values: makes of the block's maxima what P of the block is worth in units of the running ones.
  SPARGE_DEVICE void product_factors(PerRow& block) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float above = block[m][half] - max.at(m, half, threadIdx.x);  // NaN where neither has met a key
        block[m][half] = block[m][half] == kMinusInfinity ? 0.0f : ptx::exp2_approx(above);
      }
  }

  SPARGE_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum.at(m, half, threadIdx.x) = lane_sum<1, 4>(sum.at(m, half, threadIdx.x));
  }

  // Applies the output scale. Here, as `store_output` has no register to spare.
  SPARGE_DEVICE void spread(float inverse_output_scale) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) sum.at(m, half, threadIdx.x) *= inverse_output_scale;
  }
};

// Scores of a tile of pooled keys, half row by half row: the main loop has no register to spare.
SPARGE_DEVICE void pool_scores(Scores& s, const PoolColumn* columns, const ScoreScale& scale) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float per_bias = ptx::reciprocal_approx(scale.of(first_row(), m, half));
      const u32 of_thread = ptx::shared_address(columns) + ptx::thread_index() % 4 * (2 * sizeof(PoolColumn));
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          PoolColumn column;
          ptx::load_shared(column.scale, column.bias, of_thread + (8 * n + i) * sizeof(PoolColumn));
          s[m][n][2 * half + i] = pool_score(s[m][n][2 * half + i], column, per_bias);
        }
    }
}

// Minus infinity past the last key and above the causal diagonal. Comparing constants with one bound a row keeps this rare branch
// from costing the main loop registers.
SPARGE_DEVICE void mask_scores(Scores& s, const Work& work, i32 block, i32 keys, bool causal) {
  const i32 first_row_end = work.first_query + first_row() + 1 - block * kKeyBlock;  // keys that the first row may see
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 end = causal ? smaller(keys, first_row_end + row_step(m, half)) : keys;
      const i32 bound = end - ptx::thread_index() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * n + i >= bound) s[m][n][2 * half + i] = kMinusInfinity;
    }
}

SPARGE_DEVICE bool needs_mask(const Work& work, i32 block, i32 keys, bool causal) {
  return keys < kKeyBlock || (causal && block * kKeyBlock + kKeyBlock - 1 > work.first_query);
}

}  // namespace sparge::attend
