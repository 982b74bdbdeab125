// Rows of the kernel table that quantize activations to int8 while running and multiply them with weights in the layout gpu_n64k128.
#pragma once

#include <span>

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

std::span<const Kernel> online_kernels();

/// Predicted microseconds of the rows that quantize by themselves, `tokens` a launch.
double online_decode_cost_us(int tokens, const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
