// SPDX-License-Identifier: Apache-2.0
// Online softmax of 64 rows over the two key blocks of a step, in log2 units, with the true running maximum.
#pragma once

#include "../../common/reduce.cuh"
#include "../../ptx/special.cuh"
#include "../../ptx/wgmma.cuh"
#include "../pool.cuh"
#include "../store.cuh"
#include "fixed_exp2.cuh"
#include "rows.cuh"

namespace sparge::hopper {

using attend::kNoRow;
using attend::kScoreZero;
using attend::kShift;

using Levels = i32[kScores];
using Probabilities = u32[kValueSteps][4];

// Minus infinity past the last key, above the causal diagonal and in a missing second block.
SPARGE_DEVICE void mask_scores(Levels& levels, const Step& step, int block, bool causal) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 bound = unseen_from(step, block, half, causal);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * j + c >= bound) levels[at(j, half, c)] = __float_as_int(kMinusInfinity);
  }
}

// Two neighbouring columns by one load, for both rows.
SPARGE_DEVICE void pool_scores(Levels& levels, const Stage& stage, int tile, const PerRow& q_scale, float log2_scale) {
  const u32 columns = ptx::shared_address(stage.columns + tile * kKeyBlock + 2 * quad_lane());
  PerRow per_bias;
#pragma unroll
  for (int half = 0; half < 2; ++half) per_bias[half] = ptx::reciprocal_approx(q_scale[half] * log2_scale * attend::kPoolScale);
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
    i32 pair[4];
    ptx::load_registers(pair, columns + 8 * j * sizeof(PoolColumn));
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const PoolColumn column = {__int_as_float(pair[2 * c]), __int_as_float(pair[2 * c + 1])};
        i32& level = levels[at(j, half, c)];
        level = __float_as_int(attend::pool_score(__int_as_float(level), column, per_bias[half]));
      }
  }
}

struct Softmax : Maxima {
  PerRow sum = {};  // of the rounded probabilities

  SPARGE_DEVICE explicit Softmax(const Queries& queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = queries.token[first_row_of_item() + 8 * half] >= 0 ? kNoKey : kNoRow;
  }

  // Largest logit of a block among this thread's columns, log2 units.
  template <bool kMasked>
  SPARGE_DEVICE static void block_maximum(PerRow& block_most, const Levels& levels, const PerRow& scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      block_most[half] = ((kMasked ? largest(levels, half) : largest_positive(levels, half)) - kScoreZero) * scale[half];
  }

  SPARGE_DEVICE static float largest(const Levels& levels, int half) {
    constexpr int kChains = 4;  // of maxima, each of which waits for the one before it
    float chain[kChains];
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const float level = __int_as_float(levels[at(i / 2, half, i % 2)]);
      chain[i % kChains] = i < kChains ? level : fmaxf(chain[i % kChains], level);
    }
    return fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  }

  // Bits of positive floats are ordered as the floats are, and Hopper compares three integers by one instruction. Only for scores
  // that neither a mask nor pooling changed: those are kScoreZero plus a sum of products of levels.
  SPARGE_DEVICE static float largest_positive(const Levels& levels, int half) {
    static_assert(kHeadDim * kInt8Levels * kInt8Levels < kScoreZero, "no sum of products may make a score negative");
    auto level = [&](int i) { return levels[at(i / 2, half, i % 2)]; };
    auto most = [](i32 a, i32 b, i32 c) { return larger(larger(a, b), c); };
    static_assert(2 * kKeyTiles == 16, "a row has 16 scores of a block in a thread");
    const i32 first = most(most(level(0), level(1), level(2)), level(3), level(4));
    const i32 second = most(most(level(5), level(6), level(7)), level(8), level(9));
    const i32 third = most(most(level(10), level(11), level(12)), level(13), level(14));
    return __int_as_float(larger(most(first, second, third), level(15)));
  }

  // Blocks of the step that this warp finds negligible, a bit each. To a row that met no key yet, only a block without any key
  // for it is negligible. Also makes the maxima those over all columns.
  SPARGE_DEVICE u32 negligible(PerRow (&block_most)[kStepBlocks], float pvthreshd) const {
    bool vote[kStepBlocks] = {true, true};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float running = most[half];
#pragma unroll
      for (int block = 0; block < kStepBlocks; ++block) {
        block_most[block][half] = lane_max<1, 4>(block_most[block][half]);
        vote[block] = vote[block] && block_most[block][half] - running < -pvthreshd;
        running = fmaxf(running, block_most[block][half]);
      }
    }
    return __all_sync(kFullWarp, vote[0]) | __all_sync(kFullWarp, vote[1]) << 1;
  }

  // From the maxima of this thread's columns to that of the row over both blocks. `negligible` does it for the PV filter.
  SPARGE_DEVICE static void over_columns(PerRow (&block_most)[kStepBlocks]) {
    if constexpr (!kPvFilter) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        block_most[0][half] = block_most[1][half] = lane_max<1, 4>(fmaxf(block_most[0][half], block_most[1][half]));
    }
  }

  // From the scores of one block to the exponents of its probabilities. Frees the registers of the scores.
  SPARGE_DEVICE void exponents(Exponents& x, const Levels& levels, const PerRow& scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float bias = kShift - most[half] - kScoreZero * scale[half];
      const float fixed_scale = scale[half] * kFixedUnit;
      // From the rounded bias: both kinds of tiles then share its rounding, which cancels in the softmax.
      const float fixed_bias = bias * kFixedUnit + kFixedShift * kFixedUnit;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const float low = __int_as_float(levels[at(j, half, 0)]), high = __int_as_float(levels[at(j, half, 1)]);
        if (is_fixed(j))
          x.fixed[j][half] = ptx::pack_fp16_relu(low * fixed_scale + fixed_bias, high * fixed_scale + fixed_bias);
        else
          x.exact[j][half][0] = low * scale[half] + bias, x.exact[j][half][1] = high * scale[half] + bias;
      }
    }
  }

  // From the exponents of one block to probabilities, packed as the A operand: two key tiles side by side fill a register. What
  // the PV filter skips becomes zeros without a branch: a branch would part the exponentials from what fills their gaps.
  SPARGE_DEVICE static void exponentials(Probabilities& p, const Exponents& x, int block, bool skip) {
    const u32 kept = kPvFilter && skip ? 0 : ~0u;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; j += 2) {
        auto pack = [&](int tile) -> u32 {
          if (is_fixed(tile)) return ptx::e4m3_from_fp16(fixed_exp2(x.fixed[tile][half]));
          return ptx::pack_e4m3(ptx::exp2_approx(x.exact[tile][half][0]), ptx::exp2_approx(x.exact[tile][half][1]));
        };
        const u32 upper = pack(j + 1) << 16;  // first: docs/experiments.md, "How ptxas orders the loop of attend on Hopper"
        p[block * kBlockValueSteps + j / 4][j % 4 + half] = kept & (pack(j) | upper);
      }
    }
  }
};

}  // namespace sparge::hopper
