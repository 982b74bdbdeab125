// D[64,N] += A[64,32] · B[32,N] by a warpgroup: both operands in shared memory, 8-bit codes, s32 or f32 sums.
//
// A is 64 rows, B is N rows, of 128 channels: 128 bytes each with the 128-byte swizzle, as gpu_w8.hpp lays records out and TMA leaves
// activations. Both are described as wgmma.cuh describes B; 32 channels are 32 bytes, two units of a descriptor. A lane's sums are those
// of wgmma.cuh.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/wgmma.cuh"

namespace nibble::cuda {

struct S8 {
  using Sum = std::int32_t;
};
struct E4m3 {
  using Sum = float;
};

template <class Code, int kN>
struct Wgmma8;

// One line per step of the table, whatever its length.
// clang-format off
#define NIBBLE_SUMS8_8(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define NIBBLE_SUMS8_16(c, i) NIBBLE_SUMS8_8(c, i), NIBBLE_SUMS8_8(c, i + 8)
#define NIBBLE_SUMS8_32(c, i) NIBBLE_SUMS8_16(c, i), NIBBLE_SUMS8_16(c, i + 16)
#define NIBBLE_SUMS8_64(c, i) NIBBLE_SUMS8_32(c, i), NIBBLE_SUMS8_32(c, i + 32)
#define NIBBLE_SUMS8_128(c, i) NIBBLE_SUMS8_64(c, i), NIBBLE_SUMS8_64(c, i + 64)
#define NIBBLE_SUM_INT "+r"
#define NIBBLE_SUM_FLOAT "+f"
#define NIBBLE_NEW_INT "=&r"
#define NIBBLE_NEW_FLOAT "=&f"

#define NIBBLE_WGMMA8_FUNCTION(name, keep, Code, c, types, scales, kN, sums, ia, ib, ik)                                      \
  __device__ static __forceinline__ void name(Code::Sum (&d)[sums], std::uint32_t a, std::uint64_t b) {                       \
    asm volatile("{.reg .pred none; setp.ne.b32 none, 0, 0; wgmma.mma_async.sync.aligned.m64n" #kN "k32." types               \
                 " {" NIBBLE_NAMES_##sums "}, %" #ia ", %" #ib ", " #keep scales ";}"                                         \
                 : NIBBLE_SUMS8_##sums(c, 0)                                                                                  \
                 : "l"(wgmma_operand(a)), "l"(b));                                                                             \
  }
#define NIBBLE_WGMMA8_CHOICE(Code, c, types, scales, kN, sums, ia, ib, ik)                                                    \
  __device__ static __forceinline__ void add_if(int keep, Code::Sum (&d)[sums], std::uint32_t a, std::uint64_t b) {           \
    asm volatile("{.reg .pred keep; setp.ne.b32 keep, %" #ik ", 0; wgmma.mma_async.sync.aligned.m64n" #kN "k32." types        \
                 " {" NIBBLE_NAMES_##sums "}, %" #ia ", %" #ib ", keep" scales ";}"                                           \
                 : NIBBLE_SUMS8_##sums(c, 0)                                                                                  \
                 : "l"(wgmma_operand(a)), "l"(b), "r"(keep));                                                                  \
  }
/// begin: d = a · b, d is undefined before; renew: the same, in the registers that d has; add: d += a · b; add_if: add, or d = a · b if
/// keep = 0. a is the low half of A's descriptor, b is all of B's.
#define NIBBLE_WGMMA8(Code, c, n, types, scales, kN, ...)                         \
  template <>                                                  \
  struct Wgmma8<Code, kN> {    \
    NIBBLE_WGMMA8_FUNCTION(begin, none, Code, n, types, scales, kN, __VA_ARGS__)  \
    NIBBLE_WGMMA8_FUNCTION(renew, none, Code, c, types, scales, kN, __VA_ARGS__)  \
    NIBBLE_WGMMA8_FUNCTION(add, 1, Code, c, types, scales, kN, __VA_ARGS__)       \
    NIBBLE_WGMMA8_CHOICE(Code, c, types, scales, kN, __VA_ARGS__)                 \
  };
#define NIBBLE_WGMMA8_BOTH(...)                                             \
  NIBBLE_WGMMA8(S8, NIBBLE_SUM_INT, NIBBLE_NEW_INT, "s32.s8.s8", "", __VA_ARGS__)           \
  NIBBLE_WGMMA8(E4m3, NIBBLE_SUM_FLOAT, NIBBLE_NEW_FLOAT, "f32.e4m3.e4m3", ", 1, 1", __VA_ARGS__)

NIBBLE_WGMMA8_BOTH(16, 8, 8, 9, 10)
NIBBLE_WGMMA8_BOTH(32, 16, 16, 17, 18)
NIBBLE_WGMMA8_BOTH(64, 32, 32, 33, 34)
NIBBLE_WGMMA8_BOTH(128, 64, 64, 65, 66)
NIBBLE_WGMMA8_BOTH(256, 128, 128, 129, 130)

/// The same of s8 with A in registers: four m16k32 fragments of mma.sync in four warps.
template <int kN>
struct WgmmaS8;

#define NIBBLE_WGMMA_S8_FUNCTION(name, keep, c, kN, sums, a0, a1, a2, a3, b0)                                                    \
  __device__ static __forceinline__ void name(std::int32_t (&d)[sums], const std::uint32_t (&a)[4], std::uint64_t b) {        \
    asm volatile("{.reg .pred none; setp.ne.b32 none, 0, 0; wgmma.mma_async.sync.aligned.m64n" #kN "k32.s32.s8.s8"            \
                 " {" NIBBLE_NAMES_##sums "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b0 ", " #keep ";}"                   \
                 : NIBBLE_SUMS8_##sums(c, 0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                       \
  }
#define NIBBLE_WGMMA_S8(kN, ...)                            \
  template <>                                               \
  struct WgmmaS8<kN> {                                      \
    NIBBLE_WGMMA_S8_FUNCTION(begin, none, NIBBLE_NEW_INT, kN, __VA_ARGS__)  \
    NIBBLE_WGMMA_S8_FUNCTION(add, 1, NIBBLE_SUM_INT, kN, __VA_ARGS__)       \
  };

NIBBLE_WGMMA_S8(16, 8, 8, 9, 10, 11, 12)
NIBBLE_WGMMA_S8(32, 16, 16, 17, 18, 19, 20)
NIBBLE_WGMMA_S8(64, 32, 32, 33, 34, 35, 36)
NIBBLE_WGMMA_S8(128, 64, 64, 65, 66, 67, 68)

// clang-format on
#undef NIBBLE_WGMMA_S8
#undef NIBBLE_WGMMA_S8_FUNCTION
#undef NIBBLE_WGMMA8_BOTH
#undef NIBBLE_WGMMA8
#undef NIBBLE_WGMMA8_CHOICE
#undef NIBBLE_WGMMA8_FUNCTION

}  // namespace nibble::cuda
