// SPDX-License-Identifier: Apache-2.0
// The -D inputs of a kernel as typed constants. The defaults let a bare compiler build an entry by hand. C++17, which NVRTC is told.
#pragma once

#ifndef SPARGE_ARCH
#define SPARGE_ARCH 80
#endif
#ifndef SPARGE_HEAD_DIM
#define SPARGE_HEAD_DIM 128
#endif
#ifndef SPARGE_ELEMENT
#define SPARGE_ELEMENT 0
#endif
#ifndef SPARGE_SOURCE
#define SPARGE_SOURCE 3
#endif
#ifndef SPARGE_PV_FILTER
#define SPARGE_PV_FILTER 0
#endif

#include "types.cuh"

namespace sparge {

constexpr int kArch = SPARGE_ARCH;
constexpr int kHeadDim = SPARGE_HEAD_DIM;
constexpr Element kElement = static_cast<Element>(SPARGE_ELEMENT);
constexpr bool kPvFilter = SPARGE_PV_FILTER;

static_assert(kHeadDim == 64 || kHeadDim == 128, "kernels exist for head_dim 64 and 128; others are padded up to them");
static_assert(kElement != Element::kInt8E4M3 || kArch >= 89, "E4M3 exists from sm_89 on");

#ifdef SPARGE_PARAMS_BYTES
#define SPARGE_CHECK_PARAMS(type) \
  static_assert(sizeof(type) == SPARGE_PARAMS_BYTES, #type " differs from what sparge/kernels/params.py reads")
#else
#define SPARGE_CHECK_PARAMS(type) static_assert(true, "built by hand")
#endif

}  // namespace sparge
