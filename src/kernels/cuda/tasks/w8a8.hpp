// D[M,N] of 8-bit codes on both sides, without tensor cores.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/w8a8_task.hpp"

namespace nibble::cuda {

/// Any M, N, K, alignment and GPU. A row's bits depend neither on M nor on the other rows.
cudaError_t linear_w8a8_simt(const W8A8Task& task, cudaStream_t stream);
/// The same with the matrix instructions of compute capability 8.0 and later. Of integers `split` CTAs divide K of a tile, fewer where there are
/// fewer records; their sums meet before task.scratch_end (w8a8_sm80.hpp), and are the same without a split.
cudaError_t linear_w8a8_sm80(const W8A8Task& task, int split, cudaStream_t stream);
/// The same of rows of experts, in tiles of up to `rows`: one of kSm80ExpertRows.
cudaError_t linear_w8a8_sm80_experts(const W8A8Task& task, int rows, cudaStream_t stream);

/// The configuration of a row of the kernel table for sm_90: plain values.
struct W8A8Config {
  int tokens = 128;  // n of the matrix instruction: 16, 32, 64, 128 or 256 a pass
  int blocks = 4;    // row blocks of 64 that a CTA multiplies at a time
  int depth = 1;     // warpgroups that share K; more than 1 up to 32 tokens only. blocks · depth ≤ w8a8_groups(tokens)
  int split = 1;     // CTAs of a cluster that share K: 1, 2, 4 or 8; at most tokens / 8 · blocks; kStreamK
};
/// With wgmma on sm_90; cudaErrorInvalidAddressSpace if TMA cannot read the codes. With integers the bits do not depend on config, with
/// e4m3 they do, but neither on M nor on the other rows, save with stream-K.
cudaError_t linear_w8a8_sm90(const W8A8Task& task, const W8A8Config& config, cudaStream_t stream);
/// The same of integers for 16-bit floats with one scale, which become the codes that quantize_acts() makes of them, `blocks` row blocks (1 or
/// 2) a pass: the bits of the two steps. The weight has no zero points.
cudaError_t linear_w8a8_sm90_floats(const W8A8Task& task, const FloatActs& floats, int blocks, cudaStream_t stream);

}  // namespace nibble::cuda
