// SPDX-License-Identifier: Apache-2.0
// Shape of the work of one thread block of the sm_90a attend kernels, and its shared memory: 8-bit and 16-bit.
#pragma once

#include "../../common/chunks.cuh"
#include "../../common/key_tile.cuh"
#include "../row_scale.cuh"
#include "../store.cuh"

namespace sparge::hopper {

using attend::Work;

// Warpgroups 0 and 1 compute 64 query rows each. In the third one warp fills the pipeline, the others read queries.
enum WarpgroupRole { kUpperRows = 0, kLowerRows = 1, kProducer = 2 };
constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = kGroupThreads / kWarpSize;
constexpr int kConsumerGroups = 2;
constexpr int kThreads = (kConsumerGroups + 1) * kGroupThreads;
constexpr int kGroupRows = 64;
static_assert(kGroupRows * kConsumerGroups == kQueryBlock, "the consumer warpgroups share one list");

constexpr bool kSixteenBits = !is_quantized(kElement);

// Two key blocks a step: E4M3 sums are promoted to float32 once a step, after 128 keys; a 16-bit product takes 128 keys at once.
constexpr int kStepPseudoKeys = kStepBlocks * kKeyBlock;
constexpr int kKeyTiles = kKeyBlock / 8;
constexpr int kChannelTiles = kHeadDim / 8;
constexpr int kScores = 4 * kKeyTiles;  // of a key block in a thread
constexpr int kSums = 4 * kChannelTiles;
constexpr int kOnesChannels = kSixteenBits ? 0 : 8;  // as few as a product may have
constexpr int kValueSums = kSums + kOnesChannels / 2;
constexpr int kProductBytes = 32;  // of a row that one product takes
constexpr int kQuerySteps = kKeyRowBytes / kProductBytes;
constexpr int kValueRowBytes = kKeyBlock * value_bytes(kElement);
constexpr int kBlockValueSteps = kValueRowBytes / kProductBytes;
constexpr int kValueSteps = kStepBlocks * kBlockValueSteps;

constexpr int kSwizzleBytes = 1024;                   // period of the tensor cores' swizzle
constexpr int kTileBytes = kKeyBlock * kKeyRowBytes;  // of K and of V
static_assert(key_bytes(kElement) == value_bytes(kElement), "K and V tiles have one size");
constexpr int kKeyPartBytes = kTileBytes / kKeyParts;
constexpr int kStepBytes = 2 * kStepBlocks * kTileBytes;
constexpr int kQueryTileBytes = kGroupRows * kKeyRowBytes;
constexpr int kItems = 2;  // work items whose queries are in shared memory: one at work, one that is being read
constexpr int kFeederWarps = kGroupWarps - 1;
constexpr int kFeederThreads = kFeederWarps * kWarpSize;
static_assert(kStepBlocks == 2, "the producer pairs blocks, and a vote has two bits");

// Parts of a stage that arrive and are given back each by itself. 16-bit tiles leave room for two stages at head_dim 128, so
// copies of K of a step must start while V of the step two before is still in use.
constexpr int kTransfers = kSixteenBits ? 2 : 1;
constexpr int kTransferBytes = kStepBytes / kTransfers;
enum Transfer { kKeys = 0, kValues = kTransfers - 1 };

// Registers a thread of 65,536 / 384: the producer lends the consumers what it does not need.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
static_assert(kGroupThreads * (kProducerRegisters + kConsumerGroups * kConsumerRegisters) <= 65536 / kThreads / 8 * 8 * kThreads,
              "a claim beyond what the launch allots (65,536 / kThreads, down to a multiple of 8) waits for ever");

// What the main loop reads of every step.
struct alignas(16) Head {
  float k_scale[kStepBlocks];  // times a query's scale: factor from sums of products of levels to log2 units
  i32 masked;                  // some of its pairs do not exist, or it is pooled
  i32 last;                    // it is the last one of its work item
};
static_assert(sizeof(Head) == 16, "the consumers read it by one load");

// What the consumers must know about a pipeline step. They read the rest where it lies: they have no registers for it.
struct Step {
  Head head;
  i32 item;                // number of the work item; -1: there is no more
  i32 block[kStepBlocks];  // [0] = -1: the item's list is empty; [1] = -1: only one block
  i32 keys[kStepBlocks];   // that the blocks really have
  float pvthreshd;
  i32 first_query;
  i32 pooled;  // pooled keys of 128 blocks, instead of keys
};

// V with eight more channels of ones, which bulk copies leave alone: the products of values also sum the rows of P.
struct ValueTileAndOnes {
  static constexpr int kOnesBytes = 8 * kKeyBlock;
  u8 v[kTileBytes];
  u8 ones[kOnesBytes];
  u8 unused[kSwizzleBytes - kOnesBytes];
};

struct PlainValueTile {
  u8 v[kTileBytes];
};

template <bool kPlain>
struct ValueTileOf {
  using Type = ValueTileAndOnes;
};
template <>
struct ValueTileOf<true> {
  using Type = PlainValueTile;
};
using ValueTile = ValueTileOf<kSixteenBits>::Type;

// All that belongs to a stage, so that one address leads to it.
struct alignas(kSwizzleBytes) Stage {
  u8 k[kKeyParts][kStepBlocks][kKeyPartBytes];
  ValueTile v[kStepBlocks];
  PoolColumn columns[kStepPseudoKeys];
  Step step;
  u32 votes[kConsumerGroups][kGroupWarps];  // a bit a block: the PV filter may leave it out
  // full: an arrival of each producer lane, and the bytes. free: one of each consumer thread. The ring's parity starts at 0, so a
  // fresh `free` counts as completed.
  u64 full[kTransfers], free[kTransfers];
  const u8* values[kStepBlocks];  // source of V, where it arrives by itself; [0] null: there is none
};

// All that consumers need of a work item and its 128 query rows, in the order of the block. 16-bit operands have no scales and
// no means, 8-bit ones no `zero_if_finite`: nobody writes or reads them.
struct Queries {
  Work work;
  i32 item;                      // number of the work item; -1: there is no more, and nothing else is set
  float scale[kQueryBlock];      // INT8 level of each row, bounded
  float sharpness[kQueryBlock];  // see attend/row_scale.cuh
  float dot_mean[kQueryBlock];   // q . k_mean, for the log-sum-exp
  float row_sum_factor;          // see attend/output_scale.cuh
  float zero_if_finite;          // 16 bits: NaN where a key or a value of the head is not finite
  i32 token[kQueryBlock];        // -1: none
  alignas(16) float v_mean[kHeadDim], v_scale[kHeadDim];
  // Arrivals at asked: the feeder's first thread, once `work` is there; at ready: each feeder thread; at free: each consumer
  // thread. The parity starts at 0, as in the ring of stages.
  u64 asked, ready, free;

