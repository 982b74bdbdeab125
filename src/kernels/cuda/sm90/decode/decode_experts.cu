// Launches decode for rows of experts on Hopper (decode_experts.cuh).
#include "kernels/cuda/sm90/decode/decode_experts.cuh"

#include <limits>

#include "kernels/cuda/sm90/decode/decode_kernel.cuh"

namespace nibble::cuda {
namespace {

template <Known kKnown, class Act, Codes kCodes>
DecodeKernel kernel() {
  return &kLaunchable<decode_experts_kernel<Decode<kKnown, 1, Act, kCodes>>>;
}
template <class Act>
DecodeKernel kernel_for(Known known, Codes codes) {
  const bool sixteen = known == Known::groups_of_16;
  switch (codes) {
    case Codes::u4:
      return known == Known::f16_scales    ? kernel<Known::f16_scales, Act, Codes::u4>()
             : known == Known::bf16_scales ? kernel<Known::bf16_scales, Act, Codes::u4>()
             : sixteen                     ? kernel<Known::groups_of_16, Act, Codes::u4>()
                                           : kernel<Known::nothing, Act, Codes::u4>();
    case Codes::u8:
      return known == Known::f16_scales    ? kernel<Known::f16_scales, Act, Codes::u8>()
             : known == Known::bf16_scales ? kernel<Known::bf16_scales, Act, Codes::u8>()
             : sixteen                     ? kernel<Known::groups_of_16, Act, Codes::u8>()
                                           : kernel<Known::nothing, Act, Codes::u8>();
    case Codes::e4m3: return sixteen ? nullptr : kernel<Known::nothing, Act, Codes::e4m3>();
    case Codes::e2m1:
      return sixteen ? kernel<Known::groups_of_16, Act, Codes::e2m1>() : kernel<Known::nothing, Act, Codes::e2m1>();
    default: return nullptr;
  }
}

}  // namespace

cudaError_t decode_experts_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream) {
  RingParams<FloatActs> p = ring_params<FloatActs>(task, 0, config);
  const Activations x = activations(task, 0, config.tokens);
  if (config.split != 1 || config.tokens > 8 || task.weight.geometry.k % 8 != 0) return cudaErrorInvalidValue;
  if (!x.rule.copies_rows()) return cudaErrorInvalidAddressSpace;
  p.x = {x, true, nullptr, 0};
  p.experts = task.experts;
  if (std::int64_t{task.experts.most} * p.tiles > std::numeric_limits<int>::max()) return cudaErrorInvalidValue;  // items
  const bool sorts = p.experts.sort != nullptr;
  if (sorts) p.sort = *p.experts.sort;
  if (sorts && (p.sort.ids == nullptr || p.sort.rows > kFewPairs)) return cudaErrorInvalidValue;
  p.few_tiles = align16(config.smem);
  p.run = row_tiles_of_run(p.tile_records);
  const Known known = known_of(p.format);
  const DecodeKernel kernel = task.a_dtype == DType::bf16 ? kernel_for<__nv_bfloat16>(known, task.weight.codes)
                                                          : kernel_for<__half>(known, task.weight.codes);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  LaunchShape shape(config.grid, 1, kExpertThreads, sorts ? p.few_tiles + kFewTilesBytes : config.smem, stream);
  return cudaLaunchKernelEx(&shape.config, kernel->kernel, p);
}

}  // namespace nibble::cuda
