// SPDX-License-Identifier: Apache-2.0
// Every kernel's parameter block. sparge/kernels/params.py reads the structs: a field a line, of a scalar, a pointer, an array or
// a struct above. It passes sizeof as SPARGE_PARAMS_BYTES, and a test compares each offset.
#pragma once

#include "common/types.cuh"

namespace sparge {

// Logical (batch, head, token, channel) view of a caller's tensor; the last dimension is contiguous.
// Strides count elements. `vectorized`: every row starts at a multiple of 16 bytes.
struct TensorView {
  void* data;
  i64 batch_stride;
  i64 head_stride;
  i64 token_stride;
  DType dtype;
  i32 vectorized;
};

// Places in the counters, of query-key pairs and of pairs of a query block and a key block; sparge/stats.py reads them.
enum Counter { kKeptPairs = 0, kValidPairs = 1, kSkippedPairs = 2, kKeptBlocks = 3 };

// A head's row of `thresholds`; sparge/thresholds.py writes it.
struct HeadThresholds {
  float selection;  // share of the key blocks, or of the mass
  float simthreshd1;
  float pvthreshd;
  float log2_pool_weight;  // log2 of the pool weight; minus infinity: nothing is pooled
  float router;            // above 0: rank by the error that pooling a block makes
  float output_scale;      // output scale of query blocks that drop something (attend/output_scale.cuh); 1: none
};

// Sizes shared by all stages. key_lengths is (batch) or null; keys at and beyond it are never read.
//
// Blocks hold slots. Without a token order slot i is token i. With one (self-attention only) both sides have its slots, 64 a
// key block. Some are empty at segment ends; inside a key block the tokens come first.
struct Problem {
  const i32* key_lengths;
  const i32*
      slot_token;  // (order kinds, slots), a row a token order: token in each slot, -1 where it is empty; null without an order
  const i32* slot_counts;      // (key_blocks): tokens in each 64 slots; null without an order
  const i32* head_order_kind;  // (heads): row of slot_token; null: row 0. Heads that share keys have the same row
  i32 batch;
  i32 heads;
  i32 kv_heads;
  i32 queries;  // slots
  i32 keys;     // slots
  i32 order_kinds;
  i32 channels;

