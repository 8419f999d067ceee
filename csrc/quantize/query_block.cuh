// SPDX-License-Identifier: Apache-2.0
// Mean and self-similarity of one block of 128 queries. Q itself is quantized where attend reads it.
#pragma once

#include "block_stats.cuh"

namespace sparge::quantize {

template <DType kType>
SPARGE_DEVICE void query_block(const QuantizeParams& p, const Rows<kType>& rows, SumsSmem& smem, i32 head, i32 block_at,
                               i32 block) {
  const Thread thread;
  const i32 first = block * kQueryBlock, start = p.problem.walk_start(p.problem.kv_head(head));
  const i32 count = p.problem.rows_from(first) + p.problem.rows_from(first + kKeyBlock);
  ChannelSums sums;
#pragma unroll 4
  for (int pass = 0; pass < kQueryBlock / kTokensPerPass; ++pass) {
    const i32 token = p.problem.query_token(start, first + thread.token + pass * kTokensPerPass);
    float x[kLaneChannels] = {};
    if (token >= 0) rows.load(token, thread.channel, x);
    sums.add(x);
  }
  float mean;
  const float similarity = finish_sums(smem, thread, sums, count, mean);
  if (threadIdx.x < kHeadDim) p.q_block_mean[static_cast<i64>(block_at) * kHeadDim + threadIdx.x] = mean;
  if (threadIdx.x == 0) p.q_similarity[block_at] = similarity;
}

}  // namespace sparge::quantize
