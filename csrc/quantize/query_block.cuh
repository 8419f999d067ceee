// SPDX-License-Identifier: Apache-2.0
// Mean and self-similarity of blocks of 128 queries. Q itself is quantized where attend reads it.
#pragma once

#include "block_stats.cuh"

namespace sparge::quantize {

// Sums of the block at hand and of the one before, whose statistics may still be computed.
struct QuerySmem {
  SumsSmem sums[2];
};

// Each statistic by one warp.
SPARGE_DEVICE void query_statistics(const QuantizeParams& p, const SumsSmem& smem, i32 block_at, i32 count) {
  const Thread thread;
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

template <Source kSource>
SPARGE_DEVICE void average_queries(const QuantizeParams& p, const Chunks<kSource>& rows, QuerySmem& smem, const Run& run,
                                   i32 last) {
  constexpr int kLoads = kQueryBlock / kTokensPerPass;
  constexpr bool kTogether =
      kSource != Source::kOther;  // eight loads in flight; those of other sources are too many instructions
#pragma unroll 1
  for (i32 block = last; block >= run.first; --block) {
    const Thread thread;
    const Chunks<kSource> there = run.rows(rows);
    const i32 first = block * kQueryBlock;
    const i32 count = p.problem.rows_from(first) + p.problem.rows_from(first + kKeyBlock);
    auto load = [&](int pass) {
      return there.load(p.problem.query_token(run.start, first + thread.token + pass * kTokensPerPass), thread.channel);
    };
    Chunk chunk[kLoads];
    if constexpr (kTogether)
#pragma unroll
      for (int pass = 0; pass < kLoads; ++pass) chunk[pass] = load(pass);
    float sums[kLaneChannels] = {}, unit_sums[kLaneChannels] = {};
#pragma unroll
    for (int pass = 0; pass < kLoads; ++pass) {
      if constexpr (!kTogether) chunk[pass] = load(pass);
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
    SumsSmem& of_block = smem.sums[block % 2];
    store_sums(of_block.rows, thread, sums);
    if (p.with_similarity) store_sums(of_block.unit_rows, thread, unit_sums);
    __syncthreads();
    query_statistics(p, of_block, run.at(block), count);
  }
}

}  // namespace sparge::quantize
