// f32 activations → 24-bit fixed point on the GPU, as three rows of codes for products with gpu_n64k128.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/quantize_task.hpp"

namespace nibble::cuda {

/// Rows 3t, 3t + 1 and 3t + 2 of codes and terms become the low, the middle and the high byte of token t. Of `task` it reads A, which is f32,
/// the places of the codes and of their terms, which are pairs, and the fold; columns are a multiple of 128. With digit_codes these rows are
/// of three images instead, their terms no pairs, and columns are a multiple of the fold.
cudaError_t fixed_point_acts(const QuantizeTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
