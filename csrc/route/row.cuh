// SPDX-License-Identifier: Apache-2.0
// The block map of one query block: which key blocks are valid, which are forced, which win the ranking.
#pragma once

#include "../common/pairs.cuh"
#include "select.cuh"

namespace sparge::route {

struct Row {
  i32 b, head, block, first_query, queries;
  i32 seen;      // key blocks before this one hold keys that the row may see
  i32 diagonal;  // key blocks from this one on are kept for the causal diagonal, if seen

  SPARGE_DEVICE Row(const RouteParams& p, i32 b_, i32 head_, i32 block_)
      : b(b_),
        head(head_),
        block(block_),
        first_query(block_ * kQueryBlock),
        queries(p.problem.rows_from(block_ * kQueryBlock) + p.problem.rows_from(block_ * kQueryBlock + kKeyBlock)),
        seen(p.problem.key_blocks()),
        diagonal(seen) {
    if (!p.causal) return;
    seen = smaller(seen, ceil_div(first_query + queries, kKeyBlock));
    if (p.keep_diagonal) diagonal = first_query / kKeyBlock;
  }

  SPARGE_DEVICE i64 at(const RouteParams& p) const {
    return (static_cast<i64>(b) * p.problem.heads + head) * p.problem.query_blocks() + block;
  }
};

SPARGE_DEVICE bool touches_exact(const RouteParams& p, i32 first, i32 count, i32 length) {
  return first < p.exact_prefix || first + count > length - p.exact_suffix;
}

// What holds for all rows of a head.
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
  // Exact whatever a ranking or a mask says: the sink, and blocks that hold exact tokens.
  SPARGE_DEVICE bool exact(i32 j) const {
    return (p.attention_sink && j == 0) ||
           (p.keys_exact ? p.keys_exact[j] != 0 : touches_exact(p, j * kKeyBlock, keys(j), key_length));
  }
  SPARGE_DEVICE bool exact(const Row& row) const {
    return p.queries_exact ? p.queries_exact[row.block] != 0 : touches_exact(p, row.first_query, row.queries, p.problem.queries);
  }
  // How many keys the block has, with kStandsForced where it is attended to unasked.
  SPARGE_DEVICE u8 standing(i32 j) const {
    const i32 count = keys(j);
    const bool similar = k_similarity[j] > simthreshd1;
    return static_cast<u8>(count <= 0 ? 0 : exact(j) || !similar ? count | kStandsForced : count);
  }
  SPARGE_DEVICE bool dense(const Row& row) const { return exact(row) || !(p.q_similarity[row.at(p)] > simthreshd1); }
};

SPARGE_DEVICE void note_standing(u8* standing, const Rules& rules, i32 key_blocks) {
#pragma unroll 2
  for (int j = threadIdx.x; j < key_blocks; j += kThreads) standing[j] = rules.standing(j);
}

// Writes the map words and the pair counters of `row`. `keep(j, valid)` runs on whole warps, ascending. `valid` says
// that key block j exists, and is set to whether the row sees any of its keys(j) keys.
template <typename Keys, typename Keep>
SPARGE_DEVICE void write_map(const RouteParams& p, const Row& row, Keys&& keys, Keep&& keep) {
  const i32 key_blocks = p.problem.key_blocks(), words = p.problem.map_words();
  const i64 at = row.at(p);
  const i32 lane = threadIdx.x % kWarpSize;
  u32 kept_blocks = 0, kept_pairs = 0, valid_pairs = 0;
#pragma unroll 1
  for (int first = 0; first < words; first += kWarpSize) {
    const i32 end = smaller(first + kWarpSize, words);
    u32 own = 0;  // each lane stores one of 32 words
#pragma unroll 4
    for (int word = first; word < end; ++word) {
      const i32 j = word * kMapBits + lane;
      bool valid = j < key_blocks;
      const bool kept = keep(j, valid);
      const u32 bits = __ballot_sync(kFullWarp, kept);
      if (lane == word - first) own = bits;
      u32 pairs = valid ? keys(j) : 0;
      if (p.causal && valid) pairs = block_pairs(true, row.first_query, row.queries, j * kKeyBlock, pairs);
      valid_pairs += pairs;
      if (kept) kept_pairs += pairs;
    }
    kept_blocks += __popc(own);
    if (first + lane < end) p.block_map[at * words + first + lane] = own;
  }
  const u32 of_each = p.causal ? 1 : row.queries;
  kept_blocks = warp_sum(kept_blocks);
  kept_pairs = warp_sum(kept_pairs * of_each);
  valid_pairs = warp_sum(valid_pairs * of_each);
  if (lane == 0 && p.counters) {
    atomicAdd(p.counters + kKeptPairs, static_cast<u64>(kept_pairs));
    atomicAdd(p.counters + kValidPairs, static_cast<u64>(valid_pairs));
    atomicAdd(p.counters + kKeptBlocks, static_cast<u64>(kept_blocks));
  }
}

