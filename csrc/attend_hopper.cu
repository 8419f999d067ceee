// SPDX-License-Identifier: Apache-2.0
// Launch 4 on sm_90a: block-sparse flash attention over the block map on the warpgroup tensor cores, INT8 QK and E4M3 PV.
//
// Semantics   As attend.cu, whose E4M3 tiles it reads. P is rounded relative to the running maximum after each step of two blocks
//             of the list. The PV filter decides block by block. P of the key tiles in kFixedTiles errs by at most 1.5 % before
//             it is rounded (hopper/fixed_exp2.cuh); a key's place in its block alone decides whether it is in one of them.
// Layout      K tiles 64 x head_dim, two of them one operand of 128 keys. V tiles head_dim x 64. Both as quantize wrote them.
// Strategy    Persistent thread blocks take work items one by one, head after head. Their warps have roles:
//               producer   one warp, copies tiles in bulk;
//               feeder     three warps, prepare the next work item: queries, tokens, scales and facts of V in shared memory, so
//                          that it does not begin with their latencies;
//               consumers  two warpgroups of 64 rows each, share every tile.
//             P lives in registers, Q in shared memory. Keys of V are permuted so that the fragment of scores is that of P.
//             Sums of 128 keys are promoted to float32, which also rescales them. Eight channels of ones beside V make the tensor
//             cores sum the rows of P as rounded.
//             Scores of a block of the next step start as soon as their registers are free. Their maximum is found among the
//             exponentials of the next block.
//             MUFU would bind if it computed all exponentials: two of them take it 16 clocks. In five of eight key tiles five
//             packed instructions of other pipes give two P instead. So the warpgroups need not alternate at MUFU.
//             The issue of instructions binds. So all that a step needs lies at one offset of its stage, in units that need no
//             more arithmetic. Maxima that no mask touched are taken as integers, three at a time. Accumulators get their offset
//             by loads from shared memory. At an item's end four lanes exchange pairs until each stores 16 bytes.
// Compilers   ptxas waits for each product unless it knows at compile time what is in flight, and when a product's registers are
//             written after its fence. It moves maxima past waits, and LLVM moves them into later basic blocks, unless told not
//             to (ptx/schedule.cuh).
// Tried       docs/experiments.md, "Attend on Hopper, 8 bits" and "The compiler".
#include "attend/hopper/barriers.cuh"
#include "attend/hopper/consumer.cuh"
#include "attend/hopper/roles.cuh"

namespace sparge::hopper {

SPARGE_CHECK_PARAMS(AttendParams);
static_assert(kElement == Element::kInt8E4M3 && kArch == 90, "this kernel is INT8 and E4M3 on sm_90a");

// What no bulk copy overwrites. All threads meet after this, before the first read.
SPARGE_DEVICE void fill_constants(Smem& smem) {
  constexpr u32 kOnes = 0x38383838;  // four times 1 in E4M3
  constexpr int kWords = sizeof(ValueTile::ones) / sizeof(u32);
  for (int i = threadIdx.x; i < kStages * kStepBlocks * kWords; i += kThreads) {
    ValueTile& tile = smem.stage[i / kWords / kStepBlocks].v[i / kWords % kStepBlocks];
    reinterpret_cast<u32*>(tile.ones)[i % kWords] = kOnes;
  }
  constexpr u32 kZero = __builtin_bit_cast(u32, kScoreZero);
  if (threadIdx.x == 0) smem.score_zero = {kZero, kZero, kZero, kZero};
  ptx::fence_proxy_async();
}

}  // namespace sparge::hopper

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::hopper::kThreads, sizeof(sparge::hopper::Smem)};

// Grid: as many blocks as run at once, at most one a work item.
extern "C" __global__ void __launch_bounds__(sparge::hopper::kThreads, 1)
    attend_hopper(const __grid_constant__ sparge::AttendParams p) {
  using namespace sparge;
  extern __shared__ __align__(1024) u8 shared[];
  auto& smem = *reinterpret_cast<hopper::Smem*>(shared);
  if (threadIdx.x == 0) hopper::init_barriers(smem);
  hopper::fill_constants(smem);
  __syncthreads();
  hopper::take_role<hopper::Consumer>(p, smem);
}
