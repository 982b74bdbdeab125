// The cost model of the wgmma kernels (gemm_kernel.cuh, w8a8_kernel.cuh), for linear layers and convolutions: one formula with four
// numbers per kernel, fitted to measurements.
#pragma once

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"

namespace nibble::cuda {

/// Families of kernels whose records take different times.
enum class WgmmaFamily {
  floats,         // 16-bit activations; one scale and zero a record, of the common kinds
  bytes,          // the same, × integers of 8 bits
  bytes_bf16,     // bf16 activations × integers of 8 bits, which are longer in becoming bf16
  float_folds,    // 16-bit activations; every other kind
  float_patches,  // of a convolution: as `floats`
  pairs,          // f32 activations as pairs of f16; one scale a record
  pair_folds,     // the same; several
  online,         // activations quantized per group; a record has one integer sum
  online_tokens,  // per token or tensor without zero points: the scale is not in the terms
  online_folds,
  s8,          // codes on both sides
  s8_patches,  // the same of a convolution
  e4m3,
  e4m3_groups,
};

/// The read bandwidth (GpuInfo::read_gbytes_per_s) of the GPUs whose kernels were measured. Another GPU takes the costs of the one whose
/// bandwidth is more similar.
constexpr double kH100GbytesPerS = 3051, kH200GbytesPerS = 4381;

struct WgmmaCost {
  WgmmaFamily family;
  int tokens, rows, split;  // tokens × rows outputs a pass of a CTA; CTAs that share it along K, or kStreamK
  float fixed_us, pass_us, step_us, block_us;
};

/// The numbers of a tile: measured on the GPU whose memory is the most similar of those that the family was measured on, or else of the most
/// similar tile, in proportion to the tokens.
WgmmaCost wgmma_cost(WgmmaFamily family, const Tile& tile, const GpuInfo& gpu);

/// A pass of a kernel (gemm_schedule.hpp).
struct PassShape {
  int blocks, depth;  // row blocks of a pass; warpgroups that share one's K
  bool even = false;  // Schedule::even
  int part = 0;       // rows of a part of a tile of experts (gemm_part); 0: of all
};

/// What the model knows of a kernel and a problem; its four numbers are fitted to these (bench/fit_gpu_costs.py).
struct WgmmaFeatures {
  WgmmaFamily family;
  Tile tile;
  double memory_us, l2_us;  // reading and writing in memory; what the L2 cache delivers, to all SMs or the busiest
  double passes, steps;     // of the busiest CTA: passes; steps, which are a record of each of a pass's row blocks
  double
      blocks;  // that share the tensor cores during a step: row blocks of a pass, times its depth; less where parts are left out
  double parts;  // with stream-K, the partial sums of the pass that a CTA finishes, its own included
};
/// Of a weight of so many bytes, and activations of so many bits each.
WgmmaFeatures wgmma_features(WgmmaFamily family, const Tile& tile, const PassShape& shape, const GpuInfo& gpu,
                             const Problem& problem, std::int64_t weight_bytes, int act_bits);

/// Predicted microseconds.
double wgmma_cost_us(const WgmmaCost& cost, const WgmmaFeatures& features);
/// The same with the numbers of wgmma_cost().
double wgmma_cost_us(const WgmmaFeatures& features, const GpuInfo& gpu);

/// Microseconds to read a weight of so many bytes and activations of so many bits each, and to write the result.
double moved_us(const GpuInfo& gpu, const Problem& problem, std::int64_t weight_bytes, int act_bits);
/// Bytes of the problem's weight in gpu_n64k128.
std::int64_t tile_bytes(const Problem& problem);
/// moved_us of such a weight.
double tile_moved_us(const GpuInfo& gpu, const Problem& problem, int act_bits);

}  // namespace nibble::cuda
