// The arguments of the kernels of dense weights, whose rows lie as they are (layouts/gpu_rows.hpp): plain values, host and device.
#pragma once

#include <cstdint>

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// W[N,K] of f32, f16 or bf16 in device memory, aligned to 16 bytes, as are its rows.
struct DenseWeight {
  const void* rows = nullptr;
  DType type = DType::f16;
  std::int64_t n = 0, k = 0;
  std::int64_t stride = 0;  // elements between rows, those past K zero
};

/// D[M,N] = epilogue(x[M,K] · Wᵀ).
struct DenseTask {
  DenseWeight weight;
  std::int64_t m = 0;
  DType a_dtype = DType::f16;
  const void* x = nullptr;
  std::int64_t x_stride = 0;        // elements between rows
  const float* prescale = nullptr;  // [K]: multiplies x; null: none
  void* scratch = nullptr;          // device memory, aligned to 256 bytes: as much as the row's workspace() asks for
  epilogue::Element epilogue;
  ExpertTiles experts;  // of a grouped product, of tiles of kDenseExpertRows; without tiles: of one weight
};

/// Rows of a tile of experts, of the kernel of every GPU.
constexpr int kDenseExpertRows = 4;

}  // namespace nibble::cuda
