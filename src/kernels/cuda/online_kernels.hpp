// Rows of the kernel table that quantize activations to int8 while running and multiply them with weights in the layout gpu_n64k128.
#pragma once

#include <span>

#include "kernels/kernel.hpp"

namespace nibble::cuda {

std::span<const Kernel> online_kernels();

}  // namespace nibble::cuda
