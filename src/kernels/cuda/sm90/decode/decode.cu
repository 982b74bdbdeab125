// Launches decode on Hopper (decode_kernel.cuh); its kernels for codes that are integers.
#include <algorithm>

#include "kernels/cuda/sm90/decode/decode_kernel.cuh"

namespace nibble::cuda {
namespace {

template <int kTiles, class Act, Codes kCodes>
DecodeKernel kernel_for(Known known) {
  if (known == Known::f16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::f16_scales, kTiles, Act, kCodes>>>;
  if (known == Known::bf16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::bf16_scales, kTiles, Act, kCodes>>>;
  if (known == Known::groups_of_16) return &kLaunchable<decode_ring_kernel<Decode<Known::groups_of_16, kTiles, Act, kCodes>>>;
  return &kLaunchable<decode_ring_kernel<Decode<Known::nothing, kTiles, Act, kCodes>>>;
}
template <int kTiles, class Act>
DecodeKernel kernel_for(Known known, Codes codes) {
  return codes == Codes::u4 ? kernel_for<kTiles, Act, Codes::u4>(known) : kernel_for<kTiles, Act, Codes::u8>(known);
}
DecodeKernel kernel_for(const LinearTask& task, int tokens) {
  const Known known = known_of(record_format(task.weight));
  const Codes codes = task.weight.codes;
  if (gpu_tile::are_floats(codes)) return decode_float_codes(codes, known, task.a_dtype, tokens);
  if (task.a_dtype == DType::bf16)
    return tokens <= 8 ? kernel_for<1, __nv_bfloat16>(known, codes) : kernel_for<2, __nv_bfloat16>(known, codes);
  return tokens <= 8 ? kernel_for<1, __half>(known, codes) : kernel_for<2, __half>(known, codes);
}

/// Whether the factors of a prescale take a stage's place: they fit, and two stages are left.
bool fetches_factors(const gpu_tile::Geometry& geo, const DecodeConfig& config, int tokens) {
  return tokens <= 8 && config.stages > 2 &&
         longest_slice(geo, config.split) * gpu_tile::kChannels * 4 <= kDecodeWarps * geo.record_bytes();
}

}  // namespace

cudaError_t ring_room_sm90(RingRoom& room) {
  const auto kernel = decode_ring_kernel<Decode<Known::f16_scales, 1, __half, Codes::u4>>;
  return ring_room(reinterpret_cast<const void*>(kernel), room);
}

cudaError_t linear_decode_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  if (task.experts.tiles != nullptr) return decode_experts_sm90(task, config, stream);
  RingParams<FloatActs> p = ring_params<FloatActs>(task, 0, config);
  for (int done = 0; done < task.m; done += config.tokens) {
    const int m = std::min(config.tokens, task.m - done);
    p.first_token = done;
    const Activations x = activations(task, done, m);
    const bool in_order = x.rule.perm == nullptr && x.rule.vectors && geo.k % gpu_tile::kChannels == 0;
    const bool bulk = in_order && (x.rule.prescale == nullptr || fetches_factors(geo, config, m));
    p.x = {x, bulk, bulk ? x.rule.prescale : nullptr};
    p.stages = config.stages - (p.x.factors != nullptr ? 1 : 0);
    const DecodeKernel kernel = kernel_for(task, m);
    if (kernel == nullptr) return cudaErrorInvalidValue;
    if (const cudaError_t e = launch_ring(*kernel, p, config, stream)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