// Keeps the valid blocks; with a mask, those that it names, and what is exact.
SPARGE_DEVICE void map_without_scores(const RouteParams& p, const Row& row, const Rules& rules) {
  const u8* mask = p.block_mask && !rules.exact(row) ? p.block_mask : nullptr;
  if (mask) mask += row.b * p.mask_stride[0] + row.head * p.mask_stride[1] + row.block * p.mask_stride[2];
  auto keys = [&](i32 j) { return rules.keys(j); };
  write_map(p, row, keys, [&](i32 j, bool& valid) {
    valid = valid && rules.valid(j) && j < row.seen;
    return valid && (!mask || mask[j * p.mask_stride[3]] != 0 || rules.exact(j));
  });
}

// Turns a row's scores into keys: kUnseen, kForced or sortable.
SPARGE_DEVICE Range make_keys(float* scores, const u8* standing, const Row& row, i32 key_blocks) {
  const i32 lane = threadIdx.x % kWarpSize;
  u32 lowest = 0xFFFFFFFFu, highest = 0, number = 0, seen = 0;
#pragma unroll 4
  for (int j = lane; j < key_blocks; j += kWarpSize) {
    const u32 stands = j < row.seen ? standing[j] : 0, rank = sortable(scores[j]);
    const u32 key = stands == 0 ? kUnseen : (stands & kStandsForced) || j >= row.diagonal ? kForced : rank;
    scores[j] = __uint_as_float(key);
    highest = larger(highest, key);
    lowest = smaller(lowest, key < kLeastRanked ? 0xFFFFFFFFu : key);
    ptx::count_from(kLeastRanked, key, number);
    ptx::count_from(kForced, key, seen);
  }
  number = warp_sum(number);
  return {__reduce_min_sync(kFullWarp, lowest), __reduce_max_sync(kFullWarp, highest), number, warp_sum(seen) - number};
}

// Number of key blocks that top-k keeps.
SPARGE_DEVICE i32 asked_blocks(const RouteParams& p, i32 head) {
  const float key_blocks = static_cast<float>(p.problem.key_blocks());
  return p.thresholds ? larger(1, static_cast<i32>(p.thresholds[head].selection * key_blocks)) : p.topk_blocks;
}

// Whether a mask decides, or as many blocks are asked for as there are.
SPARGE_DEVICE bool scores_nothing(const RouteParams& p, i32 head) {
  return p.select == Select::kMask || (p.select == Select::kTopK && asked_blocks(p, head) >= p.problem.key_blocks());
}

SPARGE_DEVICE Cut choose(const RouteParams& p, const u32* keys, i32 key_blocks, const Range& range, i32 head, u32* list) {
  const float share = p.thresholds ? p.thresholds[head].selection : p.cdfthreshd;
  if (p.select == Select::kTopK) {
    const i32 asked = asked_blocks(p, head);
    const i32 kept = p.upstream ? asked : ceil_div<i32>(asked + range.forced, kStepBlocks) * kStepBlocks - range.forced;
    return cut_at(keys, key_blocks, range, range.number, kept, Unit{}, list);
  }
  if (range.number == 0) return {0, 0};
  const Mass mass{unsortable(range.highest)};
  const u64 total = total_mass(keys, key_blocks, mass);
  const u64 target = static_cast<u64>(static_cast<double>(share) * static_cast<double>(total));
  return cut_at(keys, key_blocks, range, total, target, mass, list);
}

// scores: this row's, one a key block. `list` has room for 32.
SPARGE_DEVICE void map_from_scores(const RouteParams& p, const Row& row, bool dense, float* scores, const u8* standing,
                                   u32* list) {
  const i32 lane = threadIdx.x % kWarpSize, key_blocks = p.problem.key_blocks();
  const Range range = make_keys(scores, standing, row, key_blocks);
  const u32* keys = reinterpret_cast<const u32*>(scores);
  __syncwarp();
  const Cut cut = dense ? Cut{0, 0} : choose(p, keys, key_blocks, range, row.head, list);
  u32 ties = smaller<u64>(cut.ties, key_blocks);
  auto keys_of = [&](i32 j) { return keys_in(standing[j]); };
  write_map(p, row, keys_of, [&](i32 j, bool& valid) {
    const u32 key = valid ? keys[j] : kUnseen;
    valid = key != kUnseen;
    bool kept = (key == kForced) | (key > cut.threshold);
    if (ties > 0) {
      const bool tied = key == cut.threshold;
      const u32 tied_lanes = __ballot_sync(kFullWarp, tied);
      kept |= tied & (__popc(tied_lanes & ((1u << lane) - 1)) < ties);
      ties -= smaller<u32>(ties, __popc(tied_lanes));
    }
    return kept;
  });
}

}  // namespace sparge::route
