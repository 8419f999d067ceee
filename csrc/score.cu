// SPDX-License-Identifier: Apache-2.0
// Measurement: how far the outputs of every candidate density lie from exact attention, in measured query rows.
//
// Semantics   With the first buckets of key blocks exact and the others pooled, e is the output of the exact ones, p that of the
//             pooled ones, o the exact output of all, m the mean value of all keys. Found are
//               |e - o|^2, (e - o)(p - o), |p - o|^2 and the natural log of both sums' ratio, which serve every pool weight
//               (sparge/session/measure_kernels.py has the maths);
//               (e - o)(m - o), (p - o)(m - o) and |m - o|^2, for the output scale;
//               |o|^2.
//             A pooled key is a block's mean key, with the log of its keys as bias, and its mean value.
// Strategy    A thread block scores 16 rows of a query block, so each mean is read from the L2 once for all of them, and its rows
//             share one list of key blocks (score/buckets.cuh). Logits and weights stand in shared memory. All products with
//             means are on tensor cores. Buckets are summed from the densest on, so each block's value is multiplied once. The
//             sums of every density stay in shared memory until a warp a row scores them next to the exact parts.
//             A group of heads is at most one wave of thread blocks, so loads start before the products that need them.
#include "common/config.cuh"
#include "params.cuh"
#include "score/row.cuh"

namespace sparge::score {

SPARGE_CHECK_PARAMS(ScoreParams);

}  // namespace sparge::score

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::score::kThreads, 0};
extern "C" __device__ const sparge::ScoreSizes launch_sizes = {sparge::score::kMaxRows, sparge::score::kStep,
                                                               sizeof(sparge::score::Queries)};

// Grid: (batch, head), query block and groups of rows_per_cta rows, groups fastest.
extern "C" __global__ void __launch_bounds__(sparge::score::kThreads, sparge::score::kBlocksPerSm)
    score(const __grid_constant__ sparge::ScoreParams p) {
  using namespace sparge;
  __shared__ score::Buckets buckets;
  __shared__ score::Masses masses;
  extern __shared__ __align__(16) float dynamic[];
  __shared__ score::Place place;  // read anew after each barrier: registers are few
  const score::Shared shared(p, dynamic);
  const i32 warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) place = score::place_at(p, blockIdx.x);
  __syncthreads();
  score::load_queries(p, place, shared);
  score::list_buckets(p, place, shared, buckets);
  score::find_logits(p, place, shared, buckets.ends[0]);
  __syncthreads();
  for (i32 row = warp; row < place.rows; row += score::kWarps) score::weigh(p, shared, buckets, masses, row);
  __syncthreads();
  if (shared.alone)
    score::pool_values<true>(p, place, shared, buckets);
  else
    score::pool_values<false>(p, place, shared, buckets);
  __syncthreads();
  for (i32 row = warp; row < place.rows; row += score::kWarps) score::score_row(p, place, shared, masses, row);
}
