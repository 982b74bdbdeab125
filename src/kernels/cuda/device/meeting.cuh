// The CTAs of a cooperative launch wait for each other once, in memory whose contents do not matter before.
//
//   the first CTA   arrived, left = 0, open = ticket ──┐
//   every CTA       ───────────────────────────────────┴▶ open? ── works ──▶ arrived + 1 ──▶ arrived = all? ── left + 1 ──▶ the last: open = 0
//
// The ticket is the launch's own, but a graph launches it again: so the last CTA closes what the next launch must find closed.
#pragma once

#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/tasks/decode_config.hpp"

namespace nibble::cuda {

/// One thread of each CTA calls all three, in this order.
/// After all kernels that came before have ended.
__device__ inline void open_meeting(Meeting* m, std::uint64_t ticket) {
  if (blockIdx.x == 0) {
    m->arrived = 0, m->left = 0;
    ptx::store_release(&m->open, ticket);
  }
  while (ptx::load_acquire(&m->open) != ticket) {
  }
}
/// What this CTA stored before a barrier of its threads can be read by all after this.
__device__ inline void meet(Meeting* m) {
  ptx::add_release(&m->arrived, 1);
  while (ptx::load_acquire(&m->arrived) != gridDim.x) {
  }
}
__device__ inline void leave_meeting(Meeting* m) {
  if (atomicAdd(&m->left, 1) == gridDim.x - 1) m->open = 0;
}

}  // namespace nibble::cuda
