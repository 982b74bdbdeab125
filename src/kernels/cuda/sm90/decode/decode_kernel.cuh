// Decode on Hopper with f16 or bf16 activations as they are, in the ring of decode_ring.cuh. A CTA's slice of them is fetched by bulk
// copies, or gathered where channels are permuted or multiplied by a prescale, K is no multiple of a record, or rows are not aligned.
#pragma once

#include "kernels/cuda/sm90/decode/decode_ring.cuh"
#include "kernels/cuda/tasks/decode.hpp"

namespace nibble::cuda {

struct FloatActs : Activations {
  bool bulk;  // can be fetched by bulk copies
};
using DecodeKernel = const Launchable<RingParams<FloatActs>>*;
/// The kernel for codes that are floats; null beyond 8 tokens.
DecodeKernel decode_float_codes(Codes codes, Known known, DType act, int tokens);
/// Rows of experts: a launch for all of them, in tiles of config.tokens (decode_experts.cuh).
cudaError_t decode_experts_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream);

namespace {

template <Known kKnown, int kTokenTiles, class Act, Codes kCodes>
struct Decode {
  using Params = RingParams<FloatActs>;
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
    multiply_record<kKnown, kTiles, Act, kCodes>(format, record, x, acc);
  }
  __device__ static __forceinline__ float2 sum(const float* part, int m, int token, int row) {
    return sum_parts<Act, kCodes>(part, m, token, row);
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

}  // namespace
}  // namespace nibble::cuda
