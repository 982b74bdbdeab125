// D[M,N] = epilogue(Â[M,K] · Wᵀ) of activations that were quantized while running, or came as codes, and weights in the layout
// gpu_n64k128: online quantization. It needs no layout of its own: the same packed weight serves float activations and codes.
//
//   quantize_acts   A ──▶ codes s8 [M][pitch]        of each 16 channels in the order of gpu_tile::interleaved
//                         terms    [K/fold][tokens]  {s_a, s_a·Σa} of a token's `fold` channels, {s_a, Σ(a − z) and z}, or
//                                                    {s_a, o_a, Σx̂}; of two tokens both scales first, so that unneeded terms are not read
//   GEMM            Σ over folds of  s_a·s_w·Σ (a − z_a)·(u − base)  +  s_a·Σ(a − z_a) · (o − s_w·(z_w − base))
//
// With float offsets of activations, x̂ = s_a·a + o_a,  s_w·(s_a·Σ a·(u − base) + o_a·Σ (u − base))  +  Σx̂ · (o − s_w·(z_w − base)).
//
// A token's scale that is the same in all of K multiplies the sum over folds: it is 1 in the terms and stored in an array beside them.
//
// Zero points of activations z_a, if any, are subtracted from the sum as Σ a·u − z_a·Σ u, still in integers.
//
// A fold is as many channels as have one scale on both sides: 128, for groups of 128 and more, 32 or 16. The sums over a fold are exact
// integers. Folds are added in the order of K, in f32.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/decode_config.hpp"
#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::cuda {

/// For devices without wgmma. `split` CTAs divide K of a tile, fewer where there are fewer records; their sums meet before task.scratch_end. A
/// row's bits depend on `split`, but neither on M nor on the other rows.
cudaError_t linear_wna8_sm80(const Wna8Task& task, int split, cudaStream_t stream);
/// The same for folds of 16 channels, and for e2m1 weights, with activations without zero points or offsets and folds of 32 or 16.
cudaError_t linear_wna8_sm80_halves(const Wna8Task& task, int split, cudaStream_t stream);
cudaError_t linear_wna8_sm80_floats(const Wna8Task& task, int split, cudaStream_t stream);
/// That of these three which a task is for.
inline auto wna8_sm80_launcher(const Wna8Task& task) {
  return task.weight.codes == gpu_tile::Codes::e2m1 ? linear_wna8_sm80_floats
         : task.fold == gpu_tile::kFragmentChannels ? linear_wna8_sm80_halves
                                                    : linear_wna8_sm80;
}
/// The same of rows of experts, in tiles of up to `rows`: one of kSm80ExpertRows. Activations have no zero points or offsets.
cudaError_t linear_wna8_sm80_experts(const Wna8Task& task, int rows, cudaStream_t stream);
/// For sm_90. A row's bits depend on config.split and config.depth, but neither on M nor on the other rows.
cudaError_t linear_wna8_sm90(const Wna8Task& task, const GemmConfig& config, cudaStream_t stream);

/// For sm_90 and few rows: quantizes in the same launch, before its products. A launch takes config.tokens, 8 at most; M may be any. A
/// row's bits depend on config, but neither on M nor on the other rows.
cudaError_t linear_wna8_decode_sm90(const Wna8DecodeTask& task, const DecodeConfig& config, cudaStream_t stream);

}  // namespace nibble::cuda