  SPARGE_DEVICE attend::Value value(i32 channel) const {
    attend::Value value;
    if constexpr (!kSixteenBits) value.mean = v_mean[channel], value.scale = v_scale[channel];
    return value;
  }
  SPARGE_DEVICE float inverse_output_scale() const { return kSixteenBits ? 1.0f : row_sum_factor; }
  SPARGE_DEVICE attend::QueryFacts facts(i32 row) const {
    if constexpr (kSixteenBits) return {};
    return {dot_mean[row], sharpness[row]};
  }
};

// Where the lanes of a warp exchange what they store: eight rows of four channel tiles, of 16 bits. The rows of the fragments'
// two halves alternate between two buffers, so that one __syncwarp an exchange is enough.
struct alignas(16) Exchange {
  static constexpr u32 kTiles = 4, kRows = 8, kRowBytes = 16;
  u8 half[2][kTiles * kRows * kRowBytes];

  // Eight lanes touch all banks at once, when they write the rows of a tile and when they read two rows of all tiles.
  SPARGE_DEVICE static u32 offset(u32 tile, u32 row) { return (tile * kRows + (row + 2 * tile) % kRows) * kRowBytes; }
};

constexpr int kConsumerWarps = kConsumerGroups * kGroupWarps;
// Query rows as the tensor holds them, on their way to INT8. Eight lanes that read their shares of two rows touch all banks at
// once, as rows are a share longer. Nobody uses the row, and the balance, that 16 bits have.
constexpr int kRawRows = kSixteenBits ? 1 : kQueryBlock;
constexpr int kBalances = kSixteenBits ? 1 : kFeederWarps;
constexpr int kRowChunks = kHeadDim / kLaneChannels;
constexpr int kShare = 4;  // lanes that quantize a row
using RawRows = Chunk[kRawRows][kRowChunks + kShare];
using Balances = float[kBalances][kHeadDim];  // of the head, where it is balanced: each feeder warp fills and reads its own

static_assert(sizeof(ValueTile) % kSwizzleBytes == 0 && sizeof(Stage) % kSwizzleBytes == 0, "tiles begin where the swizzle does");
// More hide no more latency. At head_dim 128 no more fit.
constexpr int kMostStages = kHeadDim == 64 ? 8 : 3;
// Room for stages: shared memory less all else that Smem holds.
constexpr int kStageBytes = 227 * 1024 - 1024 - kItems * (kConsumerGroups * kQueryTileBytes + sizeof(Queries)) -
                            kConsumerWarps * sizeof(Exchange) - sizeof(RawRows) - sizeof(Balances);
constexpr int kStages = kStageBytes / sizeof(Stage) < kMostStages ? kStageBytes / sizeof(Stage) : kMostStages;
static_assert(kSixteenBits || kStages == kMostStages, "what else takes shared memory must not cost a stage unnoticed");
static_assert(kStages >= 2, "a warpgroup waits for the step after the one it reads before it frees that");

struct alignas(kSwizzleBytes) Smem {
  u8 q[kItems][kConsumerGroups][kQueryTileBytes];
  Stage stage[kStages];
  Queries queries[kItems];
  Exchange exchange[kConsumerWarps];
  Vec16 score_zero;                    // kScoreZero four times
  u32 skipped_pairs[kConsumerGroups];  // by the PV filter
  u32 never_read;                      // see Consumer::settle
  RawRows raw;
  Balances balance;

