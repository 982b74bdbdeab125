// D[64,N] += A[64,16] · B[16,N] by a warpgroup: A in registers, B in shared memory, 16-bit operands, f32 sums.
//
// A is held by four warps, as four m16k16 fragments of mma.sync (gpu_tile.hpp). B is N rows of 64 channels, 128 bytes each, as TMA leaves
// them with the 128-byte swizzle, or planar (wgmma_planar_low): for every 64 columns, 64 rows of that many, a row a channel. A lane's sums
// d[4j … 4j+3]: rows g, g, g+8, g+8 of its warp's 16, columns 8j + 2t and 8j + 2t + 1.
//
// The instruction is asynchronous: it reads its operands and writes its sums until wgmma_wait returns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace nibble::cuda {

/// Registers written so far are visible to the instructions that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// At most kPending of the latest groups are still running.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// No group is running any more. The sums are operands of the asm, so that the compiler does not move reads of them before it.
template <class Sum, int kCount>
__device__ __forceinline__ void wgmma_wait_for(Sum (&sums)[kCount]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if constexpr (std::is_same_v<Sum, float>)
      asm volatile("" : "+f"(sums[i]));
    else
      asm volatile("" : "+r"(sums[i]));
}

/// High halves of operand descriptors: rows of 128 or 64 bytes with the swizzle of that width, and the distance of eight rows.
constexpr std::uint32_t kWgmmaRows128 = 1u << 30 | 1024 / 16, kWgmmaRows64 = 1u << 31 | 512 / 16;
/// Describes B at `address`: a multiple of 1024 for channel 0, 32 more for every 16 channels. The low half counts in 16 bytes.
__device__ inline std::uint32_t wgmma_operand_low(std::uint32_t address) { return address >> 4 | 1u << 16; }
__device__ inline std::uint64_t wgmma_operand(std::uint32_t low) {
  std::uint64_t operand;
  asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(low), "n"(kWgmmaRows128));
  return operand;
}

/// The same for a planar B: a channel's 64 columns are 128 bytes, the next 64 columns begin kWgmmaPlanarBytes on. Every 16 channels are
/// kWgmmaPlanarStep bytes more.
constexpr std::uint32_t kWgmmaPlanarBytes = 64 * 128, kWgmmaPlanarStep = 16 * 128;
__device__ inline std::uint32_t wgmma_planar_low(std::uint32_t address) { return address >> 4 | kWgmmaPlanarBytes / 16 << 16; }

/// The same for the rows that `high` describes.
__device__ inline std::uint64_t wgmma_operand(std::uint32_t low, std::uint32_t high) {
  std::uint64_t operand;
  asm("mov.b64 %0, {%1, %2};" : "=l"(operand) : "r"(low), "r"(high));
  return operand;
}

template <int kN>
struct Wgmma;

// The operand lists of inline assembly are literal: %0 … are the sums, then a[0 … 3] and the descriptor.
// One line per step of the table, whatever its length.
// clang-format off
#define NIBBLE_NAMES8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define NIBBLE_NAMES_8 NIBBLE_NAMES8(0, 1, 2, 3, 4, 5, 6, 7)
#define NIBBLE_NAMES_16 NIBBLE_NAMES_8 \
  "," NIBBLE_NAMES8(8, 9, 10, 11, 12, 13, 14, 15)
#define NIBBLE_NAMES_24 NIBBLE_NAMES_16 \
  "," NIBBLE_NAMES8(16, 17, 18, 19, 20, 21, 22, 23)
#define NIBBLE_NAMES_32 NIBBLE_NAMES_24 \
  "," NIBBLE_NAMES8(24, 25, 26, 27, 28, 29, 30, 31)
#define NIBBLE_NAMES_48 NIBBLE_NAMES_32 \
  "," NIBBLE_NAMES8(32, 33, 34, 35, 36, 37, 38, 39) \
  "," NIBBLE_NAMES8(40, 41, 42, 43, 44, 45, 46, 47)
