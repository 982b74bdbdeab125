// How many stages the ring of a kernel with asynchronous copies has. On compute capability 7.5, where a copy is done before the thread goes on,
// a third stage would gain nothing: two leave room for more CTAs on an SM, which copy and multiply at different times.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/shared_memory.hpp"

namespace nibble::cuda {

constexpr int kStagesOfCopiesAtOnce = 2;

/// Of the architecture that a kernel is compiled for, where others have kMost.
template <int kMost>
inline const int kRingStages = ptx::copies_at_once() ? kStagesOfCopiesAtOnce : kMost;

/// The same for a launcher, of the current device.
inline cudaError_t ring_stages_of_device(int most, int& stages) {
  static std::array<std::atomic<int>, kMaxDevices> known;  // major compute capabilities
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  std::atomic<int>& cached = known[static_cast<std::size_t>(device)];
  int major = cached.load();
  if (major == 0) {
    if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
    cached.store(major);
  }
  stages = major < 8 ? kStagesOfCopiesAtOnce : most;
  return cudaSuccess;
}

}  // namespace nibble::cuda
