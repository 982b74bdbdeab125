// The canonical epilogue of sums that are in memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/stored_sums.hpp"

namespace nibble::cuda {

/// Enqueues D = epilogue(sums[M,N]).
cudaError_t epilogue_rows(const epilogue::Element& epilogue, const StoredSums& sums, std::int64_t m, int n, cudaStream_t stream);

}  // namespace nibble::cuda
