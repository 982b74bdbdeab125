// logits of a router [T,E] → ids and weights [T,top_k] (nibble/route.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/experts_task.hpp"

namespace nibble::cuda {

cudaError_t route_tokens(const RouteTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
