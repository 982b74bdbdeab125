// The steps before and after the products of a mixture of experts.
//
//   ids [T,top_k] ──sort_rows──▶ tiles of rows of one expert each
//   x [T,K] ──gather_expert_rows──▶ A [R,K] ──products──▶ results [R,N] ──combine_rows──▶ D [T,N]
//
// Nothing here waits for the host, or depends on anything but device memory, so that a captured graph serves every routing.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/experts_task.hpp"

namespace nibble::cuda {

cudaError_t sort_rows(const SortTask& task, cudaStream_t stream);
cudaError_t gather_expert_rows(const GatherRowsTask& task, cudaStream_t stream);
cudaError_t combine_rows(const CombineTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
