// Activations → 8-bit codes on the GPU, by the rule of quantize/act_rule.hpp, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/quantize_task.hpp"

namespace nibble::cuda {

/// For any GPU, and any M, K, groups, strides and alignment. Fails with cudaErrorInvalidValue for codes that are given where no terms are
/// asked for.
cudaError_t quantize_acts(const QuantizeTask& task, cudaStream_t stream);

/// sums[m] = Σ codes[m,k] of s8 codes that were given without sums.
cudaError_t sum_codes(const void* codes, std::int64_t pitch, std::int64_t m, std::int64_t k, std::int32_t* sums,
                      cudaStream_t stream);

}  // namespace nibble::cuda
