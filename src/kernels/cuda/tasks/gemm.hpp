// D[M,N] = epilogue(x[M,K] · Wᵀ) for more rows than decode takes, any M ≥ 1, and 4- or 8-bit weights in the layout gpu_n64k128.
// x is f16 or bf16, which weights are rounded to.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// For devices without wgmma. `split` CTAs divide K of a tile, fewer where there are fewer records; their sums meet before task.scratch_end
/// (gemm_sm80.hpp). A row's bits depend on `split`, but neither on M nor on the other rows.
cudaError_t linear_gemm_sm80(const LinearTask& task, int split, cudaStream_t stream);
/// The same of rows of experts, in tiles of up to `rows`: one of kSm80ExpertRows.
cudaError_t linear_gemm_sm80_experts(const LinearTask& task, int rows, cudaStream_t stream);

/// The configuration of a row of the kernel table for sm_90: plain values.
struct GemmConfig {
  int tokens = 128;  // n of the matrix instruction: 16, 32, 64, 128 or 256 a pass
  int split = 1;     // CTAs of a cluster that share K: 1, 2 or 4; fewer where there are fewer records; kStreamK
  int depth = 1;     // warpgroups of a CTA that share K: 1, 2 or 4; more than 1 up to 32 tokens only
};
/// For sm_90. A row's bits depend on config.split and config.depth, but neither on M nor on the other rows, save with stream-K.
cudaError_t linear_gemm_sm90(const LinearTask& task, const GemmConfig& config, cudaStream_t stream);

}  // namespace nibble::cuda
