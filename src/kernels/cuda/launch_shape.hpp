// The launch configuration of the sm_90 kernels: clusters, and a start before the kernel before has ended.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace nibble::cuda {

/// Not to be copied: the configuration points to the attributes.
struct LaunchShape {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  LaunchShape(int grid, int cluster, int threads, int smem, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(smem);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  LaunchShape(const LaunchShape&) = delete;
  LaunchShape& operator=(const LaunchShape&) = delete;
};

}  // namespace nibble::cuda
