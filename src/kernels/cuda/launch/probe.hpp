// Streaming reads of device memory, the ceiling that decode kernels are compared with; and an ordinary kernel to put between calls.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace nibble::cuda {

/// Bytes that a CTA of read_once() reads; the size of the buffer must be a multiple.
inline constexpr std::size_t kProbeChunk = std::size_t{64} << 10;

/// Enqueues random bits into `bytes` of device memory: reading zeros takes less power and can be faster.
cudaError_t fill_random(void* data, std::size_t bytes, cudaStream_t stream);
/// Enqueues one read of everything; `sink`, a word of device memory, keeps the compiler from leaving it out.
cudaError_t read_once(const void* data, std::size_t bytes, void* sink, cudaStream_t stream);

/// Enqueues an ordinary kernel, without programmatic dependent launch, that reads and writes `bytes`, a multiple of kProbeChunk.
cudaError_t rewrite(void* data, std::size_t bytes, cudaStream_t stream);

}  // namespace nibble::cuda
