// SPDX-License-Identifier: Apache-2.0
// How many elements a second one kind of instruction turns out: exponentials (0), integers to float32 (1), or float32 to
// E4M3 (2). Each thread has chains that do not wait for each other.
#include "../../csrc/ptx/convert.cuh"

#ifndef SPECIAL_KIND
#define SPECIAL_KIND 0
#endif

namespace {

using namespace sparge;

constexpr int kThreads = 512, kChains = 8, kSteps = 16;

struct Params {
  float* last;  // (blocks, kThreads): so that no step is left out
  i32 rounds;
};

SPARGE_DEVICE float step(float x) {
#if SPECIAL_KIND == 0
  return ptx::exp2_approx(-x);  // tends to .641
#elif SPECIAL_KIND == 1
  return static_cast<float>(__float_as_int(x));
#else  // four elements
  return __uint_as_float(static_cast<u32>(ptx::pack_e4m3(x, 1.0f)) << 16 | ptx::pack_e4m3(1.0f, x));
#endif
}

}  // namespace

extern "C" __device__ const LaunchInfo launch_info = {kThreads, 0};

extern "C" __global__ void __launch_bounds__(kThreads) special(const __grid_constant__ Params p) {
  float x[kChains];
  for (int chain = 0; chain < kChains; ++chain) x[chain] = static_cast<float>(threadIdx.x + chain) * 0x1p-10f;
  for (i32 round = 0; round < p.rounds; ++round)
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) x[chain] = step(x[chain]);
  float sum = 0;
  for (int chain = 0; chain < kChains; ++chain) sum += x[chain];
  p.last[blockIdx.x * kThreads + threadIdx.x] = sum;
}
