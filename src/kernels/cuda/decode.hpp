// D[M,N] = x[M,K] · Wᵀ for few rows (M ≤ 32) and 4- or 8-bit weights in the layout gpu_n64k128: bounded by reading the weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layouts/gpu_tile.hpp"

namespace nibble::cuda {

enum class Float : std::int32_t { f32, f16, bf16 };
/// W = (u − z)·s, u the stored code. fixed: z is zero_base everywhere; integer: a byte per group plus zero_base; offset: W =
/// (u − zero_base)·s + o; real: W = (u − zero_base − z)·s, z a float.
enum class Zero : std::int32_t { fixed, integer, offset, real };

constexpr int kDecodeMaxTokens = 32;

struct DecodeWeight {
  const void* records = nullptr;  // device memory, aligned to 16 bytes
  gpu_tile::Geometry geometry;
  Float scale_type = Float::f16;
  Zero zero = Zero::fixed;
  Float zero_type = Float::f32;  // of offset and real
  float zero_base = 8.0f;
  float scale2 = 1.0f;
};

struct DecodeTask {
  DecodeWeight weight;
  int m = 0;
  Float act = Float::f16;  // f16 or bf16
  const void* x = nullptr;
  std::int64_t x_stride = 0;  // elements between rows
  Float out = Float::f16;
  void* d = nullptr;
  std::int64_t d_stride = 0;
  const float* bias = nullptr;  // [N] or null
};

/// What a launch decides, a plain value: the bits of a result depend on `split` and `grid` only, which do not depend on M.
struct DecodeConfig {
  int split = 0;   // CTAs of a cluster that share a row tile along K
  int grid = 0;    // CTAs
  int stages = 0;  // of the ring: one record each
  int smem = 0;
  int tokens = 0;  // of one launch: the M whose activations fit beside a ring
};
/// Zero fields are chosen. Fails with cudaErrorInvalidConfiguration when nothing fits.
cudaError_t configure_decode_sm90(const DecodeTask& task, DecodeConfig& config);
cudaError_t decode_sm90(const DecodeTask& task, const DecodeConfig& config, cudaStream_t stream);

/// For devices before sm_90; runs on any.
cudaError_t decode_sm80(const DecodeTask& task, cudaStream_t stream);

}  // namespace nibble::cuda
