// SPDX-License-Identifier: Apache-2.0
// Launch 2: K and V as contiguous, padded, pre-swizzled tiles, and the block statistics that route reads.
//
// Semantics   K - mean in INT8, one scale per 64 keys; V - mean in FP16 or E4M3, one scale per channel, transposed;
//             16-bit elements copy K and V unchanged. Means and self-similarity from true token counts. Rows past
//             a head's last key are zero. A token order is followed where tokens are read: nothing is gathered first.
//             For budgets also the variance of K, mean and variance of V, and the means as tiles of pseudo-keys.
// Layout      K tile 64 x head_dim (16-bit rows cut in two on sm_90a, common/key_tile.cuh), V tile head_dim x 64, 16-byte
//             chunks swizzled (common/swizzle.cuh), so that a tile is one contiguous copy for every reader. See params.cuh for the statistics.
// Strategy    One thread block a query, key or value block; its loads are on their way before anything is waited for.
//             What only statistics need is finished by single warps at the end, each statistic by another, without
//             barriers. Self-similarities are left out where no threshold asks for them. Q is only averaged
//             here: attend reads each query row once and quantizes it in place, which saves the INT8 copy (a sixth of
//             q+k+v) and its traffic.
// Tried       H200 in us, Mochi shape / with walks and statistics / CogVideoX-2B; at 4.1 TB/s the first takes 268, the last 67.
//             529 / 707 / 168 loads inside the branches that know the tensor's type: one in flight a thread
//             418 / 609 / 139 four in flight
//             417 / 603 / 139 heads fastest, the last tokens first, which means read last
//             357 / 500 / 91  V transposed in words of four keys; 128 threads at head_dim 64; one barrier for all sums
//             314 / 454 / 84  selects instead of branches, approximate reciprocals, unsigned divisions
//             324 / 408 / 85  statistics by single warps after the tile: kept, as budgets are the rule
//             320 / 376 / 85  block statistics as rows of head_dim instead of columns: written in whole sectors
//             From here on with events between the launches, which adds some us; last CogVideoX-2B with walks and statistics.
//             330 / 398 / 86 / 104 the last of these
//               - / 372 /  - / 99  no self-similarities where no threshold asks for them
//               - / 356 /  - / 94  values by one fused multiplication, their addresses by one operation a channel, blocks that
//                                  are not full apart; one multiplication and one addition an address, no division
//             310 / 353 / 82 / 93  each statistic by a warp of its own, the scale of V in shared memory, eight loads of Q in
//                                  flight, lanes that keep a share of the sums
//             Launched before means has ended (programmatic dependent launch), query blocks first: a call gains 14 to 17 us at
//             CogVideoX-2B, 9 of them without that order, and at most 30 at Mochi; not worth a launch path of its own.
// Untried     A thread block takes four blocks in turn, the next on its way to shared memory (64 registers hold it on sm_90a
//             only).
//             Sums of Q by the tensor cores (a product with ones, pairs of tokens from PRMT): 48 instructions for 128.
//             Division by the number of heads as a multiplication by what the host passes.
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

// Without a division in the usual case.
SPARGE_DEVICE i32 batch_of(i32 head_at, i32 batch, i32 heads) {
  return batch == 1 ? 0 : static_cast<u32>(head_at) / static_cast<u32>(heads);
}

}  // namespace sparge::quantize

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::quantize::kThreads, 0};

// Grid: key and (with_values) value blocks by turns, then query blocks when with_queries; (batch, head) fastest.
extern "C" __global__ void __launch_bounds__(sparge::quantize::kThreads, sparge::quantize::kBlocksPerSm)
    quantize(const __grid_constant__ sparge::QuantizeParams p) {
  using namespace sparge;
  __shared__ quantize::Smem smem;
  const Problem& problem = p.problem;
  if constexpr (kArch == 90)  // the attend kernel with persistent blocks exists there
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.next_turn = 0;
  const u32 key_blocks = problem.key_blocks();
  // Heads fastest, the last tokens first: neighbours run at the same time, and what means read last is still in the L2.
  u32 index = blockIdx.x;
  const u32 tensors = p.with_values ? 2 : 1, kv_heads = problem.batch * problem.kv_heads;
  const u32 kv_tiles = tensors * kv_heads * key_blocks;  // 2^31 tiles are 16 TB of K
  if (index < kv_tiles) {
    const u32 turn = index / kv_heads;
    const i32 head_at = index - turn * kv_heads;
    const bool values = p.with_values && turn % 2 == 1;
    const i32 block = key_blocks - 1 - turn / tensors;
    const i32 b = quantize::batch_of(head_at, problem.batch, problem.kv_heads), head = head_at - b * problem.kv_heads;
    const quantize::KeySlots slots(problem, b, head, block);
    with_chunks(values ? p.v : p.k, b, head, problem.channels, [&](auto rows) {
      if (values)
        quantize::value_block(p, rows, smem.value, head_at, block, slots);
      else
        quantize::key_block(p, rows, smem.key, head_at, block, slots);
    });
  } else {
    index -= kv_tiles;
    const u32 heads = problem.batch * problem.heads;
    const i32 block = index / heads, head_at = index - block * heads;
    const i32 b = quantize::batch_of(head_at, problem.batch, problem.heads), head = head_at - b * problem.heads;
    with_chunks(p.q, b, head, problem.channels, [&](auto rows) {
      quantize::query_block(p, rows, smem.query, head, head_at * problem.query_blocks() + block, block);
    });
  }
}
