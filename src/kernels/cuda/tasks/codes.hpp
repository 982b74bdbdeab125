// D[M,N] of activations that are codes and weights of any integer code and group, without tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/codes_task.hpp"

namespace nibble::cuda {

/// Any M, N, K, block of activations, alignment and GPU. A row's bits depend neither on M nor on the other rows.
cudaError_t linear_codes_simt(const CodesTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
