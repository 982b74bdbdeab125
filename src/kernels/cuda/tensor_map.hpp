// Activations as TMA reads them: boxes of `rows` tokens × 128 bytes of channels, with the 128-byte swizzle.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "nibble/types.hpp"

namespace nibble::cuda {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
/// The driver's function; nothing links against the driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return e == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return function;
}

/// Whether TMA can read m rows where they are: they begin at multiples of 16 bytes and do not overlap.
inline bool tma_reads(const void* x, std::int64_t pitch, std::int64_t m, std::int64_t row_bytes) {
  return (m == 1 || (pitch % 16 == 0 && pitch >= row_bytes)) && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}

/// x is [m,k] of f16, bf16 or an 8-bit type, its rows `pitch` bytes apart.
inline bool describe_rows(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t m, std::int64_t k,
                          int rows) {
  const std::int64_t bytes = type == DType::f16 || type == DType::bf16 ? 2 : 1;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(m)};
  const cuuint64_t strides[1] = {
      static_cast<cuuint64_t>(m == 1 ? (k * bytes + 15) / 16 * 16 : pitch)};  // of one row it may be anything
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(rows)}, steps[2] = {1, 1};
  const CUtensorMapDataType element = type == DType::f16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                      : type == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode_tiled() != nullptr &&
         encode_tiled()(&map, element, 2, const_cast<void*>(x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace nibble::cuda
