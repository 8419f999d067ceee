// SPDX-License-Identifier: Apache-2.0
// Output scale of query blocks that drop key blocks: factor on the output's distance from the mean value of all keys (`output_scale`).
// Pooled keys draw outputs towards it, dropping draws them apart; the factor corrects that distance. The mean value is a part of
// every output (store.cuh), so the factor changes row sums alone.
#pragma once

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

// Factor on the row sums of a query block. By all lanes of a warp.
SPARGE_DEVICE float inverse_output_scale(const AttendParams& p, const Work& work) {
  if (!p.thresholds || p.partial_out) return 1.0f;  // partial results have no output scale
  const float output_scale = p.thresholds[work.head].output_scale;
  if (output_scale == 1.0f) return 1.0f;
  const i32 words = p.problem.map_words(), end = end_of_keys(p, work);
  const u32* map = work.map_row(p);
  u32 dropped = 0;
#pragma unroll 1
  for (i32 word = threadIdx.x % kWarpSize; word < words; word += kWarpSize) dropped |= open_blocks(map[word], word, end);
  return __any_sync(kFullWarp, dropped) ? 1.0f / output_scale : 1.0f;
}

}  // namespace sparge::attend
