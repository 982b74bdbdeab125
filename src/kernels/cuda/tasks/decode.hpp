// D[M,N] = epilogue(x[M,K] · Wᵀ) for few rows and 4- or 8-bit weights in the layout gpu_n64k128: bounded by reading the weights.
// x is f16 or bf16; more than 16 rows take several launches.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/tasks/decode_config.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"

namespace nibble::cuda {

/// The room of the current device.
cudaError_t ring_room_sm90(RingRoom& room);
/// M may be any.
cudaError_t linear_decode_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream);

/// Two products of rows of experts in one launch, the second of the first one's results: the same pairs, types and format of weights.
/// second.scratch: a Meeting, which no other launch uses meanwhile.
cudaError_t decode_joined_sm90(const LinearTask& first, const DecodeConfig& config, const LinearTask& second,
                               const DecodeConfig& second_config, cudaStream_t stream);

/// For devices without TMA. `split` CTAs divide K of a row tile, fewer where there are fewer chunks of it; their sums meet before
/// task.scratch_end (decode_sm80.hpp).
cudaError_t linear_decode_sm80(const LinearTask& task, int split, cudaStream_t stream);

}  // namespace nibble::cuda
