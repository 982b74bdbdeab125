// Programmatic dependent launch for kernels that are compiled for many architectures: where the GPU supports it they start before the
// previous kernel of the stream has ended; elsewhere they run one after the other.
//
//   predecessor ──────────────────────┤ its writes are visible
//   kernel        start successor, set up ┤wait┤ read, compute, write
//   successor                              start successor, set up ────┤wait┤ ...
//
// Every thread waits before it touches memory that other kernels read or write. So a finished kernel implies that all before it on the
// stream have finished.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "kernels/cuda/device/ptx.cuh"

namespace nibble::cuda {

/// Lets the next kernel start as soon as all CTAs of this one have called this.
__device__ inline void let_successor_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::let_dependents_start();
#endif
}
/// Waits for the previous kernels. Before this call a kernel writes nothing and reads nothing that another kernel writes.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  ptx::wait_for_predecessors();
#endif
}

/// Whether the current device supports the early start.
inline bool starts_early() {
  static std::array<std::atomic<int>, 64> known;  // by device: 1 no, 2 yes
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= static_cast<int>(known.size())) return false;
  std::atomic<int>& cached = known[static_cast<std::size_t>(device)];
  if (cached.load() == 0 && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess)
    cached.store(major >= 9 ? 2 : 1);
  return cached.load() == 2;
}

/// kernel<<<grid, block, smem, stream>>>(params), with the early start where the device supports it.
template <class Params>
cudaError_t launch_dependent(void (*kernel)(Params), dim3 grid, dim3 block, int smem, cudaStream_t stream, const Params& params,
                             bool early = starts_early()) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<std::size_t>(smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}
/// kernel<<<grid, block, smem, stream>>>(args...): for kernels that do not wait for their predecessor themselves.
template <class... Params, class... Args>
cudaError_t launch_after(void (*kernel)(Params...), dim3 grid, dim3 block, int smem, cudaStream_t stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<std::size_t>(smem);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace nibble::cuda
