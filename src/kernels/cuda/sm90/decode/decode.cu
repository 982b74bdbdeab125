// Decode on Hopper with f16 or bf16 activations as they are, in the ring of decode_ring.cuh. A CTA's slice of them is fetched by bulk
// copies, or gathered where channels are permuted or multiplied by a prescale, K is no multiple of a record, or rows are not aligned.
#include <algorithm>

#include "kernels/cuda/sm90/decode/decode_ring.cuh"
#include "kernels/cuda/tasks/decode.hpp"

namespace nibble::cuda {
namespace {

struct Acts : Activations {
  bool bulk;  // can be fetched by bulk copies
};

template <Known kKnown, int kTokenTiles, class Act, int kBits>
struct Decode {
  using Params = RingParams<Acts>;
  static constexpr int kTiles = kTokenTiles;
  static constexpr bool kQuantizes = false;

  static constexpr int kPlaces = kTiles;
  /// Lane l: token l mod 8, channels 8·(l div 8) …; tokens past M repeat the last one.
  __device__ static __forceinline__ std::uint32_t place(const Params& p, std::uint32_t x, int lane, int tile) {
    return x + min(8 * tile + lane % 8, p.x.m - 1) * p.x_pitch + lane / 8 * 16;
  }
  __device__ static constexpr int record_bytes(int) { return gpu_tile::kChannels * 2; }

  __device__ static __forceinline__ void multiply(const RecordFormat& format, std::uint32_t record,
                                                  const std::uint32_t (&x)[kTiles], Sums<kTiles>& acc) {
    multiply_record<kKnown, kTiles, Act, kBits>(format, record, x, acc);
  }
  __device__ static __forceinline__ float2 sum(const float* part, int m, int token, int row) {
    return sum_parts<Act, kBits>(part, m, token, row);
  }
  __device__ static __forceinline__ bool requests(const Params& p) { return p.x.bulk; }
  __device__ static __forceinline__ void request(const Params& p, int first, int records, std::uint32_t to, std::uint32_t x_full,
                                                 int lane) {
    const int bytes = records * gpu_tile::kChannels * 2;
    if (lane == 0) ptx::barrier_arrive_expect(x_full, p.x.m * bytes);
    __syncwarp();
    const auto* x = static_cast<const std::uint16_t*>(p.x.x) + first * gpu_tile::kChannels;
    if (lane < p.x.m) ptx::bulk_copy(to + lane * p.x_pitch, x + lane * p.x.stride, bytes, x_full, ptx::evict_last());
  }
  __device__ static __forceinline__ void fetch(const Params& p, int first, int records, std::uint32_t x, std::uint32_t x_full) {
    if (p.x.bulk) {
      ptx::barrier_wait(x_full, 0);
    } else {
      ptx::wait_for_predecessors();
      stage_activations(p.x, first * gpu_tile::kChannels, records * gpu_tile::kChannels, x, p.x_pitch, threadIdx.x, kMultipliers);
      ptx::async_copy_commit();
      ptx::async_copy_wait<0>();
      ptx::named_barrier(1, kMultipliers);
    }
  }
};

using Kernel = const Launchable<RingParams<Acts>>*;

template <int kTiles, class Act, int kBits>
Kernel kernel_for(Known known) {
  if (known == Known::f16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::f16_scales, kTiles, Act, kBits>>>;
  if (known == Known::bf16_scales) return &kLaunchable<decode_ring_kernel<Decode<Known::bf16_scales, kTiles, Act, kBits>>>;
  if (known == Known::groups_of_16) return &kLaunchable<decode_ring_kernel<Decode<Known::groups_of_16, kTiles, Act, kBits>>>;
  return &kLaunchable<decode_ring_kernel<Decode<Known::nothing, kTiles, Act, kBits>>>;
}
template <int kTiles, class Act>
Kernel kernel_for(Known known, int bits) {
  return bits == 4 ? kernel_for<kTiles, Act, 4>(known) : kernel_for<kTiles, Act, 8>(known);
}
Kernel kernel_for(const LinearTask& task, int tokens) {
  const Known known = known_of(record_format(task.weight));
  const int bits = task.weight.geometry.bits;
  if (task.a_dtype == DType::bf16)
    return tokens <= 8 ? kernel_for<1, __nv_bfloat16>(known, bits) : kernel_for<2, __nv_bfloat16>(known, bits);
  return tokens <= 8 ? kernel_for<1, __half>(known, bits) : kernel_for<2, __half>(known, bits);
}

}  // namespace

cudaError_t ring_room_sm90(RingRoom& room) {
  const auto kernel = decode_ring_kernel<Decode<Known::f16_scales, 1, __half, 4>>;
  return ring_room(reinterpret_cast<const void*>(kernel), room);
}

cudaError_t linear_decode_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || (task.a_dtype != DType::f16 && task.a_dtype != DType::bf16))
    return cudaErrorInvalidValue;
  RingParams<Acts> p = ring_params<Acts>(task.weight, task.epilogue, 0, config);
  for (int done = 0; done < task.m; done += config.tokens) {
    const int m = std::min(config.tokens, task.m - done);
    p.first_token = done;
    const Activations x = activations(task, done, m);
    p.x = {x, x.rule.copies_rows() && geo.k % gpu_tile::kChannels == 0};
    if (const cudaError_t e = launch_ring(*kernel_for(task, m), p, config, stream)) return e;
  }
  return cudaSuccess;
}

}  // namespace nibble::cuda
