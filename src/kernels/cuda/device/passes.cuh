// How a CTA of the wgmma kernels walks over its passes (gemm_schedule.hpp).
#pragma once

#include "kernels/cuda/tasks/gemm_schedule.hpp"

namespace nibble::cuda {

/// The position of this CTA. A cluster is neighbouring blocks. blockIdx, unlike the cluster registers, is uniform to the compiler, which
/// keeps values derived from it in uniform registers.
__device__ inline int cluster_index(const Deal& deal) { return static_cast<int>(blockIdx.x) >> deal.shift; }
__device__ inline int cluster_rank(const Deal& deal) {
  return deal.split > 1 ? static_cast<int>(blockIdx.x) & (deal.split - 1) : 0;
}

/// Calls use(pass) for every pass of this CTA.
template <class Use>
__device__ __forceinline__ void for_each_pass(const Deal& deal, Use use) {
  const int cluster = cluster_index(deal), rank = cluster_rank(deal);
  int at = deal.start(cluster);
  Pass pass;
#pragma unroll 1
  while (deal.next(cluster, rank, at, pass)) use(pass);
}

}  // namespace nibble::cuda
