// SPDX-License-Identifier: Apache-2.0
// What the mean value of all keys makes up for, in query blocks that drop key blocks.
//
// Background  One pseudo-key for all key blocks that a query block drops. It is the mean key, which quantize takes from all
//             keys, so that its logit is 0 in every row, and it has the mean value. So it changes nothing but row sums: of the
//             keys v_mean is a part already (store.cuh). A head counts it log2_background times (log2) as often as there are
//             keys in the dropped blocks.
// Contrast    The output's distance from the mean value times a factor. Pooled terms draw outputs towards it, dropping draws
//             them apart; the factor puts right how far they lie from it.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/convert.cuh"
#include "constants.cuh"
#include "pool.cuh"
#include "work.cuh"

namespace sparge::attend {

// The key blocks that hold keys are those before this one: in an order lengths cut nothing but the text at the end.
SPARGE_DEVICE i32 end_of_keys(const AttendParams& p, const Work& work) {
  const Problem& problem = p.problem;
  i32 end = problem.key_blocks();
  if (!problem.key_lengths) return end;
  if (!problem.slot_counts) return ceil_div<i32>(problem.key_length(work.b), kKeyBlock);
  while (end > 0 && p.key_counts[work.first_tile + end - 1] == 0) --end;
  return end;
}

struct MeanTerms {
  float background;  // log2 of the mass of the term, minus infinity where there is none
  float inverse_contrast;
};

// All lanes of a warp.
SPARGE_DEVICE MeanTerms mean_terms(const AttendParams& p, const Work& work) {
  MeanTerms terms = {kMinusInfinity, 1.0f};
  if (!p.thresholds) return terms;
  const float per_key = p.thresholds[work.head].log2_background, contrast = p.thresholds[work.head].contrast;
  const bool has_background = per_key > kMinusInfinity;  // nor where it is no number
  if (!has_background && contrast == 1.0f) return terms;
  const i32 words = p.problem.map_words(), end = end_of_keys(p, work);
  const u32* map = p.block_map + work.map_row(p.problem) * words;
  u32 dropped = 0;
#pragma unroll 1
  for (i32 word = threadIdx.x % kWarpSize; word < words; word += kWarpSize) dropped += __popc(open_blocks(map[word], word, end));
  dropped = warp_sum(dropped);
  if (dropped == 0) return terms;
  if (has_background) terms.background = per_key + log2f(static_cast<float>(dropped * kKeyBlock));
  terms.inverse_contrast = p.partial_out ? 1.0f : 1.0f / contrast;  // parts of an output have none
  return terms;
}

// As often as the largest key of a row the term counts at most, log2: what is kept is nothing beside it then, and sums are finite.
constexpr float kMostBackground = 100.0f;

// A row's sum of probabilities with the term; rows that met no key stay empty. `most` in log2 units.
SPARGE_DEVICE float with_background(float sum, float most, float background) {
  return sum != 0.0f ? sum + ptx::exp2_approx(fminf(background - most, kMostBackground) + kShift) : sum;
}

}  // namespace sparge::attend
