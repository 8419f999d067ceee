// SPDX-License-Identifier: Apache-2.0
// Which query block of which head a work item is.
#pragma once

#include "../params.cuh"

namespace sparge::attend {

// Query blocks at the ends of every head that come before all others. Text stands at an end and is dense: else the last head's
// text would end the call, alone on a few SMs. docs/experiments.md, "Attend, all kernels".
constexpr i32 kEnds = 8;

struct Work {
  i32 b, head, block, first_query, queries;
  i32 head_at, kv_at;  // places among all (batch, head) and (batch, kv head)
  i32 first_tile;      // of this head; 2^31 tiles are 16 TB of K
  i32 first_pool;      // first tile of its pooled keys
  i32 order_start;     // of its token order in slot_token

  float pvthreshd;
  float log2_pool_weight;  // log2 of the pool weight; minus infinity: nothing is pooled

  // Shared memory constructs nothing.
  Work() = default;

  SPARGE_DEVICE Work(const AttendParams& p, i32 item) { read(p, item); }

  // Query blocks are fastest, so that neighbours share K and V in L2, and go from both ends inwards: a long list must not start
  // last. `item` is the number of the work item.
  SPARGE_DEVICE void read(const AttendParams& p, i32 item) {
    const Problem& problem = p.problem;
    const i32 query_blocks = problem.query_blocks(), ends = smaller(kEnds, query_blocks);
    const i32 early_items = problem.batch * problem.heads * ends;
    const bool early = item < early_items;
    const i32 place = early ? item : item - early_items, of_head = early ? ends : query_blocks - ends;
    head_at = place / of_head;
    const i32 step = place % of_head + (early ? 0 : ends);
    block = step % 2 ? query_blocks - 1 - step / 2 : step / 2;
    b = head_at / problem.heads;
    head = head_at % problem.heads;
    const i32 kv = problem.kv_head(head);
    kv_at = b * problem.kv_heads + kv;
    order_start = problem.order_start(kv);
    first_tile = kv_at * problem.key_blocks();
    first_pool = kv_at * problem.pool_tiles();
    first_query = block * kQueryBlock;
    queries = smaller(kQueryBlock, problem.queries - first_query);
    pvthreshd = p.thresholds ? p.thresholds[head].pvthreshd : p.pvthreshd;
    log2_pool_weight = p.pool_k ? p.thresholds[head].log2_pool_weight : kMinusInfinity;
  }

  // Becomes part `part` of the query block, of `rows` rows; the last ones may have none.
  SPARGE_DEVICE void take_part(const Problem& problem, i32 part, i32 rows) {
    first_query += part * rows;
    queries = smaller(rows, problem.queries - first_query);
  }

  SPARGE_DEVICE bool pools() const { return log2_pool_weight != kMinusInfinity; }

  // Token of row `row` of the query block; -1: none.
  SPARGE_DEVICE i32 token(const Problem& problem, i32 row) const { return problem.query_token(order_start, first_query + row); }

  // Key blocks from here on hold no keys, or keys that some row must not see, so that no mean can stand for them.
  SPARGE_DEVICE i32 poolable(const AttendParams& p) const {
    const i32 blocks = p.problem.key_blocks();
    return p.causal ? smaller(blocks, block * (kQueryBlock / kKeyBlock)) : blocks;
  }

  // Row of the block map, for `map_word`.
  SPARGE_DEVICE const u32* map_row(const AttendParams& p) const {
    return p.block_map + (static_cast<i64>(head_at) * p.problem.query_blocks() + block) * p.problem.map_words();
  }
};

// Word `index` of a row of the block map. Without a map every bit is set, also those of blocks that do not exist.
SPARGE_DEVICE u32 map_word(const AttendParams& p, const u32* row, i32 index) { return p.block_map ? row[index] : ~0u; }

}  // namespace sparge::attend
