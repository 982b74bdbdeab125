// u8 codes of activations → s8 codes, 128 less, and their zero points (kernels/recode.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/recode_task.hpp"

namespace nibble::cuda {

cudaError_t recode_acts(const RecodeTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
