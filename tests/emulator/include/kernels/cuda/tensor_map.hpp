// In the place of src/kernels/cuda/tensor_map.hpp: boxes of rows. Patches of images are not emulated.
#pragma once

#include <cuda.h>

#include "kernels/cuda/patches.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

inline bool tma_reads(const void* x, std::int64_t pitch, std::int64_t m, std::int64_t row_bytes) {
  return (m == 1 || (pitch % 16 == 0 && pitch >= row_bytes)) && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}
inline bool describe_rows(CUtensorMap& map, DType type, const void* x, std::int64_t pitch, std::int64_t m, std::int64_t k,
                          int rows) {
  const std::int64_t bytes = type == DType::f16 || type == DType::bf16 ? 2 : 1;
  map = {static_cast<const std::uint8_t*>(x), pitch, m, k * bytes, rows};
  return rows <= 256;
}
inline bool describe_patches(CUtensorMap&, DType, const void*, std::int64_t, std::int64_t, const Patches&, int, int) {
  return false;
}

}  // namespace nibble::cuda
