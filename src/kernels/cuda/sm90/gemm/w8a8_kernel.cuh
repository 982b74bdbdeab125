// D[M,N] = epilogue(Â[M,K] · Ŵᵀ) on Hopper for 8-bit codes on both sides: wgmma with both operands in shared memory.
//
//   Dᵀ[N,M] = Ŵ[N,K] · Âᵀ[K,M]      weights are the 64-row A operand, n tokens the B operand
//
//   CTA   = multiplying warpgroups ◀──ring of stages── producer warps                                                    cta.cuh
//   pass  = up to `blocks` row blocks, one a warpgroup, × n tokens × all of K, or a part of it                 gemm_schedule.hpp
//
//   a pass, role by role                                                                        its file
//     producers     fill a stage: n tokens × 128 channels, a record of each row block           w8a8_stages.cuh
//     multiply      four wgmma a record; scales and zero points (w8a8_task.hpp)                 w8a8_products.cuh
//     reduce, store, their order                                       reduce.cuh, stream_k.cuh, store.cuh, consume.cuh
//     with many tokens they are the 64-row operand                                    w8a8_token_rows.cuh, w8a8_token_store.cuh
//
// Records are swizzled offline (gpu_w8.hpp), so that a linear copy makes them operands: nothing is converted.
//
//                        few tokens                                     many tokens
//   bound by             memory                                         tensor cores, and the epilogue
//   K is shared by       `depth` warpgroups, `split` CTAs of a cluster  `split` CTAs, where groups have scales
#pragma once

#include "kernels/cuda/sm90/gemm/w8a8_products.cuh"
#include "kernels/cuda/sm90/gemm/w8a8_token_rows.cuh"

namespace nibble::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) w8a8_sm90_kernel(const __grid_constant__ W8A8Params p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  run_roles<Kernel>(p, shared);
}

template <class Code, bool kGrouped, bool kPatches = false, bool kPrecise = false>
W8A8Kernel kernel_for(int tokens) {
  switch (tokens) {
    case 16:
      if constexpr (!kPatches)
        return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 16, kGrouped, false, kPrecise>>>>;
      break;
    case 32:
      if constexpr (!kPatches)
        return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 32, kGrouped, false, kPrecise>>>>;
      break;
    case 64: return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 64, kGrouped, kPatches, kPrecise>>>>;
    case 128: return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 128, kGrouped, kPatches, kPrecise>>>>;
    case 256:
      if constexpr (!kGrouped)
        return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 256, false, kPatches, kPrecise>>>>;
      break;
    default: break;
  }
  return nullptr;
}
/// The kernel for rows of experts: 16, 64 or 128 tokens.
template <class Code, bool kGrouped>
W8A8Kernel experts_kernel_for(int tokens, bool token_rows) {
  switch (tokens) {
    case 16: return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 16, kGrouped, false, false, false, true>>>>;
    case 64:
      if constexpr (kGrouped)
        return &kLaunchable<w8a8_sm90_kernel<W8A8TokenRows<W8A8Traits<Code, 64, true, false, false, true, true>>>>;
      else
        return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 64, false, false, false, false, true>>>>;
    case 128:
      if (token_rows)
        return &kLaunchable<w8a8_sm90_kernel<W8A8TokenRows<W8A8Traits<Code, 128, kGrouped, false, false, true, true>>>>;
      if constexpr (!kGrouped)
        return &kLaunchable<w8a8_sm90_kernel<W8A8Products<W8A8Traits<Code, 128, false, false, false, false, true>>>>;
      break;
    default: break;
  }
  return nullptr;
}
/// The kernel with tokens as the 64-row operand.
template <class Code, bool kGrouped>
W8A8Kernel token_rows_kernel_for(int tokens) {
  switch (tokens) {
    case 64:
      if constexpr (kGrouped)
        return &kLaunchable<w8a8_sm90_kernel<W8A8TokenRows<W8A8Traits<Code, 64, true, false, false, true>>>>;
      break;
    case 128: return &kLaunchable<w8a8_sm90_kernel<W8A8TokenRows<W8A8Traits<Code, 128, kGrouped, false, false, true>>>>;
    case 256: return &kLaunchable<w8a8_sm90_kernel<W8A8TokenRows<W8A8Traits<Code, 256, kGrouped, false, false, true>>>>;
    default: break;
  }
  return nullptr;
}

}  // namespace
}  // namespace nibble::cuda
