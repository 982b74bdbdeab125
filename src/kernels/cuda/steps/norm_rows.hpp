// RMSNorm and LayerNorm of activations (kernels/norm.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/norm_task.hpp"

namespace nibble::cuda {

/// Enqueues it. task.k is at most kNormChannels (tasks/norm_limits.hpp).
cudaError_t norm_rows(const NormTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
