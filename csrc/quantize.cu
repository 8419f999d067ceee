// SPDX-License-Identifier: Apache-2.0
// Launch 2: K and V as contiguous, padded, pre-swizzled tiles, and the block statistics that route reads.
//
// Semantics   K - mean in INT8, one scale per 64 keys. V - mean in FP16 or E4M3, one scale per channel, transposed. 16-bit
//             elements copy K and V unchanged. Means and self-similarity from true token counts. Rows past a head's last key
//             are zero. A token order is followed where tokens are read: nothing is gathered first.
//             For head settings also the variance of K, mean and variance of V, and the means as tiles of pooled keys.
// Layout      K tile 64 x head_dim (16-bit rows cut in two on sm_90a, common/key_tile.cuh), V tile head_dim x 64, 16-byte
//             chunks swizzled (common/swizzle.cuh), so that a tile is one contiguous copy for every reader. params.cuh has the
//             layout of the statistics.
// Strategy    A thread block takes a run of query, key or value blocks of a head one after another, and so finds once what they
//             share. The host says how many (sparge/stages/quantize_grid.py).
//             Loads of a block start before anything is waited for. Where Hopper quantizes, those of the next K or V block start
//             before the statistics of one.
//             What only statistics need is finished by single warps at the end, each statistic by another, without barriers.
//             Self-similarities are left out where no threshold asks for them.
//             Q is only averaged here: attend reads each query row once and quantizes it in place, which saves the INT8 copy (a
//             sixth of q+k+v) and its traffic.
// Tried       docs/experiments.md, "Quantize".
#include "params.cuh"
#include "quantize/key_block.cuh"
#include "quantize/query_block.cuh"
#include "quantize/value_block.cuh"

namespace sparge::quantize {

SPARGE_CHECK_PARAMS(QuantizeParams);

union Smem {
  QuerySmem query;
  KeySmem key;
  ValueSmem value;
};

// Without a division in the usual case.
SPARGE_DEVICE i32 batch_of(i32 head_at, i32 batch, i32 heads) {
  return batch == 1 ? 0 : static_cast<u32>(head_at) / static_cast<u32>(heads);
}

}  // namespace sparge::quantize

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::quantize::kThreads, 0};

// Grid (sparge/stages/quantize_grid.py): x batch x kv_heads; y work items: runs of key and of value blocks, alternately,
// then (with_queries) runs of query blocks, the heads that share keys one after another. Heads are fastest, the last tokens
// first: neighbours run at the same time, and what means read last is still in the L2.
extern "C" __global__ void __launch_bounds__(sparge::quantize::kThreads, sparge::quantize::kBlocksPerSm)
    quantize(const __grid_constant__ sparge::QuantizeParams p) {
  using namespace sparge;
  __shared__ quantize::Smem smem;
  __shared__ quantize::Run run;
  const Problem& problem = p.problem;
  const i32 run_at = blockIdx.y, kv_at = blockIdx.x;
  if constexpr (kArch == 90)  // the attend kernel with persistent blocks exists there
    if (run_at == 0 && kv_at == 0 && threadIdx.x == 0) *p.next_item = 0;
  const i32 b = quantize::batch_of(kv_at, problem.batch, problem.kv_heads), kv = kv_at - b * problem.kv_heads;
  const i32 kv_runs = 2 * p.key_runs;
  if (run_at < kv_runs) {
    const bool values = run_at % 2 == 1;
    const i32 first = (p.key_runs - 1 - run_at / 2) * p.key_run, blocks = problem.key_blocks();
    const i32 last = smaller(first + p.key_run, blocks) - 1;
    auto share = [&](const char* base) {
      if (threadIdx.x == 0)
        run = {base, kv_at, blocks, first, quantize::order_start_of_keys(problem, kv), problem.key_length(b), true};
      __syncthreads();
    };
    if (values)
      with_chunks(p.v, b, kv, problem.channels, [&](auto rows) {
        share(rows.base);
        quantize::quantize_values(p, rows, smem.value, run, last);
      });
    else
      with_chunks(p.k, b, kv, problem.channels, [&](auto rows) {
        share(rows.base);
        quantize::quantize_keys(p, rows, smem.key, run, last);
      });
  } else {
    i32 run_of_head = run_at - kv_runs, head = kv;
    if (problem.heads != problem.kv_heads) {
      const i32 group = problem.heads / problem.kv_heads;
      head = kv * group + run_of_head % group;
      run_of_head /= group;
    }
    const i32 first = run_of_head * p.query_run, blocks = problem.query_blocks();
    const i32 last = smaller(first + p.query_run, blocks) - 1;
    with_chunks(p.q, b, head, problem.channels, [&](auto rows) {
      if (threadIdx.x == 0)
        run = {rows.base, b * problem.heads + head, blocks, first, quantize::order_start_of_queries(problem, head)};
      __syncthreads();
      quantize::average_queries(p, rows, smem.query, run, last);
    });
  }
}
