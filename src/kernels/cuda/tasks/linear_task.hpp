// The arguments of the launchers of the CUDA kernels: plain values, host and device, which own nothing.
#pragma once

#include <algorithm>
#include <cstdint>

#include "epilogue/element.hpp"
#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "kernels/cuda/tasks/next_weight.hpp"
#include "layouts/gpu_tile.hpp"
#include "nibble/scheme.hpp"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// A weight packed as gpu_n64k128, in device memory. u is a stored code and b is zero_base: W = (u − b)·s without zeros, (u − b − z)·s
/// with integer zeros, a byte per group, and with real ones, and (u − b)·s + o with offsets. Codes that are floats have no zeros, and b = 0.
struct DeviceWeight {
  const void* records = nullptr;  // aligned to 16 bytes
  gpu_tile::Geometry geometry;
  gpu_tile::Codes codes = gpu_tile::Codes::u4;
  DType scale_type = DType::f16;
  ZeroKind zero = ZeroKind::none;
  DType zero_type = DType::f32;  // of offsets and real zeros
  float zero_base = 8.0f;
  float scale2 = 1.0f;
  const std::int32_t* perm = nullptr;  // [K]: packed position k holds input channel perm[k]; null: in order
  const float* prescale = nullptr;     // [K], by input channel: multiplies x; null: none
  bool per_channel = false;            // a row has one scale: every slot holds the same
};

/// D[M,N] = epilogue(x[M,K] · Wᵀ). epilogue.acc_scale includes weight.scale2.
struct LinearTask {
  DeviceWeight weight;
  int m = 0;
  DType a_dtype = DType::f16;
  const void* x = nullptr;
  std::int64_t x_stride = 0;    // elements between rows
  void* scratch = nullptr;      // device memory, aligned to 256 bytes: as much as the row's workspace() asks for
  void* scratch_end = nullptr;  // memory for stream-K and split K ends here (stream_k.hpp, split_k.hpp)
  epilogue::Element epilogue;
  NextWeight next;
  ExpertTiles experts;  // of a grouped product, whose weight is the first expert's; without tiles: of one weight
};

/// Rows of a tile of experts, of the kernels of every GPU.
constexpr int kSimtExpertRows = 4;

/// Whether TMA can read m rows in place: they begin at multiples of 16 bytes and do not overlap.
inline bool readable_rows(const void* x, std::int64_t pitch, std::int64_t m, std::int64_t row_bytes) {
  return (m == 1 || (pitch % 16 == 0 && pitch >= row_bytes)) && reinterpret_cast<std::uintptr_t>(x) % 16 == 0;
}

/// Rows of activations that sm_90's GEMM copies into scratch memory at a time when TMA cannot read them in place: permuted or prescaled
/// channels (`changed`), or rows that do not begin at multiples of 16 bytes. The latter can also follow from the pointer and stride, known only when a plan runs;
/// few rows at a time suffice for so rare a case.
constexpr int gathered_rows(std::int64_t m, std::int64_t k, bool changed) {
  return static_cast<int>(std::min<std::int64_t>(m, changed || k % 8 != 0 ? 1024 : 128));
}
constexpr int gathered_pitch(std::int64_t k) { return static_cast<int>((k + 7) / 8 * 8); }  // elements

/// The least shared memory of the sm_80 decode kernel: two stages of eight records and their activations of one token.
constexpr int kSm80ChunkRecords = 8;
constexpr int sm80_least_shared(int record_bytes) {
  return 2 * kSm80ChunkRecords * (record_bytes + gpu_tile::kChannels * 2) + 2 * 16;
}

}  // namespace nibble::cuda