  // Offset in bytes, so that the address of a stage takes an addition and no product.
  SPARGE_DEVICE Stage& stage_at(u32 offset) { return *reinterpret_cast<Stage*>(reinterpret_cast<u8*>(stage) + offset); }
};
static_assert(sizeof(Smem) <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");

// A value that is the same in all lanes. The shuffle tells the compiler so, which then branches for the whole warp and keeps
// addresses of stages in uniform registers.
SPARGE_DEVICE i32 uniform(i32 value) { return __shfl_sync(kFullWarp, value, 0); }

// A position in the ring of stages, as Smem::stage_at takes it, and the parity of the barriers' phase there.
struct Ring {
  static constexpr u32 kLast = (kStages - 1) * sizeof(Stage);
  u32 at = 0;
  u32 parity = 0;

  SPARGE_DEVICE void advance() {
    const bool last = at == kLast;
    at = uniform(last ? 0 : at + sizeof(Stage));
    parity ^= last;
  }

  SPARGE_DEVICE u32 before() const { return at == 0 ? kLast : at - sizeof(Stage); }
  SPARGE_DEVICE u32 parity_before() const { return at == 0 ? parity ^ 1 : parity; }
};

// Which of the two work items' queries, and the parity of their barriers' phase.
struct ItemSlot {
  u32 count = 0;

  SPARGE_DEVICE u32 place() const { return count % kItems; }
  SPARGE_DEVICE u32 parity() const { return count / kItems % 2; }
};

}  // namespace sparge::hopper
