// A position in a ring of stages.
#pragma once

#include <cstdint>

namespace nibble::cuda {

/// A position in a ring, and the parity of its current phase.
struct Cursor {
  int stage;
  std::uint32_t parity;
  __device__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace nibble::cuda
