// Activations → 8-bit codes on the GPU for every scheme: blocks of any length, zero points and float offsets, of rows or of an image's
// patches. What quantize_acts has a faster kernel for does not come here.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/quantize_task.hpp"

namespace nibble::cuda {

/// Codes, scales, and zeros or offsets of task.m rows, of a matrix if `patches` is empty; neither sums nor terms. Where the rows of
/// patches are codes already (task.type s8 or e4m3), they are copied, and padding is the zero point.
cudaError_t quantize_blocks(const QuantizeTask& task, const PatchRows& patches, cudaStream_t stream);

}  // namespace nibble::cuda
