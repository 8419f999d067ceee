// SPDX-License-Identifier: Apache-2.0
// Launch 3: which key blocks each query block attends to.
//
// Semantics   score = mean(Q block) . mean(K block) * scale in float32 (the log of a block's mass), or by head the error
//             that pooling the block makes (route/error.cuh); blocks that fail the self-similarity gate, hold exact
//             tokens, the sink or the causal diagonal are forced; among the rest top-k or cumulative mass decides, ties to
//             the lower index. Or a caller's block mask is packed.
// Output      block_map, one bit a key block (a 1,861-block row takes 236 bytes where a uint16 list would take 3.7 KB),
//             counts, and the pair counters behind `density`.
// Strategy    A thread block scores up to 32 query blocks of one head together, on tensor cores (route/product.cuh), so each
//             K mean is read from the L2 once for all of them; then each warp selects for two. Scores live in shared
//             memory only.
// Tried       H200 in us, Mochi shape / with walks and half of the heads by error / CogVideoX-2B.
//             213 / 496 / 65 CUDA cores, 8 query blocks; a bisection over the bits of scores, 32 passes a row
//             198 / 449 / 63 three key blocks a thread share each read of the query means
//             121 / 343 / 38 rules once a thread block; the selection narrows by value (scores alone: 66)
//             118 / 353 / 41 16 query blocks a thread block
//             101 / 277 / 39 tensor cores, 32 query blocks (scores alone: 48)
//             112 / 332 / 41 tensor cores, 16 query blocks, two thread blocks an SM
// Untried     Block means as rows of head_dim: a lane's four channels in one load, and the next while this is multiplied.
//             Rules and ranks where a product ends, instead of a pass over the scores.
//             Steps of the selection as if scores were spread evenly; the last 32 ranks read four at a time.
//             As many query blocks a thread block as spread over all SMs in the last turn (CogVideoX-2B: 150 thread blocks).
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
  __shared__ route::Vectors vectors;  // query means, and what else is multiplied with every key block
  __shared__ float norm[route::kMaxRows];
  __shared__ u32 candidates[route::kWarps][kWarpSize];
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
  auto row = [&](i32 r) { return route::Row(p, b, head, first + r); };
  const route::Rules rules(p, b, head, kv_at);
  if (p.select == Select::kMask) {
    for (int r = warp; r < rows; r += route::kWarps) route::map_from_mask(p, row(r), rules);
    return;
  }
  route::load_means(vectors, p, head_at * query_blocks + first, rows);
  route::score_mass(p, vectors, scores, kv_at, rows);
  if (p.k_variance && p.thresholds && p.thresholds[head].router > 0.0f)
    route::score_error(p, vectors, norm, scores, scores + rows * key_blocks, head_at * query_blocks + first, kv_at, rows, rules,
                       row(0));
  __syncthreads();
  route::make_keys(p, rules, b, head, first, scores, rows);
  __syncthreads();
  for (int r = warp; r < rows; r += route::kWarps)
    route::map_from_keys(p, row(r), rules, reinterpret_cast<const u32*>(scores) + r * key_blocks, candidates[warp]);
}
