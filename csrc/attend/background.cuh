// SPDX-License-Identifier: Apache-2.0
// What query blocks that drop key blocks get from the mean value of all keys.
//
// Background    One pooled key for all key blocks that a query block drops: the mean key, with the mean value. Quantize takes the
//               mean key from all keys, so its logit is 0 in every row. The mean value is a part of every output (store.cuh), so
//               the term changes row sums alone. Its weight is 2^log2_background for each key of the dropped blocks.
// Output scale  Factor on the output's distance from the mean value (`contrast`). Pooled keys draw outputs towards it, dropping
//               draws them apart; the factor corrects that distance.
#pragma once

#include "../common/reduce.cuh"
#include "../ptx/convert.cuh"
#include "constants.cuh"
#include "pool.cuh"
#include "work.cuh"

namespace sparge::attend {

// Key blocks before this one hold keys. In a token order lengths cut nothing but the text at the end.
SPARGE_DEVICE i32 end_of_keys(const AttendParams& p, const Work& work) {
  const Problem& problem = p.problem;
  i32 end = problem.key_blocks();
  if (!problem.key_lengths) return end;
  if (!problem.slot_counts) return ceil_div<i32>(problem.key_length(work.b), kKeyBlock);
  while (end > 0 && p.key_counts[work.first_tile + end - 1] == 0) --end;
  return end;
}

struct MeanTerms {
  float background;  // log2 of the term's mass; minus infinity: none
  float inverse_contrast;
};

// By all lanes of a warp.
SPARGE_DEVICE MeanTerms mean_terms(const AttendParams& p, const Work& work) {
  MeanTerms terms = {kMinusInfinity, 1.0f};
  if (!p.thresholds) return terms;
  const float per_key = p.thresholds[work.head].log2_background, contrast = p.thresholds[work.head].contrast;
  const bool has_background = per_key > kMinusInfinity;  // false for NaN, too
  if (!has_background && contrast == 1.0f) return terms;
  const i32 words = p.problem.map_words(), end = end_of_keys(p, work);
  const u32* map = p.block_map + work.map_row(p.problem) * words;
  u32 dropped = 0;
#pragma unroll 1
  for (i32 word = threadIdx.x % kWarpSize; word < words; word += kWarpSize) dropped += __popc(open_blocks(map[word], word, end));
  dropped = warp_sum(dropped);
  if (dropped == 0) return terms;
  if (has_background) terms.background = per_key + log2f(static_cast<float>(dropped * kKeyBlock));
  terms.inverse_contrast = p.partial_out ? 1.0f : 1.0f / contrast;  // partial results have no output scale
  return terms;
}

// Limit of the term's mass beside the row's largest key, log2, so that sums stay finite. Kept keys are nothing beside it then.
constexpr float kMostBackground = 100.0f;

// A row's sum of probabilities with the term; rows that met no key stay empty. `most` in log2 units.
SPARGE_DEVICE float with_background(float sum, float most, float background) {
  return sum != 0.0f ? sum + ptx::exp2_approx(fminf(background - most, kMostBackground) + kShift) : sum;
}

}  // namespace sparge::attend
