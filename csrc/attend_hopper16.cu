// SPDX-License-Identifier: Apache-2.0
// Launch 4 on sm_90a for 16-bit operands: block-sparse flash attention over the block map on the warpgroup tensor cores, both
// products in bf16 or both in fp16, sums in float32.
//
// Semantics   As attend.cu, whose tiles it reads. P is rounded relative to the running maximum after each step of two blocks of
//             the list. Row sums are of P before it is rounded. The PV filter decides block by block and saves no time: a block
//             that it leaves out is masked.
// Layout      K tiles 64 x head_dim in rows of at most 128 bytes (common/key_tile.cuh), two of them one operand of 128 keys.
//             V tiles head_dim x 64. Both as quantize wrote them.
// Strategy    Producer, feeder and persistent blocks of attend_hopper.cu. Two consumer warpgroups of 64 rows share every tile.
//             Scores of a step and values of the step before are in flight together. The warpgroups issue them alternately, so
//             that one's softmax runs beside the other's products. The fragment of scores is that of P.
//             Shared memory holds two steps at head_dim 128. K and V of a stage arrive and are given back each by itself, so
//             that a copy has a whole step's time.
// Tried       docs/experiments.md, "Attend on Hopper, 16 bits".
#include "attend/hopper/barriers.cuh"
#include "attend/hopper/roles.cuh"
#include "attend/hopper16/consumer.cuh"

namespace sparge::hopper16 {

SPARGE_CHECK_PARAMS(AttendParams);
static_assert(kSixteenBits && kArch == 90, "this kernel is bf16 or fp16 on sm_90a");
static_assert(kKeyPartRowBytes == 128 && kValueRowBytes == 128, "the tensor cores swizzle rows of 128 bytes");
static_assert(kKeyBlock * kStepBlocks == 128 && kKeyTiles * 8 == kKeyBlock, "a product of scores has 128 columns");

}  // namespace sparge::hopper16

extern "C" __device__ const sparge::LaunchInfo launch_info = {sparge::hopper::kThreads, sizeof(sparge::hopper::Smem)};

// Grid: as many blocks as run at once, at most one a work item.
extern "C" __global__ void __launch_bounds__(sparge::hopper::kThreads, 1)
    attend_hopper16(const __grid_constant__ sparge::AttendParams p) {
  using namespace sparge;
  extern __shared__ __align__(1024) u8 shared[];
  auto& smem = *reinterpret_cast<hopper::Smem*>(shared);
  if (threadIdx.x == 0) hopper::init_barriers(smem);
  __syncthreads();
  hopper::take_role<hopper16::Consumer>(p, smem);
}
