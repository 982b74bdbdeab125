// The limit of shared memory of a CTA, and the attribute that lets a kernel use all of it.
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

/// A kernel without static shared memory, and the devices on which it has been allowed to use all that a CTA may have. That is done once
/// per device, not per launch: a launch that needs less never lowers the limit that another thread's launch relies on.
template <class Params>
struct Launchable {
  void (*kernel)(Params);
  mutable std::atomic<std::uint64_t> devices{0};  // bit i: allowed on device i

  cudaError_t allow_all_shared() const {
    int device = 0, bytes = 0;
    if (const cudaError_t e = most_shared(device, bytes)) return e;
    if ((devices.load() >> device & 1) != 0) return cudaSuccess;
    if (const cudaError_t e =
            cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
      return e;
    devices.fetch_or(std::uint64_t{1} << device);
    return cudaSuccess;
  }
};
template <class Params>
Launchable(void (*)(Params)) -> Launchable<Params>;

template <auto kKernel>
inline const Launchable kLaunchable{kKernel};

}  // namespace nibble::cuda
