// What rows of convolutions have in common, and what their cost model exports, for bench/gpu_features.cpp.
#pragma once

#include "kernels/cuda/tasks/conv_task.hpp"
#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// The conditions of all rows.
Status accepts_conv(const Kernel& self, const Problem& problem);
/// A geometry in the form that kernels take.
Patches patches_of(const ConvGeometry& geometry);
/// The task without its weight, and without the rule of activations that are codes.
Result<ConvTask> images_of(const StepArgs& args);
/// Scale and zero point of activations that are or become codes, one for all of them: known, or those that the caller gives.
QuantizedActs acts_per_tensor(const StepArgs& args);

/// The time of the steps before the product of codes: quantizing or copying images, and summing codes.
double code_images_us(const GpuInfo& gpu, const Problem& problem);

}  // namespace nibble::cuda
