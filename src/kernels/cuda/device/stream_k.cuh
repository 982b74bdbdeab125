// How CTAs leave each other parts of sums, and add them up (stream_k.hpp).
#pragma once

#include <type_traits>

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/device/stream_k.hpp"

namespace nibble::cuda {

constexpr int kPartsBarrier = 9;  // a named barrier, of those that leave a part and the warp that raises its flags
__device__ constexpr int left_threads(int blocks) { return 128 * blocks + 32; }

/// What one warp of a multiplying warpgroup does: warp `warp` of `warps`, with the sums of kUnits units.
template <class Sum, int kUnits>
struct Parts {
  const StreamK& memory;
  int warps, warp, lane;

  __device__ uint4* part(int cta) const {
    asm volatile("" : "+r"(cta));  // made when it is wanted: nothing of it is to stand in registers during the products
    return reinterpret_cast<uint4*>(memory.parts) + ((cta * warps + warp) * kUnits) * 32 + lane;
  }

  /// To memory, and to the warp that raises the flags: it waits for the stores, while this one goes on.
  __device__ void leave(int cta, int blocks, const Sum (&acc)[4 * kUnits]) const {
    uint4* to = part(cta);
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
      to[i * 32] = {bits(acc[4 * i]), bits(acc[4 * i + 1]), bits(acc[4 * i + 2]), bits(acc[4 * i + 3])};
    ptx::named_barrier_arrive(kPartsBarrier, left_threads(blocks));
  }

  /// Adds what the CTAs before `cta` have of its pass, `missing` records: the nearest first.
  __device__ void add(const Deal& deal, int cta, int missing, Sum (&acc)[4 * kUnits]) const {
    constexpr int kBatch = kUnits < 8 ? kUnits : 8;  // units asked for at a time: each would be a trip to L2 otherwise
#pragma unroll 1
    while (missing > 0) {
      --cta;
      missing -= deal.begin(cta + 1) - deal.begin(cta);
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
      __syncwarp();  // all lanes have seen it
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

/// Of a warp that has nothing else to do: raises the flags of what its CTA leaves, when all has been stored: a warpgroup's for each row
/// block, or for `least` of them where warpgroups are not row blocks.
__device__ inline void raise_flags(const StreamK& memory, const Deal& deal, int cta, int lane, int least = 1) {
  int blocks = deal.left_blocks(cta);
  if (blocks == 0) return;
  blocks = max(blocks, least);
  ptx::named_barrier(kPartsBarrier, left_threads(blocks));
  if (lane < 4 * blocks) ptx::store_release(memory.flags + cta * kPartFlags + lane, memory.ticket);
}

}  // namespace nibble::cuda