  SPARGE_DEVICE i32 query_blocks() const { return ceil_div(queries, kQueryBlock); }
  SPARGE_DEVICE i32 key_blocks() const { return ceil_div(keys, kKeyBlock); }
  SPARGE_DEVICE i32 map_words() const { return ceil_div(key_blocks(), kMapBits); }
  SPARGE_DEVICE i32 kv_head(i32 head) const { return head / (heads / kv_heads); }
  SPARGE_DEVICE i32 pool_tiles() const { return ceil_div(key_blocks(), kKeyBlock); }
  // Tokens among the 64 query slots from `slot` on.
  SPARGE_DEVICE i32 rows_from(i32 slot) const {
    if (slot_counts) return slot < queries ? slot_counts[slot / kKeyBlock] : 0;
    return larger(0, smaller(kKeyBlock, queries - slot));
  }
  // Where the token order of the heads that read these keys starts in slot_token. All token orders have as many blocks. The
  // caller's values are unchecked: one past the last row means the last row.
  SPARGE_DEVICE i32 order_start(i32 kv) const {
    return head_order_kind ? larger(0, smaller(head_order_kind[kv * (heads / kv_heads)], order_kinds - 1)) * keys : 0;
  }
  // -1: the query slot holds none.
  SPARGE_DEVICE i32 query_token(i32 start, i32 slot) const {
    if (slot >= queries) return -1;
    return slot_token ? slot_token[start + slot] : slot;
  }
  // -1: the key slot holds none before `length`.
  SPARGE_DEVICE i32 key_token(i32 start, i32 slot, i32 length) const {
    const i32 token = slot_token ? slot_token[start + slot] : slot;
    return token < length ? token : -1;
  }
  SPARGE_DEVICE i32 key_length(i32 b) const { return key_lengths ? larger(0, smaller(keys, key_lengths[b])) : keys; }
};

// k_mean, v_mean, v_scale, k_extent: (batch, kv_heads, head_dim) float32.
struct MeansParams {
  Problem problem;
  TensorView k;
  TensorView v;
  float* k_mean;
  float* v_mean;
  float* v_scale;
  float* k_extent;  // largest |K - k_mean| of each channel, over the keys that count in the mean
  u32* reach;       // (batch, kv_heads), set to zero; may be null
  i32 smooth_k;
  i32 k_stride;  // one in k_stride runs of 64 keys, from the first on, counts in the mean of K
};

// What turns the products with a pooled key into logits.
struct PoolColumn {
  float scale;  // INT8 scale of its row
  float bias;   // log2 of the number of keys that it stands for
};

struct QuantizeParams {
  Problem problem;
  TensorView q;
  TensorView k;
  TensorView v;
  const float* k_mean;
  const float* v_mean;
  const float* v_scale;
  const float* k_extent;
  float* balance;        // (batch, kv_heads, head_dim), 8 bits: factor of each channel of Q, or 0 (common/balance.cuh)
  u8* k_tiles;           // (batch, kv_heads, key_blocks) tiles of 64 keys x head_dim
  u8* v_tiles;           // (batch, kv_heads, key_blocks) tiles of head_dim x 64 keys
  float* k_scale;        // (batch, kv_heads, key_blocks)
  float* v_block_scale;  // likewise, factors on v_scale; only INT8 values have them
  i32* key_counts;       // (batch, kv_heads, key_blocks): keys that the block really has
  float* q_block_mean;   // (batch, heads, query_blocks, head_dim)
  float* k_block_mean;   // (batch, kv_heads, key_blocks, head_dim)
  float* q_similarity;   // (batch, heads, query_blocks)
  float* k_similarity;   // (batch, kv_heads, key_blocks)
  i32* next_item;        // set to zero where attend has persistent blocks
  u32* reach;  // (batch, kv_heads), 8 bits: bits of the largest number of K's tiles; NaN where a key or value is not finite
  u8* finite;  // (batch, kv_heads, 2, key_blocks), 16 bits, keys, then values: 0 where one is not finite, or a hole is
  // What head settings need: all of these or none. Means and variances are around k_mean and v_mean, over true counts.
  u16* k_variance;           // (batch, kv_heads, key_blocks, head_dim) bf16, as route reads it for every 16 query blocks
  u16* v_block_mean;         // likewise
  float* v_variance;         // (batch, kv_heads, key_blocks): summed over channels
  float* v_square;           // (batch, kv_heads, key_blocks): of v_block_mean, summed over channels
  u8* pool_k;                // (batch, kv_heads, pool_tiles): tiles like k_tiles whose rows are the means of 64 key blocks
  u8* pool_v;                // likewise, columns as in v_tiles
  PoolColumn* pool_columns;  // (batch, kv_heads, pool_tiles * 64)
  float* pool_value_scale;   // likewise, INT8 values only
  i32 with_queries;
  i32 with_similarity;  // else similarities are 1, or NaN where a block's mean is no number, as a threshold below 0 asks
  i32 key_run;          // key or value blocks of a head that a thread block takes
  i32 key_runs;         // such runs in a head
  i32 query_run;        // query blocks that a thread block takes
};

enum class Select : i32 { kTopK = 0, kCdf = 1, kMask = 2 };

struct RouteParams {
  Problem problem;
  const float* q_block_mean;
  const float* k_block_mean;
  const float* q_similarity;
  const float* k_similarity;
  const u8* block_mask;  // Select::kMask, else null: (batch, heads, query_blocks, key_blocks), any strides
  i64 mask_stride[4];
  const HeadThresholds* thresholds;  // (heads); null: the scalars below, nothing pooled, ranked by mass
  const i32* key_counts;
  const u8* keys_exact;     // (key_blocks) of a token order; null without one: exact_prefix and exact_suffix count then
  const u8* queries_exact;  // (query_blocks) likewise
  const u16* k_variance;    // null: every head ranks by mass
  const u16* v_block_mean;
  const float* v_variance;
  const float* v_square;
  u32* block_map;  // (batch, heads, query_blocks, map_words): bit j of word w keeps key block 32 w + j
  u64* counters;   // by Counter; may be null
  float cdfthreshd;
  float simthreshd1;
  float score_scale;
  Select select;
  i32 upstream;     // upstream's semantics, for calls without token order and head settings. Else a block's mass counts its keys,
                    // and top-k keeps as many more blocks as make whole steps of attend
  i32 topk_blocks;  // the host's max(1, int(topk * key_blocks)), where double precision settles the product
  i32 exact_prefix;
  i32 exact_suffix;
  i32 causal;
  i32 attention_sink;
  i32 keep_diagonal;
  i32 rows_per_cta;  // query blocks that share a thread block: as many as have room for their scores
  i32 score_pitch;   // numbers from the scores of one query block to those of the next
};

struct AttendParams {
  Problem problem;
  TensorView q;
  TensorView out;
  const u8* k_tiles;
  const u8* v_tiles;
  const float* k_scale;
  const float* v_block_scale;  // as in QuantizeParams
  const i32* key_counts;
  const float* k_mean;
  const float* v_mean;
  const float* v_scale;
  const float* balance;  // as in QuantizeParams
  const float* reach;    // as in QuantizeParams
  const u8* finite;      // likewise
  const u8* pool_k;      // null: nothing is pooled
  const u8* pool_v;
  const PoolColumn* pool_columns;
  const float* pool_value_scale;
  const u32* block_map;  // null, without thresholds alone: every block is kept
  const HeadThresholds* thresholds;
  float* lse;          // (batch, heads, queries) natural log, may be null
  float* partial_out;  // (batch, heads, queries, channels) unnormalised float32, may be null
  float* partial_max;  // (batch, heads, queries) log2 units, with partial_out
  float* partial_sum;  // (batch, heads, queries), with partial_out
  u64* counters;
  i32* next_item;  // zero between launches, which must not overlap; only where blocks are persistent
  i32 tokens;      // queries of the caller's tensors: rows of lse and the partial results
  float scale;     // natural softmax scale
  float pvthreshd;
  i32 causal;
};

// For some rows of measured query blocks. A bucket is what a density adds to the key blocks of the one before.
struct ScoreParams {
  const float* exact_out;     // (batch, heads, densities, rows, channels) of each bucket: as attend's partial results
  const float* exact_max;     // (batch, heads, densities, rows)
  const float* exact_sum;     // likewise
  TensorView q;               // (batch, heads, rows, channels)
  const float* k_block_mean;  // as in QuantizeParams
  const u16* v_block_mean;
  const float* v_mean;
  const i32* key_counts;
  const u32* kept;   // (batch, heads, densities - 1, blocks, map words): what each density but the last keeps
  float* found;      // (6 densities - 3, batch, heads, rows): rows contiguous
  i64 field_stride;  // of `found`
  i64 batch_stride;
  i64 head_stride;
  float scale;  // natural softmax scale
  i32 heads;
  i32 kv_heads;
  i32 densities;
  i32 blocks;  // query blocks of a head
  i32 rows;    // of all blocks
  i32 channels;
  i32 key_blocks;
  i32 room;          // places in the list of dropped key blocks, with seven to spare for each density
  i32 rows_per_cta;  // rows that share a thread block: as many as have room for their weights
};

// Sizes that the host reads back from the cubin before it launches a kernel, as LaunchInfo: `launch_sizes` of its entry file.
struct MeansSizes {
  u32 slices;  // thread blocks that share a head's K or V
};

struct RouteSizes {
  u32 rows;         // query blocks that a thread block takes at most
  u32 key_step;     // key blocks to whose multiples a row of scores is filled up
  u32 spare_bytes;  // least room beside the scores where heads may rank by error
};

struct AttendSizes {
  u32 parts;  // thread blocks that share a query block
};

struct ScoreSizes {
  u32 rows;         // that a thread block takes at most
  u32 step;         // places in the list of dropped key blocks to whose multiples each bucket is filled up
  u32 query_bytes;  // of the queries of a thread block
};

}  // namespace sparge
