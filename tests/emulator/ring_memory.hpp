// The shared memory of the kernels of decode_ring.cuh, one array for all of them, defined in decode_test.cpp.
#pragma once

#include <cstdint>

#include "emulator/gpu.hpp"

namespace nibble::cuda {
extern std::uint8_t shared[emulator::kSharedBytes];
}  // namespace nibble::cuda
