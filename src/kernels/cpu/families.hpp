// The CPU kernel families.
#pragma once

#include <span>

#include "kernels/kernel.hpp"

namespace nibble::cpu {
std::span<const Kernel> bf16_kernels();
std::span<const Kernel> dot_kernels();
std::span<const Kernel> float_kernels();
std::span<const Kernel> conv_kernels();
std::span<const Kernel> dequantize_kernels();
std::span<const Kernel> prepare_kernels();
std::span<const Kernel> recode_kernels();
std::span<const Kernel> finish_kernels();
std::span<const Kernel> norm_kernels();
}  // namespace nibble::cpu
