// SPDX-License-Identifier: Apache-2.0
// Shape of the work of one thread block, and its shared memory.
#pragma once

#include "../common/config.cuh"
#include "../common/swizzle.cuh"
#include "../params.cuh"

namespace sparge::attend {

// Four warps of 32 query rows: a warp reads every K and V byte of a tile for its rows, and with 16 rows those reads
// (1,536 clocks a 128 x 64 tile) would outlast the products (1,240 clocks on Hopper's mma.sync).
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryBlock / kWarps;
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kKeyTiles = kKeyBlock / 8;
constexpr int kChannelTiles = kHeadDim / 8;

// 255 registers a thread at head_dim 128 (128 accumulators, 64 scores), 168 at 64.
constexpr int kBlocksPerSm = kHeadDim == 128 ? 2 : 3;

constexpr int kQueryRowBytes = kHeadDim * key_bytes(kElement);
constexpr int kValueRowBytes = kKeyBlock * value_bytes(kElement);
constexpr int kQueryTileBytes = kQueryBlock * kQueryRowBytes;
constexpr int kKeyTileBytes = kKeyBlock * kQueryRowBytes;
constexpr int kValueTileBytes = kHeadDim * kValueRowBytes;

// Shared memory of an SM: 228 KB on 9.0 and 10.0, 164 KB on 8.0, 100 KB on 8.6, 8.9 and 12.0. A block may have 1 KB
// less than that, and each resident block costs 1 KB. sm_80 code also runs on 8.6-class parts: 99 KB a block is its cap.
constexpr int kSmBytes = (kArch == 90 || kArch == 100 || kArch == 103 ? 228 : kArch == 80 ? 164 : 100) * 1024;
constexpr int kMapBytes = 1024;  // room kept for the block map of a row: 8,192 key blocks
constexpr int kBudget = kSmBytes / kBlocksPerSm - 1024 - kMapBytes;
constexpr int tiles_bytes(int key_stages, int value_stages) {
  return kQueryTileBytes + key_stages * kKeyTileBytes + value_stages * kValueTileBytes + 2 * kQueryBlock * 4 + 256;
}
constexpr bool fits(int key_stages, int value_stages) { return tiles_bytes(key_stages, value_stages) <= kBudget; }
// One value stage costs a second barrier a block, but lets two thread blocks share a 100 KB SM.
constexpr int kValueStages = fits(3, 3) ? 3 : fits(2, 2) ? 2 : fits(2, 1) || !is_quantized(kElement) ? 1 : 2;
constexpr int kKeyStages = kValueStages == 1 ? 2 : kValueStages;

constexpr int kRowGroup = 64;  // query rows that skip a block's PV together
constexpr int kRowGroupThreads = kRowGroup / kWarpRows * kWarpSize;
constexpr int kRowGroups = kQueryBlock / kRowGroup;

// Which query block of which head this thread block serves: query blocks fastest, so that neighbours share K and V in
// L2. Kept in shared memory, because the main loop has no register to spare for it.
struct Work {
  i32 b, head, block, first_query, queries, key_length;
  i32 head_at, kv_at;  // of all (batch, head) and (batch, kv head)
  i32 first_tile;      // of this head: 2^31 tiles are 16 TB of K

  SPARGE_DEVICE void read(const Problem& problem) {
    const i32 query_blocks = problem.query_blocks();
    block = blockIdx.x % query_blocks;
    head_at = blockIdx.x / query_blocks;
    b = head_at / problem.heads;
    head = head_at % problem.heads;
    kv_at = b * problem.kv_heads + problem.kv_head(head);
    first_tile = kv_at * problem.key_blocks();
    first_query = block * kQueryBlock;
    queries = smaller(kQueryBlock, problem.queries - first_query);
    key_length = problem.key_length(b);
  }
};

struct alignas(256) Smem {  // tiles start at multiples of their row size
  u8 q[kQueryTileBytes];
  u8 k[kKeyStages][kKeyTileBytes];
  u8 v[kValueStages][kValueTileBytes];
  float q_scale[kQueryBlock];    // INT8: max |q| / 127 of the row
  float q_dot_mean[kQueryBlock]; // q . k_mean, for the log-sum-exp
  float k_scale[4];              // of the tile in each key stage
  i32 block[4];                  // key block in each stage
  u32 skipped_pairs[kRowGroups]; // by the PV filter, of each row group
  Work work;
};
static_assert(sizeof(Smem) <= 99 * 1024 || kSmBytes > 164 * 1024, "a block of these GPUs has 99 KB of shared memory");

enum NamedBarrier { kBarrierAll = 0, kBarrierFirstRowGroup = 1 };

// The four rows of the block whose scores a thread holds: tile (0, 1), upper or lower half of the tile.
SPARGE_DEVICE i32 row_of(i32 tile, i32 half) {
  return threadIdx.x / kWarpSize * kWarpRows + tile * 16 + half * 8 + threadIdx.x % kWarpSize / 4;
}

}  // namespace sparge::attend
