// What the cost model of convolutions exports, for bench/gpu_features.cpp.
#pragma once

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// The time of the steps before the product of codes: quantizing or copying images, and summing codes.
double code_images_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
