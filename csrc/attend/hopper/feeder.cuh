// SPDX-License-Identifier: Apache-2.0
// The warps beside the producer put the queries of the next work item into shared memory, as swizzled tiles of INT8 or 16-bit
// rows, and what else the consumers need of it. Else an item would begin with the latencies of finding and loading its rows.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../finite.cuh"
#include "../output_scale.cuh"
#include "query_rows.cuh"
#include "rows.cuh"

namespace sparge::hopper {

struct Feeder {
  const AttendParams& p;
  Smem& smem;

  SPARGE_DEVICE Feeder(const AttendParams& params, Smem& s) : p(params), smem(s) {}

  SPARGE_DEVICE void run() {
    for (ItemSlot items;; ++items.count) {
      const u32 place = uniform(items.place());
      Queries& queries = smem.queries[place];
      if (uniform(feeder_thread() / kWarpSize) == 0) ask(queries, items.parity() ^ 1);
      ptx::mbarrier_wait(queries.asked, items.parity());
      if (uniform(queries.item) < 0) return;
      const u16 flags = kSixteenBits ? attend::first_flags(p, queries.work.kv_at, feeder_thread()) : attend::kBothFinite;
      lay_down_facts(queries);
      sync_feeder();
      const QueryRows rows(p, smem, queries);
      if constexpr (kSixteenBits) {
        rows.copy(smem.q[place][0]);
        if (!attend::sees_finite(p, queries.work.kv_at, feeder_thread(), kFeederThreads, flags))
          queries.zero_if_finite = kNotANumber;
      } else {
        rows.quantize(smem.q[place][0]);
        if (p.lse) rows.multiply_by_mean();
      }
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(queries.ready);
    }
  }

 private:
  // Takes the next work item as soon as the consumers have left the item before the last, so that its queries are read while they
  // are at the last. One by one, as lists differ in length. Each thread block asks once more than it gets items, so whoever asks
  // last leaves the counter at zero for the next launch.
  SPARGE_DEVICE void ask(Queries& queries, u32 free_parity) const {
    ptx::mbarrier_wait(queries.free, free_parity);
    if (feeder_thread() != 0) return;
    const i32 items = p.problem.batch * p.problem.heads * p.problem.query_blocks();
    i32 item = atomicAdd(p.next_item, 1);
    if (item == items + static_cast<i32>(gridDim.x) - 1) *p.next_item = 0;
    if (item >= items) item = -1;
    queries.item = item;
    if (item >= 0) queries.work.read(p, item);
    ptx::mbarrier_arrive(queries.asked);
  }

  SPARGE_DEVICE void lay_down_facts(Queries& queries) const {
#pragma unroll 1
    for (i32 row = feeder_thread(); row < kQueryBlock; row += kFeederThreads)
      queries.token[row] = queries.work.token(p.problem, row);
    if constexpr (kSixteenBits) {
      if (feeder_thread() == 0) queries.zero_if_finite = 0.0f;
    } else {
      lay_down_means(queries);
      if (uniform(feeder_thread() / kWarpSize) == 0) lay_down_scale(queries);
    }
  }

  SPARGE_DEVICE void lay_down_means(Queries& queries) const {
#pragma unroll 1
    for (i32 at = feeder_thread(); at < kHeadDim; at += kFeederThreads) {
      queries.v_mean[at] = p.v_mean[queries.work.kv_at * kHeadDim + at];
      queries.v_scale[at] = p.v_scale[queries.work.kv_at * kHeadDim + at];
    }
  }

  SPARGE_DEVICE void lay_down_scale(Queries& queries) const {
    const float factor = attend::inverse_output_scale(p, queries.work);
    if (feeder_thread() == 0) queries.row_sum_factor = factor;
  }
};

}  // namespace sparge::hopper
