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

/// The passes of this CTA, one after the other.
struct Passes {
  const Schedule& schedule;
  int cluster, rank, at;

  __device__ explicit Passes(const Schedule& s)
      : schedule(s), cluster(cluster_index(s)), rank(cluster_rank(s)), at(s.start(cluster)) {}
  /// False when there is none.
  __device__ __forceinline__ bool next(Pass& pass) { return schedule.next(cluster, rank, at, pass); }
};

}  // namespace nibble::cuda
