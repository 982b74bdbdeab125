// Launches decode on Hopper (decode_kernel.cuh); its kernels for codes that are integers.
#include <algorithm>

#include "kernels/cuda/sm90/decode/decode_kernel.cuh"

namespace nibble::cuda {
namespace {

template <int kTiles, Codes kCodes>
DecodeKernel kernel_for(Known known) {
  if (known == Known::f16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::f16_scales, kTiles, kCodes>>>;
  if (known == Known::bf16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::bf16_scales, kTiles, kCodes>>>;
  if (known == Known::groups_of_16) return &kLaunchable<decode_ring_kernel<Decode<Known::groups_of_16, kTiles, kCodes>>>;
  return &kLaunchable<decode_ring_kernel<Decode<Known::nothing, kTiles, kCodes>>>;
}
template <int kTiles>
DecodeKernel kernel_for(Known known, Codes codes) {
  return codes == Codes::u4 ? kernel_for<kTiles, Codes::u4>(known) : kernel_for<kTiles, Codes::u8>(known);
}
DecodeKernel kernel_for(const LinearTask& task, int tokens) {
  const Known known = known_of(record_format(task.weight));
  const Codes codes = task.weight.codes;
  if (gpu_tile::are_floats(codes)) return decode_float_codes(codes, known, tokens);
  return tokens <= 8 ? kernel_for<1>(known, codes) : kernel_for<2>(known, codes);
}

/// Where a CTA's factors of a prescale begin in shared memory, and what the ring is then: as long as fits beside them, of at least two
/// stages. 0: they do not fit.
int place_factors(RingParams<FloatActs>& p, const gpu_tile::Geometry& geo, DecodeConfig& config, int most) {
  const int bytes = longest_slice(geo, config.split) * gpu_tile::kChannels * 4;
  for (; config.stages >= 2; --config.stages) {
    const int at = align128(shared_map(config.stages, p.format.bytes, p.x.m, p.x_pitch, p.part_buffers, config.split).total);
    if (at + bytes > most) continue;
    p.stages = config.stages;
    config.smem = std::max(config.smem, at + bytes);
    return at;
  }
  return 0;
}

}  // namespace

cudaError_t ring_room_sm90(RingRoom& room) {
  const auto kernel = decode_ring_kernel<Decode<Known::f16_scales, 1, Codes::u4>>;
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
    DecodeConfig own = config;
    p.x = {x, in_order && x.rule.prescale == nullptr, nullptr, 0};
    p.stages = config.stages;
    if (in_order && x.rule.prescale != nullptr && m <= 8) {
      int device = 0, most = 0;
      if (const cudaError_t e = most_shared(device, most)) return e;
      p.x.factors_at = place_factors(p, geo, own, most);
      p.x.bulk = p.x.factors_at != 0;
      if (p.x.bulk) p.x.factors = x.rule.prescale;
    }
    const DecodeKernel kernel = kernel_for(task, m);
    if (kernel == nullptr) return cudaErrorInvalidValue;
    if (const cudaError_t e = launch_ring(*kernel, p, own, stream)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
