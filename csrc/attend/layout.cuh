// SPDX-License-Identifier: Apache-2.0
// Shape of the work of one thread block, and its shared memory.
#pragma once

#include "../common/config.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/special.cuh"
#include "row_scale.cuh"
#include "work.cuh"

namespace sparge::attend {

// Four warps of 32 query rows: a warp reads every K and V byte of a tile for its rows, and with 16 rows those reads would outlast
// the products (docs/experiments.md, "Rows of a warp").
// Emulated E4M3 products convert their operands in registers: half the rows leave room for that.
constexpr bool kEmulated = kElement == Element::kInt8E4M3 && kArch == 90;
constexpr int kWarps = kEmulated ? 8 : 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kWarpRows = kQueryBlock / kWarps;
constexpr int kRowTiles = kWarpRows / 16;
constexpr int kKeyTiles = kKeyBlock / 8;
constexpr int kChannelTiles = kHeadDim / 8;

// 255 registers a thread at head_dim 128 (128 accumulators, 64 scores), 168 at 64.
constexpr int kBlocksPerSm = kEmulated ? 1 : kHeadDim == 128 ? 2 : 3;

constexpr int kQueryRowBytes = kHeadDim * key_bytes(kElement);
constexpr int kValueRowBytes = kKeyBlock * value_bytes(kElement);
constexpr int kQueryTileBytes = kQueryBlock * kQueryRowBytes;
constexpr int kKeyTileBytes = kKeyBlock * kQueryRowBytes;
constexpr int kValueTileBytes = kHeadDim * kValueRowBytes;

// Shared memory of an SM: 228 KB on 9.0 and 10.0, 164 KB on 8.0, 100 KB on 8.6, 8.9 and 12.0. A block may have 1 KB
// less than that, and each resident block costs 1 KB. sm_80 code also runs on 8.6-class parts: 99 KB a block is its cap.
constexpr int kSmBytes = (kArch == 90 || kArch == 100 ? 228 : kArch == 80 ? 164 : 100) * 1024;
constexpr int kMapBytes = 512;       // room for the block map of a row: 4,096 key blocks at full occupancy
constexpr int kRowBytes = 6 * 1024;  // of Smem besides the tiles, at most
constexpr int kBudget = kSmBytes / kBlocksPerSm - 1024 - kMapBytes - kRowBytes;
constexpr int kColumnBytes = kKeyBlock * sizeof(PoolColumn);
constexpr int kStageBytes = kKeyTileBytes + kValueTileBytes + kColumnBytes;
constexpr bool fits(int stages) { return kQueryTileBytes + stages * kStageBytes <= kBudget; }
constexpr int kStages = fits(3) ? 3 : fits(2) ? 2 : 1;

constexpr int kRowGroup = 64;  // query rows that skip a block's PV together
constexpr int kRowGroupThreads = kRowGroup / kWarpRows * kWarpSize;
constexpr int kRowGroups = kQueryBlock / kRowGroup;

// What travels with the tiles of a pipeline stage.
struct alignas(16) Stage {
  float k_scale;
  i32 keys;   // that the block really has; -1: pooled keys
  i32 place;  // in the list (block_list.cuh); end_of_list or more: it has ended
};

struct alignas(256) Smem {  // tiles start at multiples of their row size
  // INT8: max |q| / 127 of each row, then the factors on rows' maxima (row_scale.cuh). First and in one array: where shared
  // memory starts at a run-time address (sm_90 and up), an array further back that a row indexes would keep its address in a
  // register across the main loop.
  float q_scale[2 * kQueryBlock];
  u8 q[kQueryTileBytes];
  u8 k[kStages][kKeyTileBytes];
  u8 v[kStages][kValueTileBytes];
  // For each thread's four rows: the main loop has no register to spare, and compiler spills would cost more.
  float row_max[kRowTiles][2][kThreads];  // log2 units
  float row_sum[kRowTiles][2][kThreads];  // the thread's own columns
  float q_dot_mean[kQueryBlock];          // q . k_mean, for the log-sum-exp
  Stage stage[kStages];
  PoolColumn columns[kStages][kKeyBlock];
  u32 skipped_pairs[kRowGroups];                // by the PV filter, of each row group
  float inverse_output_scale;                       // see output_scale.cuh
  ScaleBounds bounds;                           // see row_scale.cuh
  Work work;                                    // here, because the main loop has no register to spare for it
  i32 first_pool_place, end_of_list, poolable;  // likewise; see block_list.cuh, Work::poolable
};
static_assert(sizeof(Smem) - kQueryTileBytes - kStages * kStageBytes <= kRowBytes,
              "kRowBytes must cover what Smem holds besides the stages");
static_assert(sizeof(Smem) <= 99 * 1024 || kSmBytes > 164 * 1024, "a block of these GPUs has 99 KB of shared memory");

// Barrier 0 is __syncthreads; the two row groups vote apart.
enum NamedBarrier { kBarrierUpperRows = 1, kBarrierLowerRows = 2 };
static_assert(kRowGroups == 2, "each row group has a named barrier");

// First of the four rows of the block whose scores a thread holds, and how far the others are from it: row tile m, upper or lower
// half of the tile. Computed where it is used: kept across the main loop, it would be spilled.
SPARGE_DEVICE i32 first_row() {
  const i32 thread = ptx::thread_index();
  return thread / kWarpSize * kWarpRows + thread % kWarpSize / 4;
}
SPARGE_DEVICE constexpr i32 row_step(i32 m, i32 half) { return 16 * m + 8 * half; }

}  // namespace sparge::attend
