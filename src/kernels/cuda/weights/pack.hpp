// Packing into gpu_n64k128 on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layouts/gpu_tile.hpp"
#include "nibble/scheme.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// Enqueues the packing of a weight in canonical form (QuantTensor, in device memory) into geometry.total_bytes() bytes of records,
/// aligned to 16: the bytes kGpuTileLayout.pack writes. codes is [N,K], a byte each; scales and zeros are [group rows, groups];
/// perm [K]: packed position k holds input channel perm[k], null: in order.
cudaError_t pack_gpu_tile(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type,
                          const std::uint8_t* codes, const void* scales, const void* zeros, const std::int32_t* perm,
                          void* records, cudaStream_t stream);

}  // namespace nibble::cuda
