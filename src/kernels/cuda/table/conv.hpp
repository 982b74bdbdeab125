// Rows of the kernel table for convolutions on the GPU.
#pragma once

#include <span>

#include "kernels/kernel.hpp"

namespace nibble::cuda {

std::span<const Kernel> conv_kernels();

}  // namespace nibble::cuda