#define NIBBLE_NAMES_64 NIBBLE_NAMES_48 \
  "," NIBBLE_NAMES8(48, 49, 50, 51, 52, 53, 54, 55) \
  "," NIBBLE_NAMES8(56, 57, 58, 59, 60, 61, 62, 63)
#define NIBBLE_NAMES_128 NIBBLE_NAMES_64 \
  "," NIBBLE_NAMES8(64, 65, 66, 67, 68, 69, 70, 71) \
  "," NIBBLE_NAMES8(72, 73, 74, 75, 76, 77, 78, 79) \
  "," NIBBLE_NAMES8(80, 81, 82, 83, 84, 85, 86, 87) \
  "," NIBBLE_NAMES8(88, 89, 90, 91, 92, 93, 94, 95) \
  "," NIBBLE_NAMES8(96, 97, 98, 99, 100, 101, 102, 103) \
  "," NIBBLE_NAMES8(104, 105, 106, 107, 108, 109, 110, 111) \
  "," NIBBLE_NAMES8(112, 113, 114, 115, 116, 117, 118, 119) \
  "," NIBBLE_NAMES8(120, 121, 122, 123, 124, 125, 126, 127)
#define NIBBLE_SUMS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NIBBLE_SUMS_16(i) NIBBLE_SUMS_8(i), NIBBLE_SUMS_8(i + 8)
#define NIBBLE_SUMS_24(i) NIBBLE_SUMS_16(i), NIBBLE_SUMS_8(i + 16)
#define NIBBLE_SUMS_32(i) NIBBLE_SUMS_16(i), NIBBLE_SUMS_16(i + 16)
#define NIBBLE_SUMS_48(i) NIBBLE_SUMS_32(i), NIBBLE_SUMS_16(i + 32)
#define NIBBLE_SUMS_64(i) NIBBLE_SUMS_32(i), NIBBLE_SUMS_32(i + 32)
#define NIBBLE_SUMS_128(i) NIBBLE_SUMS_64(i), NIBBLE_SUMS_64(i + 64)

#define NIBBLE_WGMMA_TYPE(kN, type, keep, sums, a0, a1, a2, a3, b0, t0)                                  \
  asm volatile("{.reg .pred none; setp.ne.b32 none, 0, 0; wgmma.mma_async.sync.aligned.m64n" #kN "k16.f32." type "." type " {" NIBBLE_NAMES_##sums \
               "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", " #keep ", 1, 1, %" #t0 ";}"         \
               : NIBBLE_SUMS_##sums(0)                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kPlanar))
#define NIBBLE_WGMMA_FUNCTION(name, keep, kN, sums, a0, a1, a2, a3, b0, t0)                                            \
  template <class Act, int kPlanar = 0>                                                                                \
  __device__ static __forceinline__ void name(float (&d)[sums], const std::uint32_t (&a)[4], std::uint64_t b) {        \
    if constexpr (std::is_same_v<Act, __half>)                                                                         \
      NIBBLE_WGMMA_TYPE(kN, "f16", keep, sums, a0, a1, a2, a3, b0, t0);                                                \
    else                                                                                                               \
      NIBBLE_WGMMA_TYPE(kN, "bf16", keep, sums, a0, a1, a2, a3, b0, t0);                                                   \
  }
/// begin: d = a · b; add: d += a · b. kPlanar: 1 where b is planar, else 0.
#define NIBBLE_WGMMA(kN, ...)                       \
  template <>                                       \
  struct Wgmma<kN> {                                \
    NIBBLE_WGMMA_FUNCTION(begin, none, kN, __VA_ARGS__) \
    NIBBLE_WGMMA_FUNCTION(add, 1, kN, __VA_ARGS__)  \
  };

NIBBLE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
NIBBLE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
NIBBLE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
NIBBLE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
NIBBLE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
NIBBLE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
NIBBLE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

// clang-format on
#undef NIBBLE_WGMMA
#undef NIBBLE_WGMMA_FUNCTION
#undef NIBBLE_WGMMA_TYPE

}  // namespace nibble::cuda
