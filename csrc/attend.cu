// SPDX-License-Identifier: Apache-2.0
// Launch 4: block-sparse flash attention over the block map, mma.sync family (sm_80 and up).
//
// Semantics   softmax over the keys of the kept blocks, ascending; O = v_mean + v_scale * acc / l, 0 for rows without keys.
//             PV filter: 64 query rows skip a block whose row maxima all lie pvthreshd log2 units below the running ones.
// Layout      Q tile 128 x head_dim, K tiles 64 x head_dim, V tiles head_dim x 64, all swizzled in 16-byte chunks.
// Strategy    4 warps x 32 rows; scores and accumulators in registers, Q fragments re-read from shared memory every
//             block; tiles arrive by cp.async 1-2 blocks ahead; 2 thread blocks an SM hide each other's softmax.
// Elements    INT8 QK with FP16 or E4M3 PV, or bf16/fp16 for both. On sm_90a, whose own E4M3 path is attend_hopper.cu,
//             E4M3 mma.sync is emulated: that build exists for correctness tests.
// Tried       See NOTES.md for figures.
#include "attend/epilogue.cuh"
#include "attend/pipeline.cuh"
#include "attend/queries.cuh"
#include "common/pairs.cuh"

namespace sparge::attend {

SPARGE_CHECK_PARAMS(AttendParams);

SPARGE_DEVICE i32 group_pairs(const Work& work, i32 group, i32 block, bool causal) {
  const i32 first_row = group * kRowGroup;
  const i32 rows = larger(0, smaller(kRowGroup, work.queries - first_row));
  const i32 first_key = block * kKeyBlock;
  return block_pairs(causal, work.first_query + first_row, rows, first_key,
                     larger(0, smaller(kKeyBlock, work.key_length - first_key)));
}

SPARGE_DEVICE void attend_block(const AttendParams& p, Smem& smem, u32* map) {
  const Work& work = smem.work;
  if (threadIdx.x == 0) smem.work.read(p, blockIdx.x);
  if (threadIdx.x < kRowGroups) smem.skipped_pairs[threadIdx.x] = 0;
  __syncthreads();
  const i32 words = p.problem.map_words();
  const u32* map_row = p.block_map + work.map_row(p.problem) * words;
  for (int word = threadIdx.x; word <= words; word += kThreads) map[word] = word < words ? map_row[word] : kEndOfList;
  __syncthreads();

  Pipeline pipeline(smem, p, BlockList(map));
  load_queries(smem, p, work);
  Softmax softmax(smem);
  Accumulators out = {};

  for (i32 block = pipeline.wait_keys(); block >= 0; block = pipeline.wait_keys()) {
    const ScoreScale scale{smem, p.scale * kLog2E * pipeline.key_scale()};
    Scores scores;
    score_block(scores, smem.q, pipeline.keys());
    if (needs_mask(work, block, p.causal)) mask_scores(scores, work, block, p.causal);
    PerRow block_max;
    softmax.block_max(scores, scale, block_max);
    bool skip = false;
    if constexpr (kPvFilter) skip = softmax.negligible(block_max, work.pvthreshd);
    pipeline.wait_values();
    if (skip) {
      if (const i32 thread = ptx::thread_index(); thread % kRowGroupThreads == 0)
        smem.skipped_pairs[thread / kRowGroupThreads] += group_pairs(work, thread / kRowGroupThreads, block, p.causal);
      continue;
    }
    softmax.raise_max(block_max, out);
    Probabilities probabilities;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax.exponentials(scores, m, scale);
      pack_row_tile(probabilities, scores, m);
    }
    add_values(out, probabilities, pipeline.values());
  }

  softmax.finish();
  store_facts(p, work, smem, softmax);
  store_output(p, work, out, softmax);
  const i32 thread = ptx::thread_index();
  if (kPvFilter && p.counters && thread % kRowGroupThreads == 0)
    atomicAdd(p.counters + 2, static_cast<u64>(smem.skipped_pairs[thread / kRowGroupThreads]));
}

}  // namespace sparge::attend

// Dynamic shared memory: Smem, then (map_words + 1) x 4 bytes, added by the host.
extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::attend::kThreads, sizeof(sparge::attend::Smem)};

// Grid: batch x heads x query blocks, query blocks fastest.
extern "C" __global__ void __launch_bounds__(sparge::attend::kThreads, sparge::attend::kBlocksPerSm)
    attend(const __grid_constant__ sparge::AttendParams p) {
  extern __shared__ __align__(256) sparge::u8 shared[];
  auto& smem = *reinterpret_cast<sparge::attend::Smem*>(shared);
  sparge::attend::attend_block(p, smem, reinterpret_cast<sparge::u32*>(shared + sizeof(smem)));
}
