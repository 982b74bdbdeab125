// D[M,N] = epilogue(Â[M,K] · Wᵀ) of activations that were quantized while running, and weights in the layout gpu_n64k128: online
// quantization. No layout of its own: the same packed weight serves activations as they are and as codes.
//
//   quantize_acts   A ──▶ codes s8 [M][pitch]        of each 16 channels in the order of gpu_tile::interleaved
//                         terms    [K/fold][tokens]  {s_a, s_a·Σa} of a token's `fold` channels, or {s_a, Σ(a − z) and z}; of two tokens
//                                                    first both scales: what is not needed is not read
//   GEMM            Σ over folds of  s_a·s_w·Σ (a − z_a)·(u − base)  +  s_a·Σ(a − z_a) · (o − s_w·(z_w − base))
//
// A token's scale that is the same in all of K stands in front of the sum over folds: it is 1 in the terms, and beside them in an array.
//
// Zero points of activations z_a, where there are any, are taken out of the sum: Σ a·u − z_a·Σ u, integers still.
//
// A fold is as many channels as have one scale on both sides: 128, for groups of 128 and more, or 32. What is in brackets under the sum
// is an integer, and exact. Folds are added in the order of K, in f32.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::cuda {

/// For devices without sm_90's matrix engine. A row's bits depend neither on M nor on the other rows.
cudaError_t linear_online_sm80(const OnlineTask& task, cudaStream_t stream);
/// For sm_90. A row's bits depend on config.split and config.depth, but neither on M nor on the other rows.
cudaError_t linear_online_sm90(const OnlineTask& task, const GemmConfig& config, cudaStream_t stream);

/// For sm_90 and few rows: quantizes in front of its products, in the same launch. Laid out for `tokens` a launch, 8 at most; M may be any. A
/// row's bits depend on `tokens` and the GPU, which choose how CTAs share K, but neither on M nor on the other rows. Fails with
/// cudaErrorInvalidConfiguration when nothing fits.
cudaError_t linear_online_decode_sm90(const OnlineDecodeTask& task, int tokens, cudaStream_t stream);

}  // namespace nibble::cuda
