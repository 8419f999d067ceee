// SPDX-License-Identifier: Apache-2.0
// Online softmax of 64 rows over the 128 keys of a step, in log2 units, with the true running maximum.
#pragma once

#include "../../common/reduce.cuh"
#include "../../ptx/convert.cuh"
#include "../../ptx/special.cuh"
#include "../../ptx/wgmma.cuh"
#include "../hopper/rows.cuh"
#include "../pool.cuh"

namespace sparge::hopper16 {

using namespace hopper;

constexpr int kStepTiles = kStepBlocks * kKeyTiles;
using Scores = float[kStepBlocks * kScores];
using Probabilities = u32[kValueSteps][4];

// Minus infinity past the last key, above the causal diagonal and in a missing second block.
SPARGE_DEVICE void mask_scores(Scores& scores, const Step& step, bool causal) {
#pragma unroll
  for (int block = 0; block < kStepBlocks; ++block)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 bound = unseen_from(step, block, half, causal);
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * j + c >= bound) scores[at(block * kKeyTiles + j, half, c)] = kMinusInfinity;
    }
}

// Two neighbouring columns by one load, for both rows.
SPARGE_DEVICE void pool_scores(Scores& scores, const PoolColumn* of_step, float log2_scale) {
  const u32 columns = ptx::shared_address(of_step + 2 * quad_lane());
  const float per_bias = ptx::reciprocal_approx(log2_scale * attend::kPoolScale);
#pragma unroll
  for (int j = 0; j < kStepTiles; ++j) {
    i32 pair[4];
    ptx::load_registers(pair, columns + 8 * j * sizeof(PoolColumn));
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const PoolColumn column = {__int_as_float(pair[2 * c]), __int_as_float(pair[2 * c + 1])};
        float& score = scores[at(j, half, c)];
        score = attend::pool_score(score, column, per_bias);
      }
  }
}

// Power of two that scales the logits of a row to below 2^25; 1 where they are. float32 would round larger maxima by so much that
// exponents overflow. Neighbouring scores stay at least half an octave apart.
SPARGE_DEVICE float flattening(float most) {
  constexpr u32 kExponent = 0x7F800000, kOne = 0x3F800000, kLimit = 24;
  return __uint_as_float(smaller(kOne, kOne + kOne + (kLimit << 23) - (__float_as_uint(most) & kExponent)));
}

struct Softmax : Maxima {
  PerRow sum = {};  // of this thread's columns, until finish()

  SPARGE_DEVICE explicit Softmax(const Queries& queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = queries.token[first_row() + 8 * half] >= 0 ? kNoKey : attend::kNoRow;
  }

  // Largest score of a block in the row, over all columns.
  SPARGE_DEVICE static float largest(const Scores& scores, int block, int half) {
    constexpr int kChains = 4;  // of maxima, each of which waits for the one before it
    float chain[kChains];
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const float score = scores[at(block * kKeyTiles + i / 2, half, i % 2)];
      chain[i % kChains] = i < kChains ? score : fmaxf(chain[i % kChains], score);
    }
    return fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  }

  // Blocks of the step that this thread's rows find negligible, a bit each. To a row that met no key yet, only a block without
  // any key for it is negligible.
  SPARGE_DEVICE u32 negligible(const PerRow (&block_most)[kStepBlocks], float pvthreshd) const {
    u32 vote = 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float running = most[half];
#pragma unroll
      for (int block = 0; block < kStepBlocks; ++block) {
        if (!(block_most[block][half] - running < -pvthreshd)) vote &= ~(1u << block);
        running = fmaxf(running, block_most[block][half]);
      }
    }
    return vote;
  }

  // Scores become probabilities relative to the running maximum.
  SPARGE_DEVICE void exponentials(Scores& scores, float log2_scale, const PerRow& alpha) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float flat = flattening(most[half]), scale = log2_scale * flat, reference = most[half] * flat;
      constexpr int kChains = 2;  // of sums
      float added[kChains];
#pragma unroll
      for (int j = 0; j < kStepTiles; ++j) {
        float* pair = scores + at(j, half, 0);
        pair[0] = ptx::exp2_approx(pair[0] * scale - reference);
        pair[1] = ptx::exp2_approx(pair[1] * scale - reference);
        const float both = pair[0] + pair[1];
        added[j % kChains] = j < kChains ? both : added[j % kChains] + both;
      }
      sum[half] = sum[half] * alpha[half] + (added[0] + added[1]);
    }
  }

  SPARGE_DEVICE void finish(const Queries& queries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float of_row = lane_sum<1, 4>(sum[half]);
      sum[half] = of_row != 0.0f ? of_row + queries.zero_if_finite : 0.0f;
    }
  }
};

// Two key tiles side by side: the fragment of the scores is the A operand of the products with values.
SPARGE_DEVICE void pack(Probabilities& p, const Scores& scores) {
#pragma unroll
  for (int step = 0; step < kValueSteps; ++step)
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = scores + at(2 * step + chunk, half, 0);
        p[step][2 * chunk + half] =
            kElement == Element::kBf16 ? ptx::pack_bf16(pair[0], pair[1]) : ptx::pack_fp16(pair[0], pair[1]);
      }
}

}  // namespace sparge::hopper16
