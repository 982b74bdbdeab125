// How a CTA of the wgmma kernels walks over its passes (gemm_schedule.hpp).
#pragma once

#include "kernels/cuda/tasks/gemm_schedule.hpp"

namespace nibble::cuda {

/// The position of this CTA. A cluster is neighbouring blocks. blockIdx, unlike the cluster registers, is uniform to the compiler, which
/// keeps values derived from it in uniform registers.
__device__ inline int cluster_index(const Schedule& schedule) { return static_cast<int>(blockIdx.x) >> schedule.shift; }
__device__ inline int cluster_rank(const Schedule& schedule) {
  return schedule.split > 1 ? static_cast<int>(blockIdx.x) & (schedule.split - 1) : 0;
}

/// Calls use(pass) for every pass of this CTA.
template <class Use>
__device__ __forceinline__ void for_each_pass(const Schedule& schedule, Use use) {
  const int cluster = cluster_index(schedule), rank = cluster_rank(schedule);
  int at = schedule.start(cluster);
  Pass pass;
#pragma unroll 1
  while (schedule.next(cluster, rank, at, pass)) use(pass);
}

}  // namespace nibble::cuda
