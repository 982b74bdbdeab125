// Decode on Hopper with f16 or bf16 activations, in the ring of decode_ring.cuh. A CTA's slice of them is fetched by bulk copies, or gathered
// where channels are permuted, K is no multiple of a record, or rows are not aligned. bf16 becomes f16 there (decode_range.cuh).
//
// A prescale of up to 8 tokens is fetched, too, before the previous kernel has ended, because its factors are constant: behind everything else
// in shared memory, of which the ring leaves as much. The multiplying warps multiply the slice in place.
#pragma once

#include "kernels/cuda/sm90/decode/decode_range.cuh"
#include "kernels/cuda/sm90/decode/decode_ring.cuh"
#include "kernels/cuda/tasks/decode.hpp"

namespace nibble::cuda {

struct FloatActs : Activations {
  bool bulk;             // can be fetched by bulk copies
  const float* factors;  // of channels [K], fetched by bulk copies; null: none, or gathering multiplies by them
  int factors_at;        // in shared memory
};
using DecodeKernel = const Launchable<RingParams<FloatActs>>*;
/// The kernel for codes that are floats; null beyond 8 tokens.
DecodeKernel decode_float_codes(Codes codes, Known known, int tokens);
/// Rows of experts: a launch for all of them, in tiles of config.tokens (decode_experts.cuh).
cudaError_t decode_experts_sm90(const LinearTask& task, const DecodeConfig& config, cudaStream_t stream);

namespace {

/// Multiplies `channels` activations of each token in shared memory by their channels' factors, each product rounded to `type`; a token
/// begins every `pitch` bytes. With `dummy` nothing is stored: it fetches the instructions. Out of line, as gather_apart is.
__device__ __noinline__ void prescale_slice(std::uint32_t x, int pitch, int tokens, std::uint32_t factors, int channels,
                                            DType type, int thread, bool dummy) {
  for (int first = 8 * thread; first < channels; first += 8 * kMultipliers) {
    const uint4 low = ptx::load_shared16(factors + 4 * first), high = ptx::load_shared16(factors + 4 * first + 16);
    const EightFactors eight{{__uint_as_float(low.x), __uint_as_float(low.y), __uint_as_float(low.z), __uint_as_float(low.w),
                              __uint_as_float(high.x), __uint_as_float(high.y), __uint_as_float(high.z),
                              __uint_as_float(high.w)}};
    for (int token = 0; token < tokens; ++token) {
      const std::uint32_t at = x + token * pitch + 2 * first;
      const uint4 product = times(ptx::load_shared16(at), eight, type);
      if (!dummy) ptx::store_shared16(at, product);
    }
  }
}

template <Known kKnown, int kTokenTiles, Codes kCodes>
struct Decode {
  using Params = RingParams<FloatActs>;
  static constexpr int kTiles = kTokenTiles;
  static constexpr bool kQuantizes = false;
  static constexpr bool kJoins = kCodes != Codes::e4m3;

  static constexpr int kPlaces = kTiles;
  /// Lane l: token l mod 8, channels 8·(l div 8) …; tokens past M repeat the last one.
  __device__ static __forceinline__ std::uint32_t place(const Params& p, std::uint32_t x, int lane, int tile) {
    return x + min(8 * tile + lane % 8, p.x.m - 1) * p.x_pitch + lane / 8 * 16;
  }
  __device__ static constexpr int record_bytes(int) { return gpu_tile::kChannels * 2; }

  __device__ static __forceinline__ void multiply(const RecordFormat& format, std::uint32_t record,
                                                  const std::uint32_t (&x)[kTiles], Sums<kTiles>& acc) {
    multiply_record<kKnown, kTiles, __half, kCodes>(format, record, x, acc);
  }
  __device__ static __forceinline__ float2 sum(const float* part, int m, int token, int row) {
    return sum_parts<__half, kCodes>(part, m, token, row);
  }
  __device__ static __forceinline__ bool narrows(const Params& p) { return p.x.rule.type == DType::bf16; }
  __device__ static __forceinline__ void restore_range(const Params& p, const TokenRange* ranges, Sums<kTiles>& acc) {
    if (narrows(p)) cuda::restore_range<kTiles>(ranges, p.x.m, acc);
  }
  __device__ static __forceinline__ bool has_factors(const Params& p) { return kTiles == 1 && p.x.factors != nullptr; }
  __device__ static __forceinline__ void request_factors(const Params& p, int first, int records, std::uint32_t base,
                                                         std::uint32_t x_full) {
    const int bytes = records * gpu_tile::kChannels * 4;
    ptx::barrier_arrive_expect(x_full, bytes);
    ptx::bulk_copy(base + p.x.factors_at, p.x.factors + first * gpu_tile::kChannels, bytes, x_full, ptx::evict_last());
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
  __device__ static __forceinline__ void fetch_steps(const Params& p, std::uint32_t parts, float* same, int thread) {
    if (has_factors(p)) prescale_slice(parts, 0, 1, parts, 8 * kMultipliers, p.x.rule.type, thread, true);
    if (narrows(p)) fetch_narrow(parts, same, thread);
  }
  __device__ static __forceinline__ void fetch(const Params& p, const Slice& slice, std::uint32_t base) {
    const int channels = slice.records * gpu_tile::kChannels;
    if (p.x.bulk) {
      ptx::barrier_wait(slice.x_full, 0);
      if (has_factors(p)) {
        prescale_slice(slice.x, p.x_pitch, p.x.m, base + p.x.factors_at, channels, p.x.rule.type, threadIdx.x, false);
        ptx::named_barrier(1, kMultipliers);
      }
    } else {
      ptx::wait_for_predecessors();
      stage_activations(p.x, slice.first * gpu_tile::kChannels, channels, slice.x, p.x_pitch, threadIdx.x, kMultipliers);
      ptx::async_copy_commit();
      ptx::async_copy_wait<0>();
      ptx::named_barrier(1, kMultipliers);
    }
    if (narrows(p)) narrow(slice.x, p.x_pitch, p.x.m, channels, slice.ranges, threadIdx.x, false);
  }
};

}  // namespace
}  // namespace nibble::cuda
