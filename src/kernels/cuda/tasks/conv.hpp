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
/// The same for task.scaled, in integers, exact modulo 2³².
cudaError_t conv_direct_s8(const ConvTask& task, cudaStream_t stream);

/// An implicit GEMM with wgmma on sm_90: f16 or bf16, one group, channels a multiple of 64, strides of 8 at most, strides in memory that
/// TMA can express (patches_fit). NCHW images of pointwise convolutions are read as they lie where TMA can, and their D is NCHW. Other
/// images in another order are first copied to channels-last order in task.scratch; cudaErrorInvalidAddressSpace if TMA cannot read
/// channels-last images in place. A row's bits depend neither on the batch nor on the other
/// pixels.
cudaError_t conv_gemm_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream);

/// The same with the matrix instructions of compute capability 8.0 and later: any strides, dilations and distances, channels of a group a
/// multiple of 8, and where there are groups, their output channels of 64.
cudaError_t conv_gemm_sm80(const ConvTask& task, cudaStream_t stream);

/// The implicit GEMM of sm_90 for task.scaled and activations of its kind of codes: int8, exact, or e4m3. Floats are first quantized into
/// task.scratch, and codes that cannot be read in place are copied there (code_images). One group, channels a multiple of 64. The bits of
/// integers do not depend on config.
cudaError_t conv_w8a8_sm90(const ConvTask& task, const W8A8Config& config, cudaStream_t stream);

/// The implicit GEMM of sm_90 for task.weight and int8 codes in task.scratch (wna8_image_map), made of floats or of codes that are given,
/// with a scale per block of a pixel's channels or one for all: wna8.hpp on patches. With task.fixed_point codes are the bytes of f32
/// activations. One group, channels a multiple of 64 and of task.fold. A row's bits depend neither on the batch nor on the other pixels.
cudaError_t conv_wna8_sm90(const ConvTask& task, const GemmConfig& config, cudaStream_t stream);

/// The same with the matrix instructions of compute capability 8.0 and later: any strides, dilations and distances, activations without zero
/// points, channels of a group a multiple of 64, and where there are groups, their output channels of 64.
cudaError_t conv_wna8_sm80(const ConvTask& task, cudaStream_t stream);

/// conv_w8a8_sm90 with the matrix instructions of compute capability 8.0 and later: any strides, dilations and distances, channels of a
/// group a multiple of 16, and where there are groups, their output channels of 64.
cudaError_t conv_w8a8_sm80(const ConvTask& task, cudaStream_t stream);

/// to[B,H,W,C] dense, of f16, bf16 or f32 elements whose channels are a multiple of 8, or of s8 elements and a multiple of 16. 16-bit floats
/// are multiplied by task.prescale, and rounded to their type.
cudaError_t channels_last(const ConvTask& task, void* to, cudaStream_t stream);

/// How sm_90's kernels store a D that is not channels-last.
template <class Params>
void describe_store(const ConvTask& task, Params& p) {
  if (task.d.channel == 1) return;
  p.image_stride = task.d.image;
  p.channel_stride = task.d.channel;
  p.half = half_out(p.epilogue, p.image_stride, p.channel_stride, task.patches.pixels());
}

/// Images of codes for tensor cores: [B,H,W,C], pixels `pitch` bytes apart, at multiples of 16; padding outside of memory is code 0.
struct CodeImages {
  const void* x = nullptr;
  std::int64_t pitch = 0;
  Patches patches;
  const std::int32_t* sums = nullptr;  // [groups][tokens] of the patches' codes; where the weight has zero points
};
/// The images of codes of task.x: in place where it has this form, else made in task.scratch (codes_map) with task.acts' scale and zero
/// point and, where that is not known to be 0, with their padding in memory (padded). Channels of a group are a multiple of 16.
cudaError_t code_images(const ConvTask& task, CodeImages& images, cudaStream_t stream);

/// Codes of pixels for products with task.weight, and their terms (Wna8ImageMap): images of codes [B,H,W,C] of task.online's rule or, of fixed
/// point, three planes of such images, of the low, the middle and the high byte.
struct PixelCodes {
  const std::byte *x = nullptr, *terms = nullptr;
  std::int64_t term_pitch = 0;  // bytes of a pixel's terms
  int planes = 1;
};
/// Made in task.scratch. Channels of a group are a multiple of task.fold; a prescale is of one group.
cudaError_t code_pixels(const ConvTask& task, PixelCodes& codes, cudaStream_t stream);

}  // namespace nibble::cuda
