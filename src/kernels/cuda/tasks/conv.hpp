// D[B,Co,Oh,Ow] = epilogue( conv2d(A[B,Ci,H,W], W) ): the linear layer on patches. k of W is (kh·Kw + kw)·Ci/groups + ci.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/conv_task.hpp"
#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/half_out.hpp"
#include "kernels/cuda/tasks/w8a8.hpp"

namespace nibble::cuda {

/// One thread an output pixel and 8 channels: any geometry, strides, types and GPU. Of task.weight, in f32.
cudaError_t conv_direct(const ConvTask& task, cudaStream_t stream);
/// The same of task.scaled, in integers, exact modulo 2³².
cudaError_t conv_direct_s8(const ConvTask& task, cudaStream_t stream);

/// An implicit GEMM on sm_90's matrix engine: f16 or bf16, one group, channels a multiple of 64, strides of 8 at most, distances that
/// TMA can express (patches_fit). Images whose channels are not side by side are brought into that order first, in task.scratch;
/// cudaErrorInvalidAddressSpace where TMA cannot read images whose channels are. A row's bits depend neither on the batch nor on the
/// other pixels.
cudaError_t conv_gemm_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream);

/// The same with the matrix instructions of compute capability 8.0 and later: any strides, dilations and distances, channels of a group a
/// multiple of 8, and where there are groups, their output channels of 64.
cudaError_t conv_gemm_sm80(const ConvTask& task, cudaStream_t stream);

/// On sm_90's matrix engine, of task.scaled and int8 activations, exact: floats become codes in task.scratch first, and codes that cannot
/// be taken where they are move there (code_images). One group, channels a multiple of 64. The bits do not depend on config.
cudaError_t conv_scaled_sm90(const ConvTask& task, const ScaledConfig& config, cudaStream_t stream);

/// On sm_90's matrix engine, of task.weight and floats that become int8 codes in task.scratch first (online_image_map), a scale for blocks of
/// a pixel's channels or for all: wna8.hpp, of patches. One group, channels a multiple of 64 and of task.fold. A row's bits depend neither
/// on the batch nor on the other pixels.
cudaError_t conv_online_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream);

/// The same with the matrix instructions of compute capability 8.0 and later: any strides, dilations and distances, channels of a group a
/// multiple of 16, and where there are groups, their output channels of 64.
cudaError_t conv_scaled_sm80(const ConvTask& task, cudaStream_t stream);

/// to[B,H,W,C] dense, of f16, bf16 or f32 elements whose channels are a multiple of 8.
cudaError_t channels_last(const ConvTask& task, void* to, cudaStream_t stream);

/// How D leaves sm_90's kernels where its channels are not side by side.
template <class Params>
void leaves_as(const ConvTask& task, Params& p) {
  if (task.d.channel == 1) return;
  p.image_stride = task.d.image;
  p.channel_stride = task.d.channel;
  p.half = half_out(p.epilogue, p.image_stride, p.channel_stride, task.patches.pixels());
}

/// Codes as tensor cores take them: [B,H,W,C], pixels `pitch` bytes apart, at multiples of 16; padding that is left is code 0.
struct CodeImages {
  const void* x = nullptr;
  std::int64_t pitch = 0;
  Patches patches;
  const std::int32_t* sums = nullptr;  // [groups][tokens] of the patches' codes; where the weight has zero points
};
/// Those of task.x: itself where it is so, else made of it in task.scratch (codes_map), codes of task.acts' scale and zero point with their
/// padding around them (padded). Channels of a group are a multiple of 16.
cudaError_t code_images(const ConvTask& task, CodeImages& images, cudaStream_t stream);

}  // namespace nibble::cuda
