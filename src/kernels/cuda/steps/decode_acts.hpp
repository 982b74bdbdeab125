// Codes of activations → the numbers that they stand for: as f32, for kernels that multiply floats, and as f16 with a scale, for those that
// multiply 16-bit floats.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/w8a8_task.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// x[M,K] dense, of codes of `type` (s8 or e4m3) with their scales, zero points or offsets. `perm`: position k is channel perm[k] of the
/// codes and of the blocks that share a scale; null: in order.
cudaError_t decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, int k, float* x,
                        cudaStream_t stream);
cudaError_t code_halves(const CodeHalves& task, cudaStream_t stream);

}  // namespace nibble::cuda
