#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/weights/pack.cu"

int nibble::emulator::pack_gpu_tile(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type,
                                    const cuda::CanonicalArrays& arrays, void* records) {
  return cuda::pack_gpu_tile(geometry, scheme, zero_type, arrays.codes, arrays.scales, arrays.zeros, arrays.perm, records,
                             nullptr);
}
