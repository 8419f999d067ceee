// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of sm_90a, D (+)= A * B: A 64 rows x 32 bytes from registers or shared memory, B from shared
// memory, both K-major. Asynchronous: D and the registers of A may be touched only after wgmma_wait.
#pragma once

#include "../common/types.cuh"

namespace sparge::ptx {

SPARGE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SPARGE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Leaves at most kPending groups in flight.
template <int kPending>
SPARGE_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: tells the compiler, which does not know that products are asynchronous, that the registers change here.
template <int kCount>
SPARGE_DEVICE void in_flight(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int kCount>
SPARGE_DEVICE void in_flight(i32 (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Four registers of their own from 16 bytes of shared memory, loaded anew each time.
SPARGE_DEVICE void load_registers(i32* registers, u32 source) {
  asm volatile("ld.volatile.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(source));
}

#define SPARGE_REGISTERS_4(constraint, d, at) \
  constraint((d)[(at)]), constraint((d)[(at) + 1]), constraint((d)[(at) + 2]), constraint((d)[(at) + 3])
#define SPARGE_REGISTERS_8(constraint, d, at) SPARGE_REGISTERS_4(constraint, d, at), SPARGE_REGISTERS_4(constraint, d, (at) + 4)
#define SPARGE_REGISTERS_32(constraint, d, at)                                        \
  SPARGE_REGISTERS_8(constraint, d, at), SPARGE_REGISTERS_8(constraint, d, (at) + 8), \
      SPARGE_REGISTERS_8(constraint, d, (at) + 16), SPARGE_REGISTERS_8(constraint, d, (at) + 24)
#define SPARGE_NAMES_32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SPARGE_NAMES_64                                                                                               \
  SPARGE_NAMES_32                                                                                                     \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

SPARGE_DEVICE void wgmma_m64n64k32_s8(i32 (&d)[32], u64 a, u64 b) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.eq.b32 accumulate, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {" SPARGE_NAMES_32
      "}, %32, %33, accumulate;\n"
      "}\n"
      : SPARGE_REGISTERS_32("+r", d, 0)
      : "l"(a), "l"(b));
}

SPARGE_DEVICE void wgmma_e4m3(float (&d)[68], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %73, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" SPARGE_NAMES_64
      ",%64,%65,%66,%67}, {%68,%69,%70,%71}, %72, accumulate, 1, 1;\n"
      "}\n"
      : SPARGE_REGISTERS_32("+f", d, 0), SPARGE_REGISTERS_32("+f", d, 32), SPARGE_REGISTERS_4("+f", d, 64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

SPARGE_DEVICE void wgmma_e4m3(float (&d)[36], const u32 (&a)[4], u64 b, bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %41, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 {" SPARGE_NAMES_32
      ",%32,%33,%34,%35}, {%36,%37,%38,%39}, %40, accumulate, 1, 1;\n"
      "}\n"
      : SPARGE_REGISTERS_32("+f", d, 0), SPARGE_REGISTERS_4("+f", d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<i32>(accumulate)));
}

// 16-bit numbers, sums in float32. Scores: A and B from shared memory, 128 columns, the first product of a sum overwrites.
// Values: A from registers, added to what is there.
#define SPARGE_WGMMA_16(name, type)                                                       \
  SPARGE_DEVICE void wgmma_scores_##name(float (&d)[64], u64 a, u64 b, bool accumulate) { \
    asm volatile(                                                                         \
        "{\n"                                                                             \
        ".reg .pred accumulate;\n"                                                        \
        "setp.ne.b32 accumulate, %66, 0;\n"                                               \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" SPARGE_NAMES_64 \
        "}, %64, %65, accumulate, 1, 1, 0, 0;\n"                                          \
        "}\n"                                                                             \
        : SPARGE_REGISTERS_32("+f", d, 0), SPARGE_REGISTERS_32("+f", d, 32)               \
        : "l"(a), "l"(b), "r"(static_cast<i32>(accumulate)));                             \
  }                                                                                       \
  SPARGE_DEVICE void wgmma_values_##name(float (&d)[64], const u32(&a)[4], u64 b) {       \
    asm volatile(                                                                         \
        "{\n"                                                                             \
        ".reg .pred accumulate;\n"                                                        \
        "setp.eq.b32 accumulate, 0, 0;\n"                                                 \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" SPARGE_NAMES_64 \
        "}, {%64,%65,%66,%67}, %68, accumulate, 1, 1, 0;\n"                               \
        "}\n"                                                                             \
        : SPARGE_REGISTERS_32("+f", d, 0), SPARGE_REGISTERS_32("+f", d, 32)               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }                                                                                       \
  SPARGE_DEVICE void wgmma_values_##name(float (&d)[32], const u32(&a)[4], u64 b) {       \
    asm volatile(                                                                         \
        "{\n"                                                                             \
        ".reg .pred accumulate;\n"                                                        \
        "setp.eq.b32 accumulate, 0, 0;\n"                                                 \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" SPARGE_NAMES_32  \
        "}, {%32,%33,%34,%35}, %36, accumulate, 1, 1, 0;\n"                               \
        "}\n"                                                                             \
        : SPARGE_REGISTERS_32("+f", d, 0)                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }
SPARGE_WGMMA_16(bf16, "bf16")
SPARGE_WGMMA_16(fp16, "f16")
#undef SPARGE_WGMMA_16

#undef SPARGE_REGISTERS_4
#undef SPARGE_REGISTERS_8
#undef SPARGE_REGISTERS_32
#undef SPARGE_NAMES_32
#undef SPARGE_NAMES_64

// A K-major operand in shared memory whose rows of kRowBytes lie one after another in the swizzle of common/swizzle.cuh,
// from a multiple of eight rows on. The low word of its descriptor is an address in units of 16 bytes, so that a stage
// or a k-step of 32 bytes further on is an addition; the high word is a constant.
constexpr u32 kDescriptorUnit = 16;
constexpr u32 kKStep = 32 / kDescriptorUnit;

SPARGE_DEVICE u32 descriptor_address(u32 shared_address) {
  constexpr u32 kIgnoredOffset = 1 << 16;  // between leading chunks, in swizzled layouts
  static_assert(228 * 1024 / kDescriptorUnit <= 1 << 14, "the 228 KB of an SM need no mask: a descriptor has 14 bits of address");
  return shared_address / kDescriptorUnit + kIgnoredOffset;
}

template <int kRowBytes>
SPARGE_DEVICE u64 operand_descriptor(u32 descriptor_address) {
  static_assert(kRowBytes == 64 || kRowBytes == 128, "the tensor cores swizzle rows of 64 or 128 bytes");
  constexpr u32 kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr u32 kEightRows = 8 * kRowBytes / kDescriptorUnit;
  return static_cast<u64>(kSwizzle << 30 | kEightRows) << 32 | descriptor_address;
}

}  // namespace sparge::ptx
