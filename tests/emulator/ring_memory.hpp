// The shared memory of the kernels of decode_ring.cuh, one array for all of them: decode_test.cpp has it.
#pragma once

#include <cstdint>

#include "emulator/gpu.hpp"

namespace nibble::cuda {
extern std::uint8_t shared[emulator::kSharedBytes];
}  // namespace nibble::cuda
