// Launches the sm_90 8-bit GEMM (scaled_sm90_kernel.cuh): how passes are dealt, how much shared memory there is.
#include "kernels/cuda/scaled_sm90.hpp"

#include <algorithm>
#include <bit>

#include "kernels/cuda/launch_shape.hpp"
#include "kernels/cuda/shared_memory.hpp"
#include "kernels/cuda/tensor_map.hpp"

namespace nibble::cuda {
namespace {

/// Token tiles whose passes run side by side where there are many: with 256 tokens and K = 8192, 8 MiB of activations stay in L2 while
/// the weights go by once for each band.
constexpr int kBandTokens = 1024;

/// Epilogues that go to memory in vectors of 16 bytes.
bool is_fast(const epilogue::Element& e, std::int64_t n) {
  return e.acc_scale == 1.0f && e.row_scale == nullptr && e.col_scale == nullptr && e.activation == Activation::none && e.gate.data == nullptr &&
         e.residual.data == nullptr && (e.out == DType::f16 || e.out == DType::bf16) && n % 8 == 0 && e.d_stride % 8 == 0 &&
         reinterpret_cast<std::uintptr_t>(e.d) % 16 == 0;
}

}  // namespace

cudaError_t linear_scaled_sm90(const ScaledTask& task, const ScaledConfig& wanted, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  const bool grouped = task.acts.group != 0 || geo.block_rows != 0;
  const ScaledKernel kernel = geo.integers ? grouped ? nullptr : scaled_sm90_s8(wanted.tokens)
                              : grouped    ? scaled_sm90_e4m3_grouped(wanted.tokens)
                                           : scaled_sm90_e4m3(wanted.tokens);
  if (kernel == nullptr || task.m < 1) return cudaErrorInvalidValue;
  if (!tma_reads(task.acts.codes, task.acts.pitch, task.m, geo.k)) return cudaErrorInvalidAddressSpace;
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = allow_all_shared(reinterpret_cast<const void*>(kernel))) return e;

  ScaledConfig config = wanted;
  config.blocks = std::min(config.blocks, scaled_groups(config.tokens, grouped) / config.depth);
  const int units = config.blocks * config.tokens / 8;  // of 64 rows × 8 tokens: a CTA that shares K owns one at least
  config.split = static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min({config.split, geo.records(), units}))));
  ScaledParams p{};
  p.weight = task.weight;
  p.acts = task.acts;
  p.epilogue = task.epilogue;
  p.m = task.m;
  p.tile_records = geo.records();
  p.blocks = config.blocks;
  p.depth = config.depth;
  p.split = config.split;
  p.zero_points = task.acts.zeros != nullptr || task.acts.zero != 0 || geo.has_zeros;
  p.fast = is_fast(task.epilogue, geo.n);
  if (!describe_rows(p.x, DType::s8, task.acts.codes, task.acts.pitch, task.m, geo.k, config.tokens))
    return cudaErrorInvalidValue;

  p.deal.row_blocks = geo.tiles();
  p.deal.token_tiles = (task.m + config.tokens - 1) / config.tokens;
  p.deal.most = config.blocks;
  const int passes = p.deal.row_tiles() * p.deal.token_tiles, clusters = multiprocessors(device) / config.split;
  if (config.split > 1) {  // a pass each
    p.band = 1;
    p.deal.clusters = passes;
  } else if (p.deal.token_tiles * config.tokens >= 2 * kBandTokens) {
    p.band = kBandTokens / config.tokens;
    p.deal.clusters = std::min(passes, clusters);
  } else {
    p.deal.clusters = std::min(p.deal.units(), clusters);
  }

  // Never more stages than a CTA has records: what shared memory is left lets the next kernel begin.
  const int longest = ((p.tile_records + config.split - 1) / config.split + config.depth - 1) / config.depth;
  p.stages = 1;
  while (p.stages < longest * 2 && scaled_map(p.stages + 1, config, grouped).total <= most) ++p.stages;
  if (p.deal.clusters * p.deal.most >= p.deal.units() || config.split > 1) p.stages = std::min(p.stages, longest);
  const int smem = scaled_map(p.stages, config, grouped).total;
  if (smem > most) return cudaErrorInvalidConfiguration;
  LaunchShape shape(p.deal.clusters * config.split, config.split, scaled_threads(config.tokens, grouped), smem, stream);
  return cudaLaunchKernelEx(&shape.config, kernel, p);
}

}  // namespace nibble::cuda
