// SPDX-License-Identifier: Apache-2.0
// Launch 4 on sm_90a: block-sparse flash attention over the block map on the warpgroup tensor cores, INT8 QK and E4M3 PV.
//
// Semantics   as attend.cu, whose E4M3 tiles it reads. P is rounded relative to the running maximum after each step of two
//             blocks of the list; the PV filter decides block by block. P of the key tiles in kFixedTiles errs by 1.5 % before it
//             is rounded (hopper/fixed_exp2.cuh); which keys these are goes by their place in a block alone.
// Layout      K tiles 64 x head_dim, two of them one operand of 128 keys; V tiles head_dim x 64; both as quantize wrote them.
// Strategy    One producer warp copies tiles in bulk, three warps beside it lay down the queries of the next work item, two
//             consumer warpgroups of 64 rows share every tile. P lives in
//             registers, Q in shared memory; keys of V are permuted so that the scores' fragment is P's. Sums of 128 keys
//             are promoted to float32, which rescales for nothing. Eight channels of ones beside V make the tensor cores sum
//             the rows of P, as rounded, too. Persistent blocks take work items one by one, head after head. Scores of a
//             block of the next step start as soon as its registers are free; its maximum is found among the exponentials of
//             the next block. ptxas must know at compile time what is in flight, and a product's registers must not be
//             written after its fence: it waits for each product otherwise. It moves maxima past waits, and LLVM into later
//             basic blocks, unless told not to (ptx/schedule.cuh). Instructions issued bind: what a step needs lies in its
//             stage, which one offset leads to, in units that need no more arithmetic, and maxima that no mask touched are taken
//             as integers, three at a time. Shared memory fills the accumulators with their offset. With all exponentials MUFU
//             would bind: two of them take it 16 clocks. Five packed instructions of other pipes give two P instead, in five of
//             eight key tiles. So the warpgroups need no turns at MUFU; each goes its own way.
//             A query block costs latencies and instructions beside its steps: its queries, tokens and scales, and the facts of V,
//             wait in shared memory when it begins, and four lanes of its end exchange pairs until each stores 16 bytes.
// Tried       ms of the dense Mochi shape on an H200, attend alone, random data, up to the kernel of 3ad4513, which takes 27.6
//             (one machine: 29.4 to 30.2 before the second part of the list).
//             35.9  score, soften, weigh values one after another
//             33.1  scores and the values of the step before in flight together
//             31.9  uniform branches (a shuffle tells ptxas so), one barrier a stage, the end of the list known a step ahead
//             31.6  integer sums that start from the bits of 1.5 * 2^23 instead of conversions
//             31.2  scores of the next step block by block, as registers become free
//             30.0  exponentials of the two warpgroups in turns
//             34.2  products in turns instead; 31.7 only MUFU and sums in turns (mbarriers a warp pair)
//             31.7 / 30.0 a quarter / an eighth of the exponentials as polynomials on the FMA pipe (not in turns)
//             30.7  promotion in the gaps between exponentials (not in turns)
//             30.2  every lane of a warp frees a stage instead of one (two runs, 2 %; 3 % at head_dim 64): kept, for racecheck
//                   reports the one lane's arrival after __syncwarp as a race with the other lanes' reads
//             29.4  both maxima before the wait for the values
//             28.6  the first maximum among the second block's exponentials, what a branch needs read before the wait
//             27.7  row sums by the tensor cores (64 of 571 instructions a step)
//             27.6  shuffles of the maxima beside the promotion, maxima in four chains
//             29.0  at 28.6: without turns; 30.8 with the first block's exponents before the turn; 32.3 with the turn passed on
//                   only after all exponentials
//             31.3  steps of 64 keys, exponentials, maxima and promotion all in the same basic blocks: 640 instructions for
//                   128 keys instead of 571, and operands wait for registers that the tensor cores use
//             30.4  with the PV filter; 33.4 when it branched around the exponentials
//             Profile at 27.7, of 2,120 clocks a step and warp: 507 issue, 573 fixed latencies (MUFU 8 each), 320 wait for
//             dispatch (register banks beside the tensor cores'), 213 for the other warp, 138 for shuffles and MUFU.
//             Since then: % by which a whole call got faster at Mochi and at CogVideoX-2B (head_dim 64), each dense, 20 %,
//             20 % with budgets, 10 %. H200, benchmarks.kernel_variants against 3ad4513: variants in turns, medians; all equal
//             bit for bit.
//             Mochi +1.5 -1.6 -2.0 -1.4, CogVideoX-2B +9.2 +5.4 +4.8 +3.6
//                   491 to 433 instructions on the shortest way round the loop (445 to 390): facts of a step by one load, all
//                   of a stage at one offset, scales multiplied by the producer, integer maxima, -FLT_MAX where no key was met
//             Mochi +4.8 +3.4 +2.8 +2.3
//                   these, and the offset of scores comes by 16 loads instead of 64 moves (433 to 385 instructions)
//             Mochi +1.9 +11.1 +8.8 +20.8, CogVideoX-2B +13.3 +22.3 +18.1 +29.4
//                   the first of these (moves), and a query block's queries prefetched and in flight, its epilogue without
//                   branches; with the loads at head_dim 128, which was kept, two runs of benchmarks.attention say
//                   Mochi +8.0 +13.3 +10.8 +21.2
//             Lost: the first of these alone at head_dim 128, where it slows sparse calls, and the loads at head_dim 64:
//                   CogVideoX-2B +6.6 +4.2 +4.1 +3.2, less than with moves
//                   Mochi +2.6 +1.6 +0.7 +0.8, CogVideoX-2B +10.0 +5.9 +5.9 +4.2 when a product of E5M2 constants, 32 times
//                   768 x 512, sets the offset: 377 (334) instructions; less than the loads at head_dim 128, and at 64 half a
//                   per cent more than moves is not worth a sum that nobody documents to be exact
//                   Mochi +2.5 +0.7 +0.3 +0.2, CogVideoX-2B +5.9 +3.7 +3.5 +2.7 when, with that product, the second block's
//                   exponents are computed among the first's exponentials
//             Likewise against 76854d0:
//             Mochi +1.2 +2.8 +1.6 +4.5, CogVideoX-2B +1.1 +5.3 +1.4 +9.0 (another run: -0.7 -0.4 +1.5 +4.3, +1.7 +5.1 +1.7 +9.0)
//                   the feeder, wide stores, pooled columns in pairs, maxima over a row before the wait for the values: kept
//             Mochi -4.8 -10.5 -6.5 -18.2, CogVideoX-2B -1.0 -1.0 -1.6 -1.5 when the producer, not the feeder, hands out the items:
//                   it reaches the next only some steps before the end of the last, too late for its queries
//             Lost, against that:
//                   CogVideoX-2B -7.4 -6.6 -6.7 -4.2 without turns; -3.6 -1.9 -2.0 -0.6 when loads fill its accumulators, too
//                   Mochi -5.6 -3.0 -4.0 -4.4, CogVideoX-2B -3.7 -1.9 -3.0 -0.2 an eighth of the exponentials as polynomials of degree 3
//                   (eight instructions each); a quarter and three eighths lose more
//                   CogVideoX-2B -2.5 -1.1 -1.8 -0.6 the values of the first block started before the exponentials of the second
//                   (at head_dim 128 no registers are left for that), -8.1 -6.6 -7.5 -6.0 with the second block's maxima among them, too
//                   Mochi -17.2 -14.8 -14.4 -16.5, CogVideoX-2B -2.1 -1.4 -2.2 -1.1 only these maxima there
//                   nothing to gain: the masked half of a step marked as unlikely
//                   CogVideoX-2B -4.6 -3.9 +0.3 -4.9 (another time 10 %: +0.3 with budgets) three warpgroups of 160 registers, each
//                   alone with 64 rows, a ring and a producer of its own; -10.0 -10.6 -6.6 -10.5 without the next scores beside
//                   the values. Three warps a scheduler issue no more than two (.53 a clock), and tiles are read twice
//                   CogVideoX-2B -11.2 -10.6 -6.9 both blocks' exponents and scores before the turn: ptxas begins the exponentials
//                   there, too, and there are no turns any more. -1 to -12 where data dependencies keep the second block's exponents
//                   behind 4 to 32 of the first's exponentials, or all behind the turn; -9 to -20 with the turn passed on after all
//                   exponentials. Exponentials of half precision, two at once, are as many MUFU instructions
//                   Mochi -1.9 -2.9 -2.2 -1.7, CogVideoX-2B -1.1 -0.9 -0.1 +0.4 a third copy of the loop's half for pooled steps
//             Likewise, attend alone, against d540d1d: P in fixed point (attend/hopper/fixed_exp2.cuh) in so many of a block's 8 key
//             tiles; n: without turns; f: loads fill the accumulators at head_dim 64, too. Errors of outputs .3 to .8 % larger (.0412)
//             CogVideoX-2B   2     4     4f    6f    8f    8nf    3nf   4nf   5nf (here)  6nf
//             dense        +4.7  +8.2 +10.5 +11.3  +8.0 +12.8   +8.7 +13.8 +15.9       +14.1
//             50 % budgets +4.3  +7.8 +10.1 +11.3  +7.5 +12.0   +8.1 +13.2 +15.8       +13.8
//             20 % budgets +3.6  +7.4  +9.3 +10.6  +7.1 +10.3   +6.4 +10.8 +13.6       +12.6
//             10 % budgets +3.6  +7.3  +8.5  +9.7  +6.8  +9.0   +5.0  +9.3 +11.5       +10.3
//             Mochi          2     4     6     8      3n    4n    5n (here)  6n    7n    8n
//             dense        -1.1  +1.6  -0.2  -1.0   +0.7  +2.0  +3.5       +2.1  +0.2  +0.6
//             50 % budgets -1.1  +0.8  +0.3  -1.6   +3.1  +4.7  +7.4       +3.4  +1.1  +1.4
//             20 % budgets -0.2  +2.0  +2.4  +0.3   +3.8  +4.7  +7.3       +4.4  +2.9  +2.7
//             10 % budgets +0.5  +2.4  +3.2  +1.4   +3.9  +4.6  +6.4       +5.4  +4.1  +3.3
//             Lost: one line instead of the mean of two (three instructions instead of five, +14.7 dense for 4 of 8) for 4 % more
//                   error of the outputs; fixed tiles side by side, 1 to 3 % less at Mochi; at head_dim 64 the values of the first
//                   block early, 3 % less, and three lone warpgroups, 7 % less
//             Turns gained 7 % and fills by moves 3 % while all exponentials were MUFU's (above): not any more.
//             Lost, against 4effa86: scores of pseudo-keys in a fixed unit of log2, so that masked maxima are integers, too, and a
//                   pooled step is 595 instead of 653 instructions long (642 of 702 at head_dim 128): Mochi dense -2.4, 20 % with
//                   budgets -2.5, as ptxas orders the loop anew; CogVideoX-2B +0.3 -0.7. Two and a half float instructions for a
//                   pseudo-key's score instead of three (624, 687): -0.2 +1.5, +0.9 -1.1, which is noise
//             Nothing to gain, against 0fe6e38, attend alone: no mask for whole blocks of a masked step, Mochi +2.0 +0.9 -0.6 +0.4,
//                   CogVideoX-2B +0.2 +0.1 +0.3 +0.0; with that, integer maxima in masked steps unless pooled, -1.0 -0.6 -1.1 -4.0,
//                   +0.2 0.0 0.0 -0.2
//             Likewise, against b313120: Mochi +0.4 +1.4 -0.2 +1.8, CogVideoX-2B +0.1 +1.1 +1.3 +1.5 when an item's end is shorter:
//                   V's means and scales loaded once for both rows (+0.1 +0.5 +0.8 +0.4 alone at CogVideoX-2B), pairs exchanged
//                   through shared memory by stmatrix instead of shuffles and selects, its first maxima as integers: kept. In turns,
//                   in one process; the Mochi shape differs by 5 % from host to host, and by more than that as a GPU warms up
//             Lost, against that: Mochi +1.0 -0.4 +1.2 -1.2, CogVideoX-2B -3.5 -2.5 -1.9 -6.2 with one loop over the steps of all
//                   items, which starts the first scores of the next beside the last values of an item. Nothing to gain: one
//                   warpgroup 1.5 us behind the other
//             How ptxas orders the loop, against 37db7d4, calls in a row at the power limit, % faster at Mochi dense, Mochi 50 %,
//             wan480 20 % with budgets, CogVideoX-2B 20 % with budgets, bits the same but for fixed tiles:
//             +3.1 +2.6 +0.6 -0.9 the kernel of c3e52f9, without the background, the short end of an item and masks of whole
//                   blocks. Its way round the loop is ten instructions longer; none of the three alone is what it gains:
//                   +0.2 -0.4 +0.3 +0.6, +0.1 -0.3 -0.7 -1.4, -0.2 +0.3 -0.2 -0.4. A call of Mochi in ComfyUI, topk .5, takes 1.0 %
//                   less (1.822 and 1.827 s instead of 1.840 and 1.842, two GPUs, in turns)
//             +0.5 +0.3 -0.3 -5.2, +0.6 +0.3 0.0 -1.3, +3.3 +2.7 +0.5 -0.3, -1.0 -1.4 -1.5 -3.3 with 3, 4, 6, 8 fixed tiles
//             +2.2 +2.1 +1.1 +0.3 the upper half of a register of P is computed before the lower: kept. At head_dim 64 dense +1.4,
//                   Mochi 20 % +0.6. As much at head_dim 128, and alone, no two together more: tiles in descending order (+2.8 +2.3
//                   +0.7 -0.1), the first maximum settled before the values start (+2.9 +2.0 +1.1 +0.9, but CogVideoX-2B dense
//                   -1.0), first_row() where an item begins (+2.7 +2.1 +0.6 +0.8). 67 instructions lie between the first and the
//                   second product of a block's scores, as ptxas fills the wait for the accumulator. Where data dependencies
//                   start all eight at once: -2.9 to +0.2 at Mochi, -4.8 to -2.4 at Wan, -3 to -16 at CogVideoX-2B
//             H100, in turns, at the power limit, with that: 3 stages at head_dim 128 instead of 5, which fit: Mochi dense +1.8 (standard
//             error .1), 20 % +.4 (.3), with budgets +.2 (.3) and +.6 (.1), 10 % +.1 (.9), wan480 20 % with budgets +.1 (.4), a lone
//             Flux call -.5: kept. 4: as 5
//             H100, in turns, against da8982b, with bounds of scales in the feeder, which change ptxas' order at head_dim 128: dense
//             wan720 -.9, hunyuan -1.9, Mochi 20 % -.8; there with first_row() where an item begins +.7, -.2, -.4: kept. At head_dim
//             64 that costs .5 to .7, and the order is that of da8982b without
//             Sums promoted every n steps, a row's ceiling raised only by logits above it, and then by 2 more octaves (h: 1, 3),
//             scores of the second block after its exponentials, for lack of registers; H100, at the power limit, against 78dd286,
//             Mochi dense, wan480 and Mochi 20 % with budgets, CogVideoX-2B 20 % and dense; single runs differ by up to 2 %:
//             n = 2  -2.5 -3.0 -1.2 -4.5 -4.0     4  +3.6 -0.1 +1.1 -4.3 -1.7     8  +3.6 -1.1 +0.5 -3.7 -1.0
//             h = 1  -1.0 -1.7 -0.5 -4.3 -3.1     3  +3.4 -1.9 +0.3 -3.3 -1.5
//                   Errors on noise grow by .5 to 2 % for n = 4, most of it by the headroom, on drifting values by 2 to 3 %, for
//                   n = 8 by 1 to 3 and 9 to 16 %: lost. With the earlier sums in shared memory instead, where a promotion moves 64 KB
//                   each way, half a step: n = 4 -1.1 -4.3 -5.1 -6.0 -3.9, n = 8 +2.7 +0.2 0.0 -3.1 -0.7; there with both blocks'
//                   scores as one product of 128 keys, n = 4: -5.2 -4.5 -4.6 -8.6 -8.1. Queries in registers, 4 of their 16 or all:
//                   spills at head_dim 128
//             Profile of CogVideoX-2B, 20 % with budgets, at d540d1d (in turns, all exponentials by MUFU), 1,600 clocks a step and
//             warp: 66 MUFU take 820, one in 10 (alone) to 11.6; 168 exponents and fills before the turn, 55 the turn itself, 110
//             maxima and 128 their shuffles beside the values' products, 95 to issue those, 84 promotion. A pooled step costs 1.5 of
//             others; items 8 % beside their steps.
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
