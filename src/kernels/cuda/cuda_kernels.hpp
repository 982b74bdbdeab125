// The CUDA kernel family. Its rows are in every build; without CUDA, or without a GPU that runs them, they refuse.
#pragma once

#include <span>

#include "kernels/cuda/wgmma_cost.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

std::span<const Kernel> kernels();

/// The current GPU, for costs. Asked of problems that accepts_common has accepted: there is one then.
GpuInfo current_gpu();
constexpr double kLaunchUs = 1.5;  // what remains of a launch in a stream or graph of them

/// Predicted microseconds of a linear kernel of level `isa` on a GPU.
double linear_cost_us(Isa isa, int tokens, const GpuInfo& gpu, const Problem& problem);
/// Of sm_90's wgmma kernels of 16-bit activations: kTokens × kRows outputs a pass of a CTA, kSplit of which share it along K.
double floats_cost_us(const WgmmaCost& whole, const WgmmaCost& folds, const GpuInfo& gpu, const Problem& problem);
template <int kTokens, int kRows, int kSplit>
double gemm_sm90_cost_us(const GpuInfo& gpu, const Problem& problem) {
  static constexpr WgmmaCost kWhole = wgmma_cost(WgmmaFamily::floats, kTokens, kRows, kSplit);
  static constexpr WgmmaCost kFolds = wgmma_cost(WgmmaFamily::float_folds, kTokens, kRows, kSplit);
  return floats_cost_us(kWhole, kFolds, gpu, problem);
}
double gemm_sm80_cost_us(const GpuInfo& gpu, const Problem& problem);
/// Of the dense tier.
double dense_cost_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
