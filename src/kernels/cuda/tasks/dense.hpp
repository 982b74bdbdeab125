// Dense weights on every GPU, in f32 arithmetic.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/dense_task.hpp"

namespace nibble::cuda {

/// x and W are any of f32, f16 and bf16 and are not rounded; every product and sum is f32. A row's bits depend neither on M nor on the other
/// rows.
cudaError_t linear_dense_simt(const DenseTask& task, cudaStream_t stream);
/// W → `out` [N,K] or (transposed) [K,N] of f32, f16 or bf16, rows `out_stride` elements apart.
cudaError_t dequantize_dense(const DenseWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                             cudaStream_t stream);

}  // namespace nibble::cuda
