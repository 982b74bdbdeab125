// Partial sums along K are added in a fixed order: those of warpgroups in shared memory, those of a cluster through distributed shared
// memory. (Those of stream-K go through device memory: stream_k.cuh.)
//
//   warpgroups   0 │ 1 … d−1 of a row block: d−1 write into their staging buffers, the first adds them in order
//
//   cluster      a unit is 64 rows × 8 tokens. Rank r owns U/S of the pass's U units, and has a box for each from every rank:
//
//                  rank 0's sums ──▶ ┌ unit 0 ┬ unit 1 ┬ …        16 bytes a thread of a warpgroup; the ring serves as the inbox
//                  rank 1's sums ──▶ │ 0 … S−1│ 0 … S−1│
//
//                the owner adds the boxes of a unit in the order of the ranks
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/sm90/gemm/cta.cuh"

namespace nibble::cuda {
namespace {

/// Four sums of a unit: rows g, g, g+8, g+8 of the warp's 16 and tokens 2t, 2t+1, 2t, 2t+1, of lane 4g + t.
template <class Sum>
struct alignas(16) Four {
  Sum at[4];

  __device__ void operator+=(const Four& more) {
#pragma unroll
    for (int i = 0; i < 4; ++i) at[i] += more.at[i];
  }
};
template <class Sum>
__device__ Four<Sum> unit_of(const Sum* acc, int unit) {
  return {acc[4 * unit], acc[4 * unit + 1], acc[4 * unit + 2], acc[4 * unit + 3]};
}

__device__ inline float4 float4_of(const Four<float>& v) { return {v.at[0], v.at[1], v.at[2], v.at[3]}; }

/// Reduces the sums of the warpgroups that share a row block into the first of them. All `warpgroups` call it.
template <class Cta, class Sum, int kSums>
__device__ void add_warpgroups(const Cta& cta, Sum (&acc)[kSums], int warpgroups) {
  if constexpr (Cta::kMayShare) {
    const auto part = [&](int group) {
      return reinterpret_cast<Four<Sum>*>(cta.shared + cta.p.map.staging + group * kStagingBytes) + cta.warp * 32 + cta.lane;
    };
    if (cta.k_index() != 0)
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) part(cta.warpgroup)[i * kGroupThreads] = unit_of(acc, i);
    ptx::named_barrier(kAllConsumers, warpgroups * kGroupThreads);
    if (cta.k_index() == 0)
#pragma unroll 1
      for (int t = 1; t < cta.depth(); ++t)
#pragma unroll
        for (int i = 0; i < kSums / 4; ++i) {
          const Four<Sum> more = part(cta.warpgroup + t)[i * kGroupThreads];
#pragma unroll
          for (int j = 0; j < 4; ++j) acc[4 * i + j] += more.at[j];
        }
    ptx::named_barrier(kAllConsumers, warpgroups * kGroupThreads);
  }
}

/// The units of a pass that each rank owns.
template <class Cta>
__device__ int owned_units(const Cta& cta) {
  return cta.p.schedule.most * Cta::kUnits / cta.p.schedule.split;
}
/// Sends the sums of this warpgroup's row block to the owners of its units.
template <class Cta, class Sum, int kSums>
__device__ void send_units(const Cta& cta, const Sum (&acc)[kSums]) {
  const int owned = owned_units(cta);
  int owner = cta.row_group() * Cta::kUnits / owned, index = cta.row_group() * Cta::kUnits % owned;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const std::uint32_t to =
        cta.base + ((index * cta.p.schedule.split + cta.rank) * kGroupThreads + cta.warp * 32 + opaque(cta.lane)) * 16;
    const Four<Sum> sums = unit_of(acc, j);
    ptx::store_remote16(ptx::map_to_rank(to, owner), reinterpret_cast<const float4&>(sums));
    if (++index == owned) index = 0, ++owner;
  }
}
/// The sum of unit `index` of those that this rank owns.
template <class Sum, class Cta>
__device__ Four<Sum> received_unit(const Cta& cta, int index) {
  const auto* box =
      reinterpret_cast<const Four<Sum>*>(cta.shared) + index * cta.p.schedule.split * kGroupThreads + cta.warp * 32 + cta.lane;
  Four<Sum> sum = box[0];
#pragma unroll 1
  for (int r = 1; r < cta.p.schedule.split; ++r) sum += box[r * kGroupThreads];
  return sum;
}

}  // namespace
}  // namespace nibble::cuda
