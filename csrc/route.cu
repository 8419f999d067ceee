// SPDX-License-Identifier: Apache-2.0
// Launch 3: which key blocks each query block attends to.
//
// Semantics   score = mean(Q block) . mean(K block) * scale in float32 (the log of a block's mass), or by head the error
//             that pooling the block makes (route/error.cuh); blocks that fail the self-similarity gate, hold exact
//             tokens, the sink or the causal diagonal are forced; among the rest top-k or cumulative mass decides, ties to
//             the lower index. Or a caller's block mask is packed.
// Output      block_map, one bit a key block (a 1,861-block row takes 236 bytes where a uint16 list would take 3.7 KB),
//             counts, and the pair counters behind `density`.
// Strategy    A thread block scores up to 8 query blocks of one head together, so each K mean is read from L2 once for
//             all of them; then one warp selects for each. Scores live in shared memory only.
#include "common/config.cuh"
#include "params.cuh"
#include "route/error.cuh"

namespace sparge::route {

SPARGE_CHECK_PARAMS(RouteParams);

}  // namespace sparge::route

// Dynamic shared memory: rows_per_cta x key_blocks scores, and as much again where heads may rank by error.
extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::route::kThreads, 0};

// Grid: (batch, head) x groups of rows_per_cta query blocks, groups fastest.
extern "C" __global__ void __launch_bounds__(sparge::route::kThreads, sparge::route::kBlocksPerSm)
    route(const __grid_constant__ sparge::RouteParams p) {
  using namespace sparge;
  __shared__ route::RowVectors q_mean;
  __shared__ route::ErrorSmem error;
  extern __shared__ float scores[];
  const Problem& problem = p.problem;
  const i32 query_blocks = problem.query_blocks(), key_blocks = problem.key_blocks();
  const i32 groups = ceil_div(query_blocks, p.rows_per_cta);
  const i32 first = (blockIdx.x % groups) * p.rows_per_cta;
  const i32 rows = smaller(p.rows_per_cta, query_blocks - first);
  const i64 head_at = blockIdx.x / groups;
  const i32 b = head_at / problem.heads, head = head_at % problem.heads;
  const i64 kv_at = static_cast<i64>(b) * problem.kv_heads + problem.kv_head(head);
  const i32 warp = threadIdx.x / kWarpSize;
  const route::Row row(p, b, head, first + smaller(warp, rows - 1));
  const route::Rules rules(p, row, kv_at);

  if (p.select != Select::kMask) {
    route::load_means(q_mean, p, head_at * query_blocks + first, rows);
    route::score_mass(p, q_mean, scores, kv_at, rows);
    if (p.k_variance && p.thresholds && p.thresholds[head].router > 0.0f)
      route::score_error(p, q_mean, error, scores, scores + rows * key_blocks, kv_at, rows, rules);
    __syncthreads();
    route::make_sortable(scores, rows, key_blocks);
    __syncthreads();
  }
  if (warp >= rows) return;
  if (p.select == Select::kMask)
    route::map_from_mask(p, row, rules);
  else
    route::map_from_scores(p, row, rules, reinterpret_cast<u32*>(scores) + warp * key_blocks);
}
