// The limit of shared memory of a CTA, and the attribute that lets a kernel use all of it. Both are set once per device, or per kernel and
// device, not per launch: a launch that needs less never lowers a limit that another thread's launch relies on.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace nibble::cuda {

constexpr int kMaxDevices = 64;

/// The current device, and the most bytes of shared memory that one of its CTAs may have.
inline cudaError_t most_shared(int& device, int& bytes) {
  static std::array<std::atomic<int>, kMaxDevices> known;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  std::atomic<int>& cached = known[static_cast<std::size_t>(device)];
  bytes = cached.load();
  if (bytes != 0) return cudaSuccess;
  if (const cudaError_t e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
  cached.store(bytes);
  return cudaSuccess;
}

/// Lets `kernel`, which has no static shared memory, use all of it.
inline cudaError_t allow_all_shared(const void* kernel) {
  struct Entry {
    std::atomic<const void*> kernel;
    std::atomic<std::uint64_t> devices;  // bit i: done on device i
  };
  static std::array<Entry, 512> known;  // more than there are kernels, about 300 with those of convolutions
  int device = 0, bytes = 0;
  if (const cudaError_t e = most_shared(device, bytes)) return e;
  for (Entry& entry : known) {
    const void* none = nullptr;
    if (entry.kernel.load() != kernel && !entry.kernel.compare_exchange_strong(none, kernel) && none != kernel) continue;
    if ((entry.devices.load() >> device & 1) != 0) return cudaSuccess;
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
    entry.devices.fetch_or(std::uint64_t{1} << device);
    return cudaSuccess;
  }
  return cudaErrorInvalidConfiguration;
}

}  // namespace nibble::cuda
