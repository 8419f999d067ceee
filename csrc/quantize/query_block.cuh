// SPDX-License-Identifier: Apache-2.0
// Mean and self-similarity of one block of 128 queries. Q itself is quantized where attend reads it.
#pragma once

#include "block_stats.cuh"

namespace sparge::quantize {

template <Source kSource>
SPARGE_DEVICE void query_block(const QuantizeParams& p, const Chunks<kSource>& rows, SumsSmem& smem, i32 head, i32 block_at,
                               i32 block) {
  const Thread thread;
  const i32 first = block * kQueryBlock, start = walk_start_of_queries(p.problem, head);
  const i32 count = p.problem.rows_from(first) + p.problem.rows_from(first + kKeyBlock);
  constexpr int kLoads = kQueryBlock / kTokensPerPass;
  Chunk chunk[kLoads];
#pragma unroll
  for (int pass = 0; pass < kLoads; ++pass)
    chunk[pass] = rows.load(p.problem.query_token(start, first + thread.token + pass * kTokensPerPass), thread.channel);
  float sums[kLaneChannels] = {}, unit_sums[kLaneChannels] = {};
#pragma unroll
  for (int pass = 0; pass < kLoads; ++pass) {
    float x[kLaneChannels];
    rows.unpack(chunk[pass], x);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) sums[i] += x[i];
    if (p.with_similarity) {
      const float inverse = inverse_norm(x);
#pragma unroll
      for (int i = 0; i < kLaneChannels; ++i) unit_sums[i] += x[i] * inverse;
    }
  }
  store_sums(smem.rows, thread, sums);
  if (p.with_similarity) store_sums(smem.unit_rows, thread, unit_sums);
  __syncthreads();
  if (thread.warp == 0) {
    float mean[kLaneShare];
    over_parts(smem.rows, thread.lane, mean);
#pragma unroll
    for (int i = 0; i < kLaneShare; ++i) mean[i] *= inverse_count(count);
    store_floats(p.q_block_mean + static_cast<i64>(block_at) * kHeadDim + thread.lane * kLaneShare, mean);
    if (!p.with_similarity) {
      const float similar = similarity_of_finite(mean);
      if (thread.lane == 0) p.q_similarity[block_at] = similar;
    }
  } else if (thread.warp == 1 && p.with_similarity) {
    const float similar = similarity(smem, thread.lane, count);
    if (thread.lane == 0) p.q_similarity[block_at] = similar;
  }
}

}  // namespace sparge::quantize
