// SPDX-License-Identifier: Apache-2.0
// Launch 3: which key blocks each query block attends to.
//
// Semantics   score = mean(Q block) . mean(K block) * scale in float32 (the log of a block's mass), or by head the error that
//             pooling the block makes (route/error.cuh). Forced are blocks that fail the self-similarity gate or hold exact
//             tokens, the sink or the causal diagonal. Among the rest top-k or cumulative mass decides, ties to the lower index.
//             Or a caller's block mask is packed, and what is exact. Heads that ask for as many blocks as there are score nothing.
// Output      block_map, one bit a key block (a 1,861-block row takes 236 bytes where a uint16 list would take 3.7 KB),
//             and the pair counters behind `density`.
// Strategy    A thread block scores 16 query blocks of one head together, on tensor cores (route/product.cuh), so each K mean is
//             read from the L2 once for all of them. Then each warp selects for one. Scores live in shared memory only.
//             Vectors lie in the order of the products' first operand, and two tiles of columns share each read of them.
//             Every phase waits for latencies. So an SM has 32 warps, what is needed once is noted in shared memory, and loads
//             start early. Heads ranked by error start first, as they take longest (route/place.cuh).
// Tried       docs/experiments.md, "Route".
#include "common/config.cuh"
#include "params.cuh"
#include "route/error.cuh"
#include "route/place.cuh"

namespace sparge::route {

SPARGE_CHECK_PARAMS(RouteParams);

}  // namespace sparge::route

// Dynamic shared memory: where heads may rank by error, spare room of rows_per_cta x score_pitch numbers or of Sums, whichever is
// more; then rows_per_cta x score_pitch scores; then a byte for each key block.
extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::route::kThreads, 0};
extern "C" __device__ const sparge::RouteSizes launch_sizes = {sparge::route::kMaxRows, sparge::route::kKeyStep,
                                                               sizeof(sparge::route::Sums)};

// Grid: (batch, head) x groups of rows_per_cta query blocks, groups fastest, heads in the order of route/place.cuh.
extern "C" __global__ void __launch_bounds__(sparge::route::kThreads, sparge::route::kBlocksPerSm)
    route(const __grid_constant__ sparge::RouteParams p) {
  using namespace sparge;
  __shared__ route::Vectors vectors;  // query means, and what else is multiplied with every key block
  __shared__ route::Place place;
  __shared__ float norm[route::kMaxRows];
  __shared__ bool dense[route::kMaxRows];
  __shared__ i32 seen[route::kMaxRows];
  __shared__ u32 candidates[route::kWarps][kWarpSize];
  extern __shared__ __align__(16) float spare[];
  const Problem& problem = p.problem;
  const i32 query_blocks = problem.query_blocks(), key_blocks = problem.key_blocks();
  const i32 groups = ceil_div(query_blocks, p.rows_per_cta);
  const i32 warp = threadIdx.x / kWarpSize;
  if (warp == 0) place = route::place_at(p, blockIdx.x / groups, blockIdx.x % groups * p.rows_per_cta);
  __syncthreads();
  // Read anew after each barrier: registers are few.
  const i32 &b = place.b, &head = place.head, &first = place.first, &rows = place.rows, &head_at = place.head_at,
            &kv_at = place.kv_at;
  auto rules = [&] { return route::Rules(p, b, head, kv_at); };
  auto row = [&](i32 r) { return route::Row(p, b, head, first + r); };
  if (route::scores_nothing(p, head)) {
    for (int r = warp; r < rows; r += route::kWarps) route::map_without_scores(p, row(r), rules());
    return;
  }
  const i32 score_numbers = p.rows_per_cta * p.score_pitch;
  float* scores = p.k_variance ? spare + larger<i32>(score_numbers, sizeof(route::Sums) / sizeof(float)) : spare;
  u8* standing = reinterpret_cast<u8*>(scores + score_numbers);
  route::load_means(vectors, p, static_cast<i64>(head_at) * query_blocks + first, rows);
  route::note_standing(standing, rules(), key_blocks);
  if (warp < rows) dense[warp] = rules().dense(row(warp)), seen[warp] = row(warp).seen;
  __syncthreads();
  route::score_mass(p, vectors, scores, standing, kv_at, rows);
  if (p.k_variance && p.thresholds[head].router > 0.0f)
    route::score_error(p, vectors, norm, scores, spare, standing, place, seen);
  __syncthreads();
  if (warp < rows) route::map_from_scores(p, row(warp), dense[warp], scores + warp * p.score_pitch, standing, candidates[warp]);
}
