// D[M,N] = epilogue(x[M,K] · Wᵀ) with f32 activations, as pairs of f16, and weights in gpu_n64k128 that are not rounded: integers without
// zeros or with integer zeros, e4m3, e2m1.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/pair_task.hpp"

namespace nibble::cuda {

/// For sm_90, with 16 to 128 tokens a pass. A row's bits depend on config.split and config.depth, but neither on M nor on the other rows, save
/// with stream-K.
cudaError_t linear_pairs_sm90(const PairTask& task, const GemmConfig& config, cudaStream_t stream);

}  // namespace nibble::cuda
