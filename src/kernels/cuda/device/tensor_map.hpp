// Activations as TMA reads them: boxes of `rows` tokens × 128 bytes of channels, with the 128-byte swizzle.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/tasks/patches.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// A function of the driver, which is found at run time, not linked.
template <class Function>
Function of_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
  return e == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

/// Elements of f16, bf16 or an 8-bit type.
inline std::int64_t bytes_of(DType type) { return type == DType::f16 || type == DType::bf16 ? 2 : 1; }
inline CUtensorMapDataType element_of(DType type) {
  return type == DType::f16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
         : type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                               : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

/// x is [m,k] of f16, bf16 or an 8-bit type, its rows `pitch` bytes apart.
inline bool describe_rows(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t m, std::int64_t k,
                          int rows) {
  const std::int64_t bytes = bytes_of(type);
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[1] = {
      static_cast<cuuint64_t>(m == 1 ? (k * bytes + 15) / 16 * 16 : pitch)};  // the pitch of a single row does not matter
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(rows)}, steps[2] = {1, 1};
  static const auto encode = of_driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode != nullptr && encode(&map, element_of(type), 2, const_cast<void*>(x), sizes, strides, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Images [B,C,pixels] of f16 or bf16, channels and images so many bytes apart: boxes of 64 pixels × 64 channels, with the 128-byte swizzle.
inline bool describe_planar(CUtensorMap& map, DType type, const void* x, std::int64_t image_pitch, std::int64_t channel_pitch,
                            std::int64_t images, std::int64_t channels, std::int64_t pixels) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(pixels), static_cast<cuuint64_t>(channels),
                               static_cast<cuuint64_t>(images)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(channel_pitch), static_cast<cuuint64_t>(image_pitch)};
  const cuuint32_t box[3] = {kPlanarPixels, kPatchChannels, 1}, steps[3] = {1, 1, 1};
  static const auto encode = of_driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode != nullptr && encode(&map, element_of(type), 3, const_cast<void*>(x), sizes, strides, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Patches of images [B,H,W,C] of f16, bf16 or s8, channels side by side and pixels `pitch` bytes apart: boxes of `tokens` output pixels ×
/// `channels`, one element of the filter at a time. Boxes of 128 bytes a pixel have the 128-byte swizzle, of 64 bytes the 64-byte swizzle,
/// narrower ones none.
///
///   output pixels (oh, ow) begin at (oh·stride − top, ow·stride − left); a box takes them in order, row by row and image by image, for
///   the map knows where a row of them ends: at the lower and upper corner of where kernels may begin
///
/// An element of the filter shifts all of them. Elements outside of an image become zero, as padding needs; for codes that is code 0.
inline bool describe_patches(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t batch,
                             const Patches& p, int channels, int tokens) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(p.channels), static_cast<cuuint64_t>(p.width),
                               static_cast<cuuint64_t>(p.height), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(pitch), static_cast<cuuint64_t>(pitch * p.width),
                                 static_cast<cuuint64_t>(pitch * p.width * p.height)};
  const PatchBounds bounds = patch_bounds(p);
  const int lower[2] = {bounds.lower_w, bounds.lower_h}, upper[2] = {bounds.upper_w, bounds.upper_h};
  const cuuint32_t steps[4] = {1, static_cast<cuuint32_t>(p.stride_w), static_cast<cuuint32_t>(p.stride_h), 1};
  const std::int64_t row = channels * bytes_of(type);
  const CUtensorMapSwizzle swizzle = row == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                 : CU_TENSOR_MAP_SWIZZLE_NONE;
  static const auto encode = of_driver<decltype(&cuTensorMapEncodeIm2col)>("cuTensorMapEncodeIm2col");
  return encode != nullptr &&
         encode(&map, element_of(type), 4, const_cast<void*>(x), sizes, strides, lower, upper, static_cast<cuuint32_t>(channels),
                static_cast<cuuint32_t>(tokens), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace nibble::cuda
