// The CUDA kernel families. Their rows are in every build; without CUDA, or without a GPU that runs them, they refuse.
#pragma once

#include <span>

#include "kernels/kernel.hpp"

namespace nibble::cuda {
std::span<const Kernel> w8a8_kernels();
std::span<const Kernel> wna8_kernels();
std::span<const Kernel> fixed_point_kernels();
std::span<const Kernel> pair_kernels();
std::span<const Kernel> wna16_kernels();
std::span<const Kernel> e4m3_halves_kernels();
std::span<const Kernel> codes_kernels();
std::span<const Kernel> dense_kernels();
std::span<const Kernel> conv_kernels();
std::span<const Kernel> im2col_kernels();
std::span<const Kernel> recode_kernels();
std::span<const Kernel> finish_kernels();
std::span<const Kernel> norm_kernels();
}  // namespace nibble::cuda
