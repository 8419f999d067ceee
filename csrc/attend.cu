// SPDX-License-Identifier: Apache-2.0
// Launch 4: block-sparse flash attention over the block map, mma.sync family (sm_80 and up).
//
// Semantics   Softmax over the keys of the kept blocks, ascending. O = v_mean + output_scale * v_scale * acc / l, 0 for rows without
//             keys; output_scale is the output scale (attend/output_scale.cuh).
//             Pooled keys may stand for dropped blocks (attend/pool.cuh).
//             PV filter: 64 query rows skip a block whose row maxima all lie pvthreshd log2 units below the running ones.
// Layout      Q tile 128 x head_dim (64 for INT8 PV at head_dim 128), K tiles 64 x head_dim, V tiles head_dim x 64, all swizzled in 16-byte chunks.
// Strategy    4 warps x 32 rows. Scores and accumulators live in registers. Q fragments are read again from shared memory every
//             block. Tiles arrive by cp.async 1-2 blocks ahead. 2 thread blocks an SM hide each other's softmax.
//             INT8 PV at head_dim 128: 16 rows a warp, Q fragments in registers, 3 thread blocks of 64 rows an SM.
//             INT8 P is levels of the row's maximum in the block, V of a scale by channel and one by block. So the sums of a block are
//             integers, and one factor a row adds them to the accumulators.
// Elements    INT8 QK with INT8, FP16 or E4M3 PV, or bf16/fp16 for both. On sm_90a attend_hopper.cu serves E4M3 and
//             attend_hopper16.cu 16 bits; the builds for sm_90a, with E4M3 mma.sync emulated, exist for correctness tests.
// Tried       docs/experiments.md, "Attend with mma.sync".
#include "attend/epilogue.cuh"
#include "attend/pipeline.cuh"
#include "attend/queries.cuh"
#include "common/pairs.cuh"

namespace sparge::attend {

SPARGE_CHECK_PARAMS(AttendParams);

SPARGE_DEVICE i32 group_pairs(const AttendParams& p, const Smem& smem, i32 group, i32 place) {
  const Work& work = smem.work;
  if (place >= smem.first_pool_place) return 0;  // pooled keys without weight, of rows that met no key yet
  const i32 first_row = work.first_query + group * kRowGroup;
  return block_pairs(p.causal, first_row, p.problem.rows_from(first_row), place * kKeyBlock,
                     p.key_counts[work.first_tile + place]);
}
static_assert(kRowGroup == kKeyBlock, "a token order counts its tokens by 64 slots");

SPARGE_DEVICE void attend_block(const AttendParams& p, Smem& smem, u32* list) {
  const Work& work = smem.work;
  if (threadIdx.x == 0) {
    smem.work.read(p, blockIdx.x / kParts);
    if constexpr (kParts > 1) smem.work.take_part(p.problem, blockIdx.x % kParts, kRows);
  }
  if (threadIdx.x < kRowGroups) smem.skipped_pairs[threadIdx.x] = 0;
  __syncthreads();
  if (kParts > 1 && work.queries <= 0) return;
  const QueryRows query_rows(p, work);
  const bool finite = load_list(list, smem, p);

  // Scores of such a head are NaN, of which maxima see nothing.
  if (kPvFilter && !finite && threadIdx.x == 0) smem.work.pvthreshd = kNotANumber;

  Pipeline pipeline(smem, p, list);
  store_queries(smem, p, query_rows, finite);
  Softmax softmax(smem, p.problem);
  QueryFragments queries;
  keep_queries(queries, smem.q);
  const LaneAddresses lanes(smem);
  const RowScales row_scales(smem);
  Accumulators out = {};

  for (i32 place = pipeline.wait_keys(); place >= 0; place = pipeline.wait_keys()) {
    const ScoreScale scale{smem, row_scales, p.scale * kLog2E * pipeline.key_scale()};
    Scores scores;
    score_block(scores, queries, smem.q, lanes.keys(smem, pipeline.slot));
    if (needs_mask(work, place, pipeline.key_count(), p.causal)) {
      if (pipeline.key_count() < 0)
        pool_scores(scores, pipeline.columns(), scale);
      else
        mask_scores(scores, work, place, pipeline.key_count(), p.causal);
    }
    PerRow block_max;
    softmax.block_max(scores, scale, block_max);
    bool skip = false;
    if constexpr (kPvFilter) skip = softmax.negligible(block_max, pipeline.key_count() < 0 ? kNeverNegligible : work.pvthreshd);
    pipeline.wait_values();
    if constexpr (kIntegerValues && !kPvFilter) __syncwarp();
    if (skip) {
      if (const i32 thread = ptx::thread_index(); thread % kRowGroupThreads == 0)
        smem.skipped_pairs[thread / kRowGroupThreads] += group_pairs(p, smem, thread / kRowGroupThreads, place);
      continue;
    }
    softmax.raise_max(block_max, out);
    Probabilities probabilities;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax.exponentials(scores, m, scale, block_max);
      pack_row_tile(probabilities, scores, m);
    }
    if constexpr (kIntegerValues) {
      softmax.product_factors(block_max);
      if (place >= Pipeline::kPooled)
        softmax.add_pooled(scores, block_max, pipeline.inverse_value_scales());
      else
        softmax.add_levels(probabilities, block_max);
      scale_rows(block_max, pipeline.value_scale());
      __syncwarp();  // else ptxas mixes both products and spills
    }
    add_values(out, probabilities, lanes.values(smem, pipeline.slot), block_max);
  }

  softmax.finish();
  store_facts(p, work, smem, softmax);
  if constexpr (is_quantized(kElement)) softmax.spread(smem.inverse_output_scale);
  store_output(p, work, out, softmax);
  const i32 thread = ptx::thread_index();
  if (kPvFilter && p.counters && thread % kRowGroupThreads == 0)
    atomicAdd(p.counters + kSkippedPairs, static_cast<u64>(smem.skipped_pairs[thread / kRowGroupThreads]));
}

}  // namespace sparge::attend

// Dynamic shared memory: Smem, then the list (attend/block_list.cuh), added by the host.
extern "C" __device__ const sparge::AttendSizes launch_sizes = {sparge::attend::kParts};
extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::attend::kThreads, sizeof(sparge::attend::Smem)};

// Grid: batch x heads x query blocks x their parts, parts fastest, then query blocks.
extern "C" __global__ void __launch_bounds__(sparge::attend::kThreads, sparge::attend::kBlocksPerSm)
    attend(const __grid_constant__ sparge::AttendParams p) {
  extern __shared__ __align__(256) sparge::u8 shared[];
  auto& smem = *reinterpret_cast<sparge::attend::Smem*>(shared);
  sparge::attend::attend_block(p, smem, reinterpret_cast<sparge::u32*>(shared + sizeof(smem)));
}
