// The launch configuration of the sm_90 kernels: clusters, and programmatic dependent launch.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>

#include "kernels/cuda/device/shared_memory.hpp"

namespace nibble::cuda {

/// Not to be copied: the configuration points to the attributes.
struct LaunchShape {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[3];

  /// cooperative: all CTAs run at once, or the launch fails, so that they may wait for each other.
  LaunchShape(int grid, int cluster, int threads, int smem, cudaStream_t stream, bool cooperative = false) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    attributes[2].id = cudaLaunchAttributeCooperative;
    attributes[2].val.cooperative = 1;
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(smem);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cooperative ? 3 : 2;
  }
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;
};

inline int multiprocessors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int count = known[device].load();
  if (count == 0 && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess)
    known[device].store(count);
  return count;
}

}  // namespace nibble::cuda
