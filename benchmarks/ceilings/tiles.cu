// SPDX-License-Identifier: Apache-2.0
// How fast tiles that a list names, anywhere in a region, come into shared memory by bulk copies: what attend's producer does.
// One thread a block copies; nobody computes. What it read is checked by the sum of the tiles' first words.
#include "../../csrc/ptx/mbarrier.cuh"

#ifndef TILE_BYTES
#define TILE_BYTES 8192
#endif

namespace {

using namespace sparge;

constexpr int kStages = 96 * 1024 / TILE_BYTES;  // two blocks an SM

struct Params {
  const u8* region;
  const i32* list;  // (blocks, tiles_a_block)
  u32* sums;        // (blocks)
  i32 tiles_a_block;
};

struct Smem {
  u8 tile[kStages][TILE_BYTES];
  u64 full[kStages];
};

}  // namespace

extern "C" __device__ const LaunchInfo launch_info = {kWarpSize, sizeof(Smem)};

extern "C" __global__ void __launch_bounds__(kWarpSize) tiles(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < kStages; ++stage) ptx::mbarrier_init(smem.full[stage], 1);
  ptx::mbarrier_init_fence();
  const i32* list = p.list + static_cast<i64>(blockIdx.x) * p.tiles_a_block;
  u32 sum = 0;
  i32 next = list[0];  // read a turn ahead, so that no copy waits for its place
  for (i32 turn = 0; turn < p.tiles_a_block + kStages; ++turn) {
    const i32 stage = turn % kStages;
    if (turn >= kStages) {
      ptx::mbarrier_wait(smem.full[stage], (turn / kStages + 1) & 1);
      sum += *reinterpret_cast<volatile u32*>(smem.tile[stage]);
    }
    if (turn < p.tiles_a_block) {
      ptx::mbarrier_arrive_expect(smem.full[stage], TILE_BYTES);
      ptx::bulk_copy(smem.tile[stage], p.region + static_cast<i64>(next) * TILE_BYTES, TILE_BYTES, smem.full[stage]);
      next = list[smaller(turn + 1, p.tiles_a_block - 1)];
    }
  }
  p.sums[blockIdx.x] = sum;
}
