// RMSNorm and LayerNorm of activations (kernels/norm.hpp).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/quantize_task.hpp"
#include "kernels/norm_task.hpp"

namespace nibble::cuda {

/// Enqueues it. task.k is at most kNormChannels (tasks/norm_limits.hpp).
cudaError_t norm_rows(const NormTask& task, cudaStream_t stream);

/// The same, whose result is quantized, not stored: bit for bit what quantize_acts() makes of task.y. task.y, codes.a and a_stride are
/// ignored; task.k is at most kNormCodesChannels, channels are in order, and there are no float offsets.
cudaError_t norm_codes(const NormTask& task, const QuantizeTask& codes, cudaStream_t stream);

}  // namespace nibble::cuda
