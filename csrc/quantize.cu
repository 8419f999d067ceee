// SPDX-License-Identifier: Apache-2.0
// Launch 2: K and V as contiguous, padded, pre-swizzled tiles, and the block statistics that route reads.
//
// Semantics   K - mean in INT8, one scale per 64 keys; V - mean in FP16 or E4M3, one scale per channel, transposed;
//             16-bit elements copy K and V unchanged. Means and self-similarity from true token counts. Rows past
//             a head's last key are zero. A token order is followed where tokens are read: nothing is gathered first.
//             For budgets also the variance of K, mean and variance of V, and the means as tiles of pseudo-keys.
// Layout      K tile 64 x head_dim, V tile head_dim x 64, 16-byte chunks swizzled (common/swizzle.cuh), so that a
//             tile is one contiguous copy for every reader. See params.cuh for the statistics.
// Strategy    One thread block a query, key or value block. Q is only averaged here: attend reads each query row
//             once and quantizes it in place, which saves the INT8 copy (a sixth of q+k+v) and its traffic.
#include "params.cuh"
#include "quantize/key_block.cuh"
#include "quantize/query_block.cuh"
#include "quantize/value_block.cuh"

namespace sparge::quantize {

SPARGE_CHECK_PARAMS(QuantizeParams);

union Smem {
  SumsSmem query;
  KeySmem key;
  ValueSmem value;
};

}  // namespace sparge::quantize

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::quantize::kThreads, 0};

// Grid: key blocks of all (batch, kv head), then value blocks when with_values, then query blocks when with_queries.
extern "C" __global__ void __launch_bounds__(sparge::quantize::kThreads, sparge::quantize::kBlocksPerSm)
    quantize(const __grid_constant__ sparge::QuantizeParams p) {
  using namespace sparge;
  __shared__ quantize::Smem smem;
  const Problem& problem = p.problem;
  if constexpr (kArch == 90)  // the attend kernel with persistent blocks exists there
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.next_turn = 0;
  const i32 key_blocks = problem.key_blocks();
  const i32 kv_tiles = problem.batch * problem.kv_heads * key_blocks;  // 2^31 tiles are 16 TB of K
  i32 index = blockIdx.x;
  if (index < (p.with_values ? 2 : 1) * kv_tiles) {
    const bool values = index >= kv_tiles;
    if (values) index -= kv_tiles;
    const i32 block = index % key_blocks;
    const i32 head_at = index / key_blocks;
    const i32 head = head_at % problem.kv_heads, b = head_at / problem.kv_heads;
    const quantize::KeySlots slots(problem, b, head, block);
    with_rows(values ? p.v : p.k, b, head, problem.channels, [&](auto rows) {
      if (values)
        quantize::value_block(p, rows, smem.value, head_at, block, slots);
      else
        quantize::key_block(p, rows, smem.key, head_at, block, slots);
    });
  } else {
    index -= (p.with_values ? 2 : 1) * kv_tiles;
    const i32 query_blocks = problem.query_blocks();
    const i32 block = index % query_blocks;
    const i32 head_at = index / query_blocks;
    const i32 head = head_at % problem.heads;
    with_rows(p.q, head_at / problem.heads, head, problem.channels,
              [&](auto rows) { quantize::query_block(p, rows, smem.query, head, index, block); });
  }
}
