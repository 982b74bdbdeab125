// The part of the CUDA runtime that launchers use, on the emulated GPU (gpu.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "emulator/gpu.hpp"

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorInvalidConfiguration,
  cudaErrorInvalidDevice,
  cudaErrorNotSupported,
  cudaErrorInvalidAddressSpace,
  cudaErrorCooperativeLaunchTooLarge
};
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeCooperative
};

struct cudaLaunchAttribute {
  struct Cluster {
    unsigned x, y, z;
  };
  cudaLaunchAttributeID id{};
  struct {
    int programmaticStreamSerializationAllowed = 0, cooperative = 0;
    Cluster clusterDim{};
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount      ? nibble::emulator::kMultiprocessors
           : which == cudaDevAttrComputeCapabilityMajor ? (nibble::emulator::is_turing() ? 7 : 9)
                                                        : nibble::emulator::most_shared_bytes();
  return cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

/// Never 0, so that the small GPU accepts clusters of every size.
inline cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      *count = std::max(1, nibble::emulator::kMultiprocessors / static_cast<int>(config->attrs[i].val.clusterDim.x));
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

/// Runs to the end before it returns.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args) {
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
    if (config->attrs[i].id == cudaLaunchAttributeCooperative && config->gridDim.x > nibble::emulator::kMultiprocessors)
      return cudaErrorCooperativeLaunchTooLarge;
  }
  if (config->dynamicSmemBytes > static_cast<std::size_t>(nibble::emulator::most_shared_bytes()))
    return cudaErrorInvalidConfiguration;
  const auto shape = [](const dim3& d) { return nibble::emulator::Shape{static_cast<int>(d.x), static_cast<int>(d.y)}; };
  nibble::emulator::run(
      shape(config->gridDim), shape(config->blockDim), [&] { kernel(args...); }, cluster,
      static_cast<int>(config->dynamicSmemBytes));
  return cudaSuccess;
}
