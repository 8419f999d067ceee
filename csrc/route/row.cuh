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

  SPARGE_DEVICE i64 at(const RouteParams& p) const {
    return (static_cast<i64>(b) * p.problem.heads + head) * p.problem.query_blocks() + block;
  }
};

SPARGE_DEVICE bool touches_exact(const RouteParams& p, i32 first, i32 count, i32 length) {
  return first < p.exact_prefix || first + count > length - p.exact_suffix;
}

// What holds for all rows of a head, and by how much the causal diagonal changes it for one.
struct Rules {
  const RouteParams& p;
  const float* k_similarity;
  const i32* key_counts;
  i32 key_length;
  float simthreshd1;

  SPARGE_DEVICE Rules(const RouteParams& params, i32 b, i32 head, i64 kv_at)
      : p(params),
        k_similarity(params.k_similarity + kv_at * params.problem.key_blocks()),
        key_counts(params.key_counts + kv_at * params.problem.key_blocks()),
        key_length(params.problem.key_length(b)),
        simthreshd1(params.thresholds ? params.thresholds[head].simthreshd1 : params.simthreshd1) {}

  SPARGE_DEVICE i32 keys(i32 j) const { return key_counts[j]; }
  SPARGE_DEVICE bool valid(i32 j) const { return keys(j) > 0; }
  SPARGE_DEVICE bool forced(i32 j) const {
    return (p.attention_sink && j == 0) ||
           (p.keys_exact ? p.keys_exact[j] != 0 : touches_exact(p, j * kKeyBlock, keys(j), key_length)) ||
           !(k_similarity[j] > simthreshd1);
  }
  SPARGE_DEVICE bool sees(const Row& row, i32 j) const { return !p.causal || j * kKeyBlock <= row.first_query + row.queries - 1; }
  SPARGE_DEVICE bool on_diagonal(const Row& row, i32 j) const {
    return p.causal && p.keep_diagonal && j * kKeyBlock + kKeyBlock - 1 >= row.first_query;
  }
  SPARGE_DEVICE bool dense(const Row& row) const {
    return (p.queries_exact ? p.queries_exact[row.block] != 0
                            : touches_exact(p, row.first_query, row.queries, p.problem.queries)) ||
           !(p.q_similarity[row.at(p)] > simthreshd1);
  }
};

// Scores of `rows` rows become keys: kUnseen, kForced or sortable.
SPARGE_DEVICE void make_keys(const RouteParams& p, const Rules& rules, i32 b, i32 head, i32 first, float* scores, i32 rows) {
  const i32 key_blocks = p.problem.key_blocks();
  for (int j = threadIdx.x; j < key_blocks; j += kThreads) {
    const bool valid = rules.valid(j), forced = rules.forced(j);
#pragma unroll
    for (int r = 0; r < kMaxRows; ++r) {
      if (r >= rows) continue;
      const Row row(p, b, head, first + r);
      float& score = scores[r * key_blocks + j];
      u32 key = forced || rules.on_diagonal(row, j) ? kForced : sortable(score);
      if (!valid || !rules.sees(row, j)) key = kUnseen;
      score = __uint_as_float(key);
    }
  }
}

// Writes the map words, the count and the pair counters of `row`. `keep(j, valid)` runs on whole warps, ascending: `valid` says
// that there is a key block j, and comes back as whether the row sees keys of it.
template <typename Keep>
SPARGE_DEVICE void write_map(const RouteParams& p, const Row& row, const Rules& rules, Keep&& keep) {
  const i32 key_blocks = p.problem.key_blocks(), words = p.problem.map_words();
  const i64 at = row.at(p);
  const i32 lane = threadIdx.x % kWarpSize;
  i32 kept_blocks = 0;
  u64 kept_pairs = 0, valid_pairs = 0;
  for (int word = 0; word < words; ++word) {
    const i32 j = word * kMapBits + lane;
    bool valid = j < key_blocks;
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
      atomicAdd(p.counters + kKeptPairs, kept_pairs);
      atomicAdd(p.counters + kValidPairs, valid_pairs);
      atomicAdd(p.counters + kKeptBlocks, static_cast<u64>(kept_blocks));
    }
  }
}

SPARGE_DEVICE void map_from_mask(const RouteParams& p, const Row& row, const Rules& rules) {
  const u8* mask = p.block_mask + row.b * p.mask_stride[0] + row.head * p.mask_stride[1] + row.block * p.mask_stride[2];
  write_map(p, row, rules, [&](i32 j, bool& valid) {
    valid = valid && rules.valid(j) && rules.sees(row, j);
    return valid && mask[j * p.mask_stride[3]] != 0;
  });
}

SPARGE_DEVICE Cut choose(const RouteParams& p, const u32* keys, i32 key_blocks, i32 head, u32* list) {
  const float share = p.thresholds ? p.thresholds[head].selection : p.cdfthreshd;
  const Range range = ranked(keys, key_blocks);
  if (p.select == Select::kTopK) {
    const i32 wanted = p.thresholds ? static_cast<i32>(share * static_cast<float>(key_blocks)) : p.topk_blocks;
    return cut_at(keys, key_blocks, range, larger(p.floor, wanted), Unit{}, list);
  }
  if (range.number == 0) return {0, 0};
  const Mass mass{unsortable(range.highest)};
  const u64 total = total_from(keys, key_blocks, kLeastRanked, mass).weight;
  const u64 target = static_cast<u64>(static_cast<double>(share) * static_cast<double>(total));
  const Cut cut = cut_at(keys, key_blocks, range, target, mass, list);
  return p.floor > 1 ? lower(cut, cut_at(keys, key_blocks, range, p.floor, Unit{}, list)) : cut;
}

// keys: of this row, one a key block. `list` has room for 32.
SPARGE_DEVICE void map_from_keys(const RouteParams& p, const Row& row, const Rules& rules, const u32* keys, u32* list) {
  const i32 lane = threadIdx.x % kWarpSize;
  const Cut cut = rules.dense(row) ? Cut{0, 0} : choose(p, keys, p.problem.key_blocks(), row.head, list);
  u64 ties = cut.ties;
  write_map(p, row, rules, [&](i32 j, bool& valid) {
    const u32 key = valid ? keys[j] : kUnseen;
    valid = key != kUnseen;
    const bool tied = key >= kLeastRanked && key == cut.threshold;
    const u32 tied_lanes = __ballot_sync(kFullWarp, tied);
    const u64 rank = __popc(tied_lanes & ((1u << lane) - 1));
    const bool kept = key == kForced || key > cut.threshold || (tied && rank < ties);
    ties -= smaller<u64>(ties, __popc(tied_lanes));
    return valid && kept;
  });
}

}  // namespace sparge::route
