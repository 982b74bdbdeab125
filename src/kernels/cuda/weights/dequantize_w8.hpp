// W as f16, bf16 or f32 from a weight packed as gpu_w8n64k128.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/w8a8_task.hpp"

namespace nibble::cuda {

/// As dequantize_packed().
cudaError_t dequantize_w8(const W8Weight& weight, void* out, DType out_type, std::int64_t stride, bool transposed,
                          cudaStream_t stream);

}  // namespace nibble::cuda
