#pragma once

namespace nibble::cuda {

/// Hides x from the optimiser, so that values derived from it are recomputed at each use and not kept in registers.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace nibble::cuda
