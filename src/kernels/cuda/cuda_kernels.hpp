// The CUDA kernel family. Its rows are in every build; without CUDA, or without a GPU that runs them, they refuse.
#pragma once

#include <span>

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

std::span<const Kernel> kernels();

/// The current GPU, for costs. Asked of problems that accepts_common has accepted: there is one then.
GpuInfo current_gpu();
constexpr double kLaunchUs = 1.5;  // what remains of a launch in a stream or graph of them

/// Predicted microseconds of a linear kernel of level `isa` on a GPU.
double linear_cost_us(Isa isa, int tokens, const GpuInfo& gpu, const Problem& problem);
/// Of sm_90's wgmma kernels: `tokens` × `rows` outputs a pass of a CTA, `split` of which share it along K.
double wgmma_cost_us(int tokens, int rows, int split, const GpuInfo& gpu, const Problem& problem);
double gemm_sm80_cost_us(const GpuInfo& gpu, const Problem& problem);
/// Of the dense tier.
double dense_cost_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
