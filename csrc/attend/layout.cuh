// SPDX-License-Identifier: Apache-2.0
// Shape of the work of one thread block, and its shared memory.
#pragma once

#include "../common/config.cuh"
#include "../common/swizzle.cuh"
#include "../ptx/special.cuh"
#include "constants.cuh"
#include "row_scale.cuh"
#include "work.cuh"

namespace sparge::attend {

// Warps of 32 query rows: a warp reads every K and V byte of a tile for its rows, and with 16 rows those reads would outlast
// the products (docs/experiments.md, "Rows of a warp").
// Integer values at head_dim 128 take 16: each block's sums stand beside the accumulators, and with 32 rows ptxas spills.
// Emulated E4M3 products convert their operands in registers: 16 rows leave room for that.
constexpr bool kEmulated = kElement == Element::kInt8E4M3;
constexpr bool kFewRows = kIntegerValues && kHeadDim == 128;
constexpr int kRowTiles = kEmulated || kFewRows ? 1 : 2;
constexpr int kWarpRows = 16 * kRowTiles;
// Thread blocks that share a query block: 64 rows leave room for three of them on an SM.
constexpr int kParts = kFewRows ? 2 : 1;
constexpr int kRows = kQueryBlock / kParts;  // of a thread block
constexpr int kWarps = kRows / kWarpRows;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kKeyTiles = kKeyBlock / 8;
constexpr int kChannelTiles = kHeadDim / 8;
// 16 rows a warp leave registers for the fragments of Q, for the rows' scales, maxima and sums, and for addresses.
constexpr bool kQueriesInRegisters = kFewRows, kRowsInRegisters = kFewRows;
// Not on sm_90a, which runs this for tests alone, with more stages.
constexpr bool kAddressesInRegisters = kFewRows && kArch != 90;

// 255 registers a thread at head_dim 128 (128 accumulators, 64 scores), 168 at 64, and where rows are few.
constexpr int kBlocksPerSm = kEmulated ? 1 : kHeadDim == 128 && !kFewRows ? 2 : 3;

constexpr int kQueryRowBytes = kHeadDim * key_bytes(kElement);
constexpr int kValueRowBytes = kKeyBlock * value_bytes(kElement);
constexpr int kQueryTileBytes = kRows * kQueryRowBytes;
constexpr int kKeyTileBytes = kKeyBlock * kQueryRowBytes;
constexpr int kValueTileBytes = kHeadDim * kValueRowBytes;

// Shared memory of an SM: 228 KB on 9.0 and 10.0, 164 KB on 8.0, 100 KB on 8.6, 8.9 and 12.0. A block may have 1 KB
// less than that, and each resident block costs 1 KB. Kernels for sm_80 keep to 99 KB a block: more was not measured.
constexpr int kSmBytes = (kArch == 90 || kArch == 100 ? 228 : kArch == 80 ? 164 : 100) * 1024;
constexpr int kMapBytes = 512;                             // room for the block map of a row: 4,096 key blocks at full occupancy
constexpr int kRowBytes = kFewRows ? 3 * 1024 : 6 * 1024;  // of Smem besides the stages, at most
constexpr int kBudget = kSmBytes / kBlocksPerSm - 1024 - kMapBytes - kRowBytes;
constexpr int kColumnBytes = kKeyBlock * (sizeof(PoolColumn) + (kIntegerValues ? sizeof(float) : 0));
constexpr int kStageBytes = kKeyTileBytes + kValueTileBytes + kColumnBytes;
constexpr bool fits(int stages) { return kQueryTileBytes + stages * kStageBytes <= kBudget; }
constexpr int kStages = fits(3) ? 3 : fits(2) ? 2 : 1;

constexpr int kRowGroup = 64;  // query rows that skip a block's PV together
constexpr int kRowGroupThreads = kRowGroup / kWarpRows * kWarpSize;
constexpr int kRowGroups = kRows / kRowGroup;

// What travels with the tiles of a pipeline stage.
struct alignas(16) Stage {
  float k_scale;
  float v_block_scale;  // integer values
  i32 keys;             // that the block really has; -1: pooled keys
};

// A number for each of a thread's rows. Of four rows, the main loop has no register to spare, and compiler spills would cost more.
using RowsSmem = float[kRowTiles][2][kRowsInRegisters ? 1 : kThreads];

template <bool kInRegisters>
struct RowNumbers {
  float (&x)[kRowTiles][2][kThreads];
  SPARGE_DEVICE explicit RowNumbers(RowsSmem& shared) : x(shared) {}
  SPARGE_DEVICE float& at(i32 m, i32 half, i32 thread) const { return x[m][half][thread]; }
};
template <>
struct RowNumbers<true> {
  float x[kRowTiles][2];
  SPARGE_DEVICE explicit RowNumbers(RowsSmem&) {}
  SPARGE_DEVICE float& at(i32 m, i32 half, i32) { return x[m][half]; }
  SPARGE_DEVICE const float& at(i32 m, i32 half, i32) const { return x[m][half]; }
};

struct alignas(256) Smem {  // tiles start at multiples of their row size
  // INT8: max |q| / 127 of each row, then the factors on rows' maxima (row_scale.cuh). First and in one array: where shared
  // memory starts at a run-time address (sm_90 and up), an array further back that a row indexes would keep its address in a
  // register across the main loop.
  float q_scale[2 * kRows];
  u8 q[kQueryTileBytes];
  u8 k[kStages][kKeyTileBytes];
  u8 v[kStages][kValueTileBytes];
  RowsSmem row_max;         // log2 units
  RowsSmem row_sum;         // the thread's own columns
  float q_dot_mean[kRows];  // q . k_mean, for the log-sum-exp
  Stage stage[kStages];
  PoolColumn columns[kStages][kKeyBlock];
  float inverse_value_scale[kIntegerValues ? kStages : 1][kKeyBlock];  // of pooled keys
  u32 skipped_pairs[kRowGroups];                                       // by the PV filter, of each row group
  float inverse_output_scale;                                          // see output_scale.cuh
  ScaleBounds bounds;                                                  // see row_scale.cuh
  // Here, because the main loop has no register to spare for it. Aligned, so that the compiler's wide reads of it take in nothing
  // that a thread writes meanwhile.
  alignas(16) Work work;
  i32 first_pool_place, end_of_list, poolable;  // likewise; see block_list.cuh, Work::poolable
};
static_assert(sizeof(Smem) - kQueryTileBytes - kStages * kStageBytes <= kRowBytes,
              "kRowBytes must cover what Smem holds besides the stages");
static_assert(sizeof(Smem) <= 99 * 1024 || kSmBytes > 164 * 1024, "a block of these GPUs has 99 KB of shared memory");

// Barrier 0 is __syncthreads; the two row groups vote apart.
enum NamedBarrier { kBarrierUpperRows = 1, kBarrierLowerRows = 2 };
static_assert(kRowGroups <= 2, "each row group has a named barrier");

// First of the four rows of the block whose scores a thread holds, and how far the others are from it: row tile m, upper or lower
// half of the tile. Computed where it is used: kept across the main loop, it would be spilled.
SPARGE_DEVICE i32 first_row() {
  const i32 thread = ptx::thread_index();
  return thread / kWarpSize * kWarpRows + thread % kWarpSize / 4;
}
SPARGE_DEVICE constexpr i32 row_step(i32 m, i32 half) { return 16 * m + 8 * half; }

}  // namespace sparge::attend
