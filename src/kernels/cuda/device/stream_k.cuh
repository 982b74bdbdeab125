// Stream-K: CTAs exchange partial sums through device memory and reduce them (stream_k.hpp).
#pragma once

#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/stream_k.hpp"

namespace nibble::cuda {

constexpr int kPartsBarrier = 9;  // a named barrier of the warps that store a partial sum and the warp that sets its flags
__device__ constexpr int left_threads(int groups) { return 128 * groups + 32; }

/// The part of one warp of a multiplying warpgroup: warp `warp` of `warps`, with the sums of kUnits units.
template <class Sum, int kUnits>
struct Parts {
  const StreamK& memory;
  int warps, warp, lane;

  __device__ uint4* part(int cta) const {
    asm volatile("" : "+r"(cta));  // recomputed at each use: values derived from it must not occupy registers during the products
    return reinterpret_cast<uint4*>(memory.parts) + ((cta * warps + warp) * kUnits) * 32 + lane;
  }

  /// Stores a partial sum and signals the warp that sets the flags; that warp waits for the stores while this one continues.
  __device__ void store(int cta, int blocks, const Sum (&acc)[4 * kUnits]) const {
    uint4* to = part(cta);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      to[i * 32] = {bits(acc[4 * i]), bits(acc[4 * i + 1]), bits(acc[4 * i + 2]), bits(acc[4 * i + 3])};
    ptx::named_barrier_arrive(kPartsBarrier, left_threads(blocks));
  }

  /// Adds the partial sums of the CTAs before `cta` for its pass, `missing` records in all, the nearest CTA first.
  __device__ void add(const Schedule& schedule, int cta, int missing, Sum (&acc)[4 * kUnits]) const {
    constexpr int kBatch = kUnits < 8 ? kUnits : 8;  // units loaded at a time, to hide the latency of L2
#pragma unroll 1
    while (missing > 0) {
      --cta;
      missing -= schedule.begin(cta + 1) - schedule.begin(cta);
      std::uint64_t* flag = memory.flags + cta * kPartFlags + warp;
      while (ptx::load_acquire(flag) != memory.ticket) {
      }
      const uint4* from = part(cta);
#pragma unroll
      for (int first = 0; first < kUnits; first += kBatch) {
        uint4 more[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) more[i] = __ldcg(from + (first + i) * 32);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          Sum* sums = acc + 4 * (first + i);
          sums[0] += sum(more[i].x), sums[1] += sum(more[i].y), sums[2] += sum(more[i].z), sums[3] += sum(more[i].w);
        }
      }
      __syncwarp();  // all lanes have seen the flag
      *flag = 0;
    }
  }

 private:
  static constexpr bool kFloat = std::is_same_v<Sum, float>;
  __device__ static std::uint32_t bits(Sum v) {
    if constexpr (kFloat)
      return __float_as_uint(v);
    else
      return static_cast<std::uint32_t>(v);
  }
  __device__ static Sum sum(std::uint32_t v) {
    if constexpr (kFloat)
      return __uint_as_float(v);
    else
      return static_cast<Sum>(v);
  }
};

/// For an idle warp: sets the flags of its CTA's partial sums once all have been stored: those of one warpgroup per row block, or
/// of `groups` where warpgroups are not row blocks.
__device__ inline void set_flags(const StreamK& memory, const Schedule& schedule, int cta, int lane, int groups = 0) {
  const int blocks = schedule.left_blocks(cta), storing = groups == 0 ? blocks : groups;
  if (blocks == 0) return;
  ptx::named_barrier(kPartsBarrier, left_threads(storing));
  if (lane < 4 * storing) ptx::store_release(memory.flags + cta * kPartFlags + lane, memory.ticket);
}

}  // namespace nibble::cuda
