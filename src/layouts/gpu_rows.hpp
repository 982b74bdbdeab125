// Index maths of the GPU layout gpu_rows, of dense weights: W[N,K] as it is, whose rows begin at multiples of 8 numbers, so that 16 bytes at
// a time are read, and cuBLASLt takes its fast kernels, whatever K is.
#pragma once

#include <cstdint>

#include "layouts/layout.hpp"

namespace nibble {

extern const Layout kGpuRowsLayout;

namespace gpu_rows {

/// Numbers between rows of K.
constexpr std::int64_t stride(std::int64_t k) { return (k + 7) / 8 * 8; }

}  // namespace gpu_rows
}  // namespace nibble
