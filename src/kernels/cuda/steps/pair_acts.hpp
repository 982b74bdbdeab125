// f32 activations → pairs of f16 on the GPU, for products with gpu_n64k128.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/quantize_task.hpp"

namespace nibble::cuda {

/// x ≈ (high + low)·scale, the scale a power of two of the token. Of `task` it reads A, which is f32, and the places: codes are rows of f16,
/// `pitch` bytes apart, of 64 channels' high parts, their low parts, and so on; columns are a multiple of 64. token_scales receives the scales.
cudaError_t pair_acts(const QuantizeTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
