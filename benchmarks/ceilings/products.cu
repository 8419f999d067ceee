// SPDX-License-Identifier: Apache-2.0
// How many products a second the tensor cores of sm_90a sustain: one shape of wgmma again and again, on operands that lie
// in shared memory (A in registers where PRODUCT_A_IN_REGISTERS says so). Bytes are random, for zeros draw less power.
#include "../../csrc/ptx/cp_async.cuh"
#include "../../csrc/ptx/mbarrier.cuh"
#include "../../csrc/ptx/wgmma.cuh"

#ifndef PRODUCT_E4M3
#define PRODUCT_E4M3 0
#endif
#ifndef PRODUCT_COLUMNS
#define PRODUCT_COLUMNS 128
#endif
#ifndef PRODUCT_A_IN_REGISTERS
#define PRODUCT_A_IN_REGISTERS 0
#endif

#if PRODUCT_E4M3
#define TYPES "f32.e4m3.e4m3"
#define TAIL ", 1, 1"
#define INOUT "+f"
using Sum = float;
constexpr unsigned kByteMask = 0xBFBFBFBF;  // below 2 in magnitude: no NaN
#else
#define TYPES "s32.s8.s8"
#define TAIL ""
#define INOUT "+r"
using Sum = int;
constexpr unsigned kByteMask = 0xFFFFFFFF;
#endif

#define EIGHT(at)                                                                                                           \
  INOUT(d[at]), INOUT(d[at + 1]), INOUT(d[at + 2]), INOUT(d[at + 3]), INOUT(d[at + 4]), INOUT(d[at + 5]), INOUT(d[at + 6]), \
      INOUT(d[at + 7])
#define HALF(at) EIGHT(at), EIGHT(at + 8), EIGHT(at + 16), EIGHT(at + 24)
#define HALF_NAMES \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#if PRODUCT_COLUMNS == 64
#define SHAPE "m64n64k32."
#define SUMS HALF(0)
#define NAMES HALF_NAMES
#define SHARED_OPERANDS "%32, %33"
#define REGISTER_OPERANDS "{%32,%33,%34,%35}, %36"
#else
#define SHAPE "m64n128k32."
#define SUMS HALF(0), HALF(32)
#define NAMES                                                                                                         \
  HALF_NAMES                                                                                                          \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define SHARED_OPERANDS "%64, %65"
#define REGISTER_OPERANDS "{%64,%65,%66,%67}, %68"
#endif
#define PRODUCT(operands)                                                                                                        \
  "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\nwgmma.mma_async.sync.aligned." SHAPE TYPES " {" NAMES "}, " operands ", add" TAIL \
  ";\n}\n"

namespace {

using namespace sparge;

constexpr int kGroupThreads = 128, kGroups = 2, kThreads = kGroups * kGroupThreads;
constexpr int kRowBytes = 128, kDepthSteps = kRowBytes / 32;
constexpr int kRepeats = 8;  // of the steps in flight together
constexpr int kSums = PRODUCT_COLUMNS / 2;

struct Params {
  Sum* sums;  // (blocks, kThreads): the last of a thread's, so that no product is left out
  i32 rounds;
  u32 fill;  // all operands' words; 0: random ones
};

struct Smem {
  u8 a[kGroups][64 * kRowBytes];
  u8 b[PRODUCT_COLUMNS * kRowBytes];
};

SPARGE_DEVICE u32 random_word(u32 seed) {
  seed = (seed ^ seed >> 16) * 0x7FEB352Du;
  seed = (seed ^ seed >> 15) * 0x846CA68Bu;
  return seed ^ seed >> 16;
}

SPARGE_DEVICE u32 operand_word(const Params& p, u32 place) { return p.fill ? p.fill : random_word(place) & kByteMask; }

SPARGE_DEVICE void multiply(Sum (&d)[kSums], u64 a, const u32 (&rows)[4], u64 b) {
#if PRODUCT_A_IN_REGISTERS
  asm volatile(PRODUCT(REGISTER_OPERANDS) : SUMS : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(b));
#else
  asm volatile(PRODUCT(SHARED_OPERANDS) : SUMS : "l"(a), "l"(b));
#endif
}

}  // namespace

extern "C" __device__ const LaunchInfo launch_info = {kThreads, sizeof(Smem)};

extern "C" __global__ void __launch_bounds__(kThreads, 2) products(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 shared[];
  auto& smem = *reinterpret_cast<Smem*>(shared);
  for (u32 word = threadIdx.x; word < sizeof(Smem) / 4; word += kThreads)
    reinterpret_cast<u32*>(shared)[word] = operand_word(p, word);
  ptx::fence_proxy_async();
  __syncthreads();

  const u32 a = ptx::descriptor_address(ptx::shared_address(smem.a[threadIdx.x / kGroupThreads]));
  const u32 b = ptx::descriptor_address(ptx::shared_address(smem.b));
  u32 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = operand_word(p, threadIdx.x * 4 + i);
  Sum d[kSums] = {};
  for (i32 round = 0; round < p.rounds; ++round) {
    ptx::in_flight(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int repeat = 0; repeat < kRepeats; ++repeat)
#pragma unroll
      for (int step = 0; step < kDepthSteps; ++step)
        multiply(d, ptx::operand_descriptor<kRowBytes>(a + step * ptx::kKStep), rows,
                 ptx::operand_descriptor<kRowBytes>(b + step * ptx::kKStep));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::in_flight(d);
  }
  p.sums[blockIdx.x * kThreads + threadIdx.x] = d[kSums - 1];
}
