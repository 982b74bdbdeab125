// D[M,N] = epilogue(x[M,K] · Wᵀ) for few rows and 4- or 8-bit weights in the layout gpu_n64k128: bounded by reading the weights.
// x is f16 or bf16; more than 16 rows take several launches.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

constexpr int kDecodeTokens = 16;  // of one launch, at most

/// The configuration of a launch on sm_90, a plain value. The bits of a result depend on `split` only, which depends on the weight's shape
/// and format, on `tokens` and on the GPU, not on M.
struct DecodeConfig {
  int tokens = kDecodeTokens;  // the capacity of a launch; fewer leave a longer ring
  int split = 0;               // CTAs of a cluster that share a row tile along K; 0: chosen
  int grid = 0;                // CTAs; chosen
  int stages = 0;              // of the ring, eight records each; chosen
  int smem = 0;                // bytes of a CTA; 0: chosen
};
/// Fails with cudaErrorInvalidConfiguration when no configuration fits.
cudaError_t configure_decode_sm90(const LinearTask& task, DecodeConfig& config);
cudaError_t linear_decode_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream);
/// With a capacity of `tokens` a launch; M may be any.
cudaError_t linear_decode_sm90(const LinearTask& task, int tokens, cudaStream_t stream);

/// For devices without TMA.
cudaError_t linear_decode_sm80(const LinearTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
