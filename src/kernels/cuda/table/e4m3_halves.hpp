// FP8 activations × weights that are not FP8, on tensor cores: an e4m3 number is an f16 number, too.
#pragma once

#include "kernels/cuda/tasks/linear_task.hpp"
#include "kernels/kernel.hpp"

namespace nibble::cuda {

/// Gives the task of a kernel of f16 activations the prepared numbers of FP8 codes, in the weight's order of channels, and their scales.
void take_e4m3_halves(const StepArgs& args, LinearTask& task);

}  // namespace nibble::cuda
