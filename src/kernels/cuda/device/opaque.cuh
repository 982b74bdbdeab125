#pragma once

#include <cstdint>

namespace nibble::cuda {

/// Hides x from the optimiser, so that values derived from it are recomputed at each use and not kept in registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Orders the computation of v before this point and its uses after it: if an operand register is written between a wgmma_fence and the
/// products that follow, ptxas serialises the products.
__device__ inline void pin(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory"); }
__device__ inline void pin(std::uint32_t (&v)[4]) { asm volatile("" : "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])::"memory"); }

}  // namespace nibble::cuda
