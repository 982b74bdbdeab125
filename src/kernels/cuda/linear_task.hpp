// What the launchers of the CUDA kernels take: plain values, host and device, no allocation behind them.
#pragma once

#include <cstdint>

#include "epilogue/element.hpp"
#include "layouts/gpu_tile.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// W = (u − z)·s, u the stored code. fixed: z is zero_base everywhere; integer: a byte per group plus zero_base; offset: W =
/// (u − zero_base)·s + o; real: W = (u − zero_base − z)·s, z a float.
enum class Zero : std::int32_t { fixed, integer, offset, real };

/// A weight packed as gpu_n64k128, in device memory.
struct DeviceWeight {
  const void* records = nullptr;  // aligned to 16 bytes
  gpu_tile::Geometry geometry;
  DType scale_type = DType::f16;
  Zero zero = Zero::fixed;
  DType zero_type = DType::f32;  // of offset and real
  float zero_base = 8.0f;
  float scale2 = 1.0f;
  const std::int32_t* perm = nullptr;  // [K]: packed position k holds input channel perm[k]; null: in order
  const float* prescale = nullptr;     // [K], by input channel: multiplies x; null: none
};

/// D[M,N] = epilogue(x[M,K] · Wᵀ). epilogue.acc_scale includes weight.scale2.
struct LinearTask {
  DeviceWeight weight;
  int m = 0;
  DType act = DType::f16;
  const void* x = nullptr;
  std::int64_t x_stride = 0;  // elements between rows
  epilogue::Element epilogue;
};

/// Shared memory that the sm_80 decode kernel cannot do without: two stages of eight records and their activations of one token.
constexpr int kSm80ChunkRecords = 8;
constexpr int sm80_least_shared(int record_bytes) {
  return 2 * kSm80ChunkRecords * (record_bytes + gpu_tile::kChannels * 2) + 2 * 16;
}

}  // namespace nibble::cuda
