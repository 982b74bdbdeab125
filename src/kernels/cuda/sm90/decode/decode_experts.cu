// Launches decode for rows of experts on Hopper (decode_experts.cuh).
#include "kernels/cuda/sm90/decode/decode_experts.cuh"

#include <algorithm>
#include <limits>

#include "kernels/cuda/device/ticket.hpp"
#include "kernels/cuda/sm90/decode/decode_kernel.cuh"

namespace nibble::cuda {
namespace {

using Products = ExpertProducts<RingParams<FloatActs>>;
using ExpertKernel = const Launchable<Products>*;

template <Known kKnown, Codes kCodes>
ExpertKernel kernel() {
  return &kLaunchable<decode_experts_kernel<Decode<kKnown, 1, kCodes>>>;
}
ExpertKernel kernel_for(Known known, Codes codes) {
  const bool sixteen = known == Known::groups_of_16;
  switch (codes) {
    case Codes::u4:
      return known == Known::f16_scales    ? kernel<Known::f16_scales, Codes::u4>()
             : known == Known::bf16_scales ? kernel<Known::bf16_scales, Codes::u4>()
             : sixteen                     ? kernel<Known::groups_of_16, Codes::u4>()
                                           : kernel<Known::nothing, Codes::u4>();
    case Codes::u8:
      return known == Known::f16_scales    ? kernel<Known::f16_scales, Codes::u8>()
             : known == Known::bf16_scales ? kernel<Known::bf16_scales, Codes::u8>()
             : sixteen                     ? kernel<Known::groups_of_16, Codes::u8>()
                                           : kernel<Known::nothing, Codes::u8>();
    case Codes::e4m3: return sixteen ? nullptr : kernel<Known::nothing, Codes::e4m3>();
    case Codes::e2m1: return sixteen ? kernel<Known::groups_of_16, Codes::e2m1>() : kernel<Known::nothing, Codes::e2m1>();
    default: return nullptr;
  }
}

cudaError_t make(const LinearTask& task, const DecodeConfig& config, RingParams<FloatActs>& p) {
  p = ring_params<FloatActs>(task, 0, config);
  const Activations x = activations(task, 0, config.tokens);
  if (config.split != 1 || config.tokens > 8 || task.weight.geometry.k % 8 != 0) return cudaErrorInvalidValue;
  if (!x.rule.copies_rows()) return cudaErrorInvalidAddressSpace;
  p.x = {x, true, nullptr, 0};
  p.experts = task.experts;
  if (std::int64_t{task.experts.most} * p.tiles > std::numeric_limits<int>::max()) return cudaErrorInvalidValue;  // items
  if (p.experts.sort != nullptr) p.sort = *p.experts.sort;
  if (p.experts.sort != nullptr && (p.sort.ids == nullptr || p.sort.rows > kFewPairs)) return cudaErrorInvalidValue;
  p.run = row_tiles_of_run(p.tile_records);
  return cudaSuccess;
}

cudaError_t launch(Products& both, const LinearTask& task, const DecodeConfig& config, cudaStream_t stream) {
  const bool sorts = both.products[0].sort.ids != nullptr;
  both.products[0].few_tiles = align16(config.smem);
  const Known known = known_of(both.products[0].format);
  const ExpertKernel kernel = kernel_for(known, task.weight.codes);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  const int smem = sorts ? align16(config.smem) + kFewTilesBytes : config.smem;
  LaunchShape shape(config.grid, 1, kThreads, smem, stream, both.count > 1);
  return cudaLaunchKernelEx(&shape.config, kernel->kernel, both);
}

}  // namespace

cudaError_t decode_experts_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream) {
  Products both{};
  both.count = 1;
  if (const cudaError_t e = make(task, config, both.products[0])) return e;
  return launch(both, task, config, stream);
}

cudaError_t decode_joined_sm90(const LinearTask& first, const DecodeConfig& first_config, const LinearTask& second,
                               const DecodeConfig& second_config, cudaStream_t stream) {
  Products both{};
  both.count = 2;
  RingParams<FloatActs>(&p)[2] = both.products;
  if (const cudaError_t e = make(first, first_config, p[0])) return e;
  if (const cudaError_t e = make(second, second_config, p[1])) return e;
  if (first.a_dtype != second.a_dtype || first.weight.codes != second.weight.codes || first.weight.codes == Codes::e4m3 ||
      !(p[0].format == p[1].format) || p[0].x.m != p[1].x.m || second.experts.source != nullptr)
    return cudaErrorInvalidValue;
  // The map of the product whose rows are longer has room for the other one's.
  const bool longer = p[1].x_pitch > p[0].x_pitch;
  DecodeConfig config = longer ? second_config : first_config;
  config.grid = std::min(first_config.grid, second_config.grid);
  if (longer) p[0].stages = p[1].stages, p[0].x_pitch = p[1].x_pitch;
  both.meeting = static_cast<Meeting*>(second.scratch);
  both.ticket = next_ticket();
  if (const cudaError_t e = launch(both, first, config, stream); e != cudaErrorCooperativeLaunchTooLarge) return e;
  cudaGetLastError();  // This process has fewer multiprocessors than the GPU, as under MPS: then one product after the other.
  if (const cudaError_t e = decode_experts_sm90(first, first_config, stream)) return e;
  return decode_experts_sm90(second, second_config, stream);
}

}  // namespace nibble::cuda
