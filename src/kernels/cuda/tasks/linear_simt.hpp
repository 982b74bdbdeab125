// D[M,N] = x[M,K] · Wᵀ on the ordinary f32 units: for f32 activations, and for GPUs without a tensor-core kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// x is f32, f16 or bf16 and is not rounded; every product and sum is f32. Any M, N, K and GPU. A row's bits depend neither on M nor
/// on the other rows.
cudaError_t linear_simt(const LinearTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
