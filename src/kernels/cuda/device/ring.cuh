// A place in a ring of stages.
#pragma once

#include <cstdint>

namespace nibble::cuda {

/// A place in a ring and the parity of its current use.
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
