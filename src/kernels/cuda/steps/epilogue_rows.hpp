// The canonical epilogue of sums that are in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "epilogue/element.hpp"

namespace nibble::cuda {

/// Enqueues D[M,N] = epilogue(sums[M,N]), rows of sums `stride` elements apart. A row of D may have three rows of sums, one after the other
/// (`each`), which are added in their order.
cudaError_t epilogue_rows(const epilogue::Element& epilogue, const float* sums, int each, std::int64_t m, int n,
                          std::int64_t stride, cudaStream_t stream);

}  // namespace nibble::cuda
