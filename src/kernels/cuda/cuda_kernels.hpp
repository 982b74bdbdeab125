// The CUDA kernel family. Its rows are in every build; without CUDA, or without a GPU that runs them, they refuse.
#pragma once

#include <span>

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

std::span<const Kernel> kernels();

/// Predicted microseconds of a linear kernel of level `isa` on a GPU.
double linear_cost_us(Isa isa, int tokens, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
