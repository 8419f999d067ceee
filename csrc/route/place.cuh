// SPDX-License-Identifier: Apache-2.0
// Order in which thread blocks take heads: those ranked by error first, as they take longer. The others fill what these leave of
// the last wave.
#pragma once

#include "../common/config.cuh"
#include "../params.cuh"

namespace sparge::route {

struct BatchHead {
  i32 b, head;
};

// By whole warps, of which each finds the same.
SPARGE_DEVICE BatchHead batch_head(const RouteParams& p, i32 index) {
  const i32 heads = p.problem.heads, lane = threadIdx.x % kWarpSize;
  if (!p.k_variance) return {index / heads, index % heads};
  auto by_error = [&](i32 head) { return head < heads && p.thresholds[head].router > 0.0f; };
  i32 longer = 0;
  for (i32 first = 0; first < heads; first += kWarpSize) longer += __popc(__ballot_sync(kFullWarp, by_error(first + lane)));
  const bool wanted = index < p.problem.batch * longer;
  const i32 place = wanted ? index : index - p.problem.batch * longer, of_batch = wanted ? longer : heads - longer;
  const i32 b = place / of_batch;
  i32 before = place - b * of_batch;
  for (i32 first = 0;; first += kWarpSize) {
    const bool own = first + lane < heads && by_error(first + lane) == wanted;
    const u32 lanes = __ballot_sync(kFullWarp, own);
    if (before < __popc(lanes)) {
      const bool found = own && __popc(lanes & ((1u << lane) - 1)) == before;
      return {b, first + __ffs(__ballot_sync(kFullWarp, found)) - 1};
    }
    before -= __popc(lanes);
  }
}

// The query blocks of a thread block, and the place of their head among those of all batches.
struct Place {
  i32 b, head, first, rows, head_at, kv_at;
};

// By a whole warp.
SPARGE_DEVICE Place place_at(const RouteParams& p, i32 index, i32 first) {
  const Problem& problem = p.problem;
  const BatchHead at = batch_head(p, index);
  return {at.b,
          at.head,
          first,
          smaller(p.rows_per_cta, problem.query_blocks() - first),
          at.b * problem.heads + at.head,
          at.b * problem.kv_heads + problem.kv_head(at.head)};
}

}  // namespace sparge::route
