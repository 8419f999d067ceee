// SPDX-License-Identifier: Apache-2.0
// The block map of one query block: which key blocks are valid, which are forced, which win the ranking.
#pragma once

#include "../common/pairs.cuh"
#include "select.cuh"

namespace sparge::route {

struct Row {
  i32 b, head, block, first_query, queries;

  SPARGE_DEVICE Row(const RouteParams& p, i32 b_, i32 head_, i32 block_)
      : b(b_),
        head(head_),
        block(block_),
        first_query(block_ * kQueryBlock),
        queries(p.problem.rows_from(block_ * kQueryBlock) + p.problem.rows_from(block_ * kQueryBlock + kKeyBlock)) {}
};

SPARGE_DEVICE bool touches_exact(const RouteParams& p, i32 first, i32 count, i32 length) {
  return first < p.exact_prefix || first + count > length - p.exact_suffix;
}

struct Rules {
  const RouteParams& p;
  const Row& row;
  const float* k_similarity;
  const i32* key_counts;
  i32 key_length;
  float simthreshd1;

  SPARGE_DEVICE Rules(const RouteParams& params, const Row& r, i64 kv_at)
      : p(params),
        row(r),
        k_similarity(params.k_similarity + kv_at * params.problem.key_blocks()),
        key_counts(params.key_counts + kv_at * params.problem.key_blocks()),
        key_length(params.problem.key_length(r.b)),
        simthreshd1(params.thresholds ? params.thresholds[r.head].simthreshd1 : params.simthreshd1) {}

  SPARGE_DEVICE i32 keys(i32 j) const { return key_counts[j]; }
  SPARGE_DEVICE bool valid(i32 j) const {
    return keys(j) > 0 && (!p.causal || j * kKeyBlock <= row.first_query + row.queries - 1);
  }
  SPARGE_DEVICE bool forced(i32 j) const {
    return (p.attention_sink && j == 0) || (p.causal && p.keep_diagonal && j * kKeyBlock + kKeyBlock - 1 >= row.first_query) ||
           (p.keys_exact ? p.keys_exact[j] != 0 : touches_exact(p, j * kKeyBlock, keys(j), key_length)) ||
           !(k_similarity[j] > simthreshd1);
  }
  SPARGE_DEVICE bool dense() const {
    const i64 at = (static_cast<i64>(row.b) * p.problem.heads + row.head) * p.problem.query_blocks() + row.block;
    return (p.queries_exact ? p.queries_exact[row.block] != 0
                            : touches_exact(p, row.first_query, row.queries, p.problem.queries)) ||
           !(p.q_similarity[at] > simthreshd1);
  }
};

// Writes the map words, the count and the pair counters of `row`; `keep(j, in_range)` runs on whole warps, ascending.
template <typename Keep>
SPARGE_DEVICE void write_map(const RouteParams& p, const Row& row, const Rules& rules, Keep&& keep) {
  const i32 key_blocks = p.problem.key_blocks(), words = p.problem.map_words();
  const i64 at = (static_cast<i64>(row.b) * p.problem.heads + row.head) * p.problem.query_blocks() + row.block;
  const i32 lane = threadIdx.x % kWarpSize;
  i32 kept_blocks = 0;
  u64 kept_pairs = 0, valid_pairs = 0;
  for (int word = 0; word < words; ++word) {
    const i32 j = word * kMapBits + lane;
    const bool valid = j < key_blocks && rules.valid(j);
    const bool kept = keep(j, valid);
    const u32 bits = __ballot_sync(kFullWarp, kept);
    if (lane == 0) p.block_map[at * words + word] = bits;
    kept_blocks += __popc(bits);
    if (valid && p.counters) {
      const u64 pairs = block_pairs(p.causal, row.first_query, row.queries, j * kKeyBlock, rules.keys(j));
      valid_pairs += pairs;
      if (kept) kept_pairs += pairs;
    }
  }
  if (p.counters) {
    kept_pairs = warp_sum(kept_pairs);
    valid_pairs = warp_sum(valid_pairs);
  }
  if (lane == 0) {
    p.counts[at] = kept_blocks;
    if (p.counters) {
      atomicAdd(p.counters + 0, kept_pairs);
      atomicAdd(p.counters + 1, valid_pairs);
    }
  }
}

SPARGE_DEVICE void map_from_mask(const RouteParams& p, const Row& row, const Rules& rules) {
  const u8* mask = p.block_mask + row.b * p.mask_stride[0] + row.head * p.mask_stride[1] + row.block * p.mask_stride[2];
  write_map(p, row, rules, [&](i32 j, bool valid) { return valid && mask[j * p.mask_stride[3]] != 0; });
}

SPARGE_DEVICE Cut choose(const RouteParams& p, const u32* keys, i32 key_blocks, i32 head) {
  const float share = p.thresholds ? p.thresholds[head].selection : p.cdfthreshd;
  if (p.select == Select::kTopK) {
    const i32 wanted = p.thresholds ? static_cast<i32>(share * static_cast<float>(key_blocks)) : p.topk_blocks;
    return cut_at(keys, key_blocks, larger(p.floor, wanted), Unit{});
  }
  u32 highest = 0;
  for (int j = threadIdx.x % kWarpSize; j < key_blocks; j += kWarpSize) highest = larger(highest, keys[j]);
  highest = __reduce_max_sync(kFullWarp, highest);
  if (highest == 0) return {0, 0};
  const Mass mass{unsortable(highest)};
  const u64 total = weight_from(keys, key_blocks, 1, mass);
  const Cut cut = cut_at(keys, key_blocks, static_cast<u64>(static_cast<double>(share) * static_cast<double>(total)), mass);
  return p.floor > 1 ? lower(cut, cut_at(keys, key_blocks, p.floor, Unit{})) : cut;
}

// keys: this row's sortable scores, one a key block; entries of blocks that are not ranked become 0.
SPARGE_DEVICE void map_from_scores(const RouteParams& p, const Row& row, const Rules& rules, u32* keys) {
  const i32 key_blocks = p.problem.key_blocks(), lane = threadIdx.x % kWarpSize;
  if (rules.dense()) {
    write_map(p, row, rules, [](i32, bool valid) { return valid; });
    return;
  }
  for (int j = lane; j < key_blocks; j += kWarpSize)
    if (!rules.valid(j) || rules.forced(j)) keys[j] = 0;
  __syncwarp();
  const Cut cut = choose(p, keys, key_blocks, row.head);
  u64 ties = cut.ties;
  write_map(p, row, rules, [&](i32 j, bool valid) {
    const u32 key = valid ? keys[j] : 0;
    const u32 tied = __ballot_sync(kFullWarp, key != 0 && key == cut.threshold);
    const u64 rank = __popc(tied & ((1u << lane) - 1));
    const bool kept = valid && (key == 0 || key > cut.threshold || (key == cut.threshold && rank < ties));
    ties -= smaller<u64>(ties, __popc(tied));
    return kept;
  });
}

}  // namespace sparge::route
