// D[M,N] = epilogue(x[M,K] · Wᵀ) on Hopper for more tokens than decode takes: wgmma with the weights in registers.
//
//   Dᵀ[N,M] = W[N,K] · xᵀ[K,M]       weights are the 64-row A operand, out of registers; n tokens its B operand, out of shared memory
//
//   CTA    = multiplying warpgroups (four, three for n = 128, two for n = 256) ◀──ring of stages── producer warps        cta.cuh
//   pass   = a row block of 64 for each warpgroup × n tokens × all of K, or a part of it                       gemm_schedule.hpp
//
//   a pass, role by role                                                                        its file
//     producers     fill a stage: n tokens × 128 channels, a record of each row block           gemm_stages.cuh
//     multiply      codes → operands in registers → wgmma, of 16-bit activations                gemm_floats.cuh
//                                                          of pairs of f16                      gemm_pairs.cuh
//                                                          of s8 codes (wna8.hpp)               gemm_codes.cuh
//     reduce        sums of warpgroups, of a cluster                                            reduce.cuh
//                   sums of CTAs that share a pass by stream-K                                  stream_k.cuh
//     store         Dᵀ becomes D, through the epilogue                                          store.cuh
//     the order     of these steps                                                              consume.cuh
//
// How many CTAs and warpgroups share a pass along K comes from the kernel's row in the table, never from M. Weights do not depend on the
// previous kernel: the ring is filled with them before that kernel has ended (programmatic dependent launch).
#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/gemm/consume.cuh"
#include "kernels/cuda/sm90/gemm/gemm_codes.cuh"
#include "kernels/cuda/sm90/gemm/gemm_floats.cuh"
#include "kernels/cuda/sm90/gemm/gemm_pairs.cuh"

namespace nibble::cuda {
namespace {

template <class T>
using Products = std::conditional_t<T::kCodes, CodeProducts<T>, std::conditional_t<T::kPairs, PairProducts<T>, FloatProducts<T>>>;

/// What follows the products. Weights are scaled as operands or, with their sums, before the reduction: what is left is a bias.
template <class T>
struct Gemm : Products<T> {
  using Products<T>::Products;
  using Sum = float;
  static constexpr bool kUnrollsStore = false;
  struct Rows {
    float2 bias;
  };

  __device__ void consume(const Pass& pass, Cursor& from) const { consume_pass(*this, pass, from); }
  __device__ Rows rows_of(const Pass&, int block) const { return {Store<Gemm>{*this, this->p.m}.bias(block)}; }
  __device__ void load_token_terms(const Pass&) const {}
  __device__ void wait_for_token_terms() const {}
  template <int kCount>
  __device__ void subtract_zeros(float*, const Rows&, int) const {}
  template <int kCount>
  __device__ void add_sum_bias(float*, int) const {}
  template <bool kRaw>
  __device__ float4 finish(const Four<float>& sums, const Rows&, int) const {
    return float4_of(sums);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1) gemm_sm90_kernel(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  run_roles<Kernel>(p, shared);
}

template <class Act, Codes kCodes, ConstantsPath kPath, bool kPatches, ActTerms kTerms>
GemmKernel kernel_for(int tokens) {
  switch (tokens) {
    case 16:
      if constexpr (!kPatches) return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 16, false, kTerms>>>>;
      return nullptr;
    case 32:
      if constexpr (!kPatches) return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 32, false, kTerms>>>>;
      return nullptr;
    case 64: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 64, kPatches, kTerms>>>>;
    case 128:
      if constexpr (!kPatches || !std::is_same_v<Act, std::int8_t>)
        return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 128, kPatches, kTerms>>>>;
      return nullptr;
    case 256:
      if constexpr (!std::is_same_v<Act, std::int8_t>)
        return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 256, kPatches, kTerms>>>>;
      return nullptr;
    default: return nullptr;
  }
}
template <class Act, Codes kCodes, bool kPatches = false, ActTerms kTerms = ActTerms::scaled>
GemmKernel kernel_for(int tokens, ConstantsPath path) {
  if (path == ConstantsPath::fixed_zeros) return kernel_for<Act, kCodes, ConstantsPath::fixed_zeros, kPatches, kTerms>(tokens);
  if (path == ConstantsPath::integer_zeros)
    return kernel_for<Act, kCodes, ConstantsPath::integer_zeros, kPatches, kTerms>(tokens);
  if constexpr (!std::is_same_v<Act, std::int8_t>) {
    if (path == ConstantsPath::fine_groups) return kernel_for<Act, kCodes, ConstantsPath::fine_groups, kPatches, kTerms>(tokens);
    if (path == ConstantsPath::groups_of_16)
      return kernel_for<Act, kCodes, ConstantsPath::groups_of_16, kPatches, kTerms>(tokens);
    if constexpr (!kPatches)
      if (path == ConstantsPath::groups_of_8)
        return kernel_for<Act, kCodes, ConstantsPath::groups_of_8, kPatches, kTerms>(tokens);
    if constexpr (kCodes == Codes::u4 && !kPatches) {
      if (path == ConstantsPath::exact_offsets)
        return kernel_for<Act, kCodes, ConstantsPath::exact_offsets, kPatches, kTerms>(tokens);
      if (path == ConstantsPath::float_zeros)
        return kernel_for<Act, kCodes, ConstantsPath::float_zeros, kPatches, kTerms>(tokens);
    }
  }
  return kernel_for<Act, kCodes, ConstantsPath::any, kPatches, kTerms>(tokens);
}
/// The kernel for codes that are integers.
template <class Act, bool kPatches = false>
GemmKernel integers_kernel_for(int tokens, const RecordFormat& format) {
  const ConstantsPath path = constants_path(format, kActType<Act>);
  return format.codes == Codes::u4 ? kernel_for<Act, Codes::u4, kPatches>(tokens, path)
                                   : kernel_for<Act, Codes::u8, kPatches>(tokens, path);
}
/// The kernel for codes that are floats: e4m3 in groups of 32 channels or more, e2m1 of 16 or more.
template <class Act, bool kPatches = false>
GemmKernel floats_kernel_for(int tokens, const RecordFormat& format) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  const ConstantsPath path = constants_path(format, kActType<Act>);
  const bool whole = path == ConstantsPath::float_codes;
  if (format.codes == Codes::e4m3)
    return whole ? kernel_for<Act, Codes::e4m3, ConstantsPath::float_codes, kPatches, kTerms>(tokens)
                 : kernel_for<Act, Codes::e4m3, ConstantsPath::any, kPatches, kTerms>(tokens);
  if (format.codes != Codes::e2m1) return nullptr;
  if (path == ConstantsPath::groups_of_16)
    return kernel_for<Act, Codes::e2m1, ConstantsPath::groups_of_16, kPatches, kTerms>(tokens);
  if (path == ConstantsPath::fine_groups)
    return kernel_for<Act, Codes::e2m1, ConstantsPath::fine_groups, kPatches, kTerms>(tokens);
  return whole ? kernel_for<Act, Codes::e2m1, ConstantsPath::float_codes, kPatches, kTerms>(tokens)
               : kernel_for<Act, Codes::e2m1, ConstantsPath::any, kPatches, kTerms>(tokens);
}

/// The kernels for planar images: 64, 128 or 256 tokens a pass, integers with the constants that nearly all checkpoints have.
template <class Act, Codes kCodes, ConstantsPath kPath>
GemmKernel planar_kernel_for(int tokens) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  switch (tokens) {
    case 64: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 64, true, kTerms, false, false, true>>>>;
    case 128: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 128, true, kTerms, false, false, true>>>>;
    case 256: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 256, true, kTerms, false, false, true>>>>;
    default: return nullptr;
  }
}
template <class Act, Codes kCodes>
GemmKernel planar_kernel_for(int tokens, ConstantsPath path) {
  switch (path) {
    case ConstantsPath::fixed_zeros: return planar_kernel_for<Act, kCodes, ConstantsPath::fixed_zeros>(tokens);
    case ConstantsPath::integer_zeros: return planar_kernel_for<Act, kCodes, ConstantsPath::integer_zeros>(tokens);
    case ConstantsPath::fine_groups: return planar_kernel_for<Act, kCodes, ConstantsPath::fine_groups>(tokens);
    default: return nullptr;
  }
}
template <class Act>
GemmKernel planar_kernel_for(int tokens, const RecordFormat& format) {
  const ConstantsPath path = constants_path(format, kActType<Act>);
  if (format.codes == Codes::u4) return planar_kernel_for<Act, Codes::u4>(tokens, path);
  return format.codes == Codes::u8 ? planar_kernel_for<Act, Codes::u8>(tokens, path) : nullptr;
}

/// The kernels for rows of experts: 16, 32, 64 or 128 tokens a pass, and the kinds of weights that checkpoints of experts have.
template <class Act, Codes kCodes, ConstantsPath kPath>
GemmKernel experts_kernel_for(int tokens) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  switch (tokens) {
    case 16: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 16, false, kTerms, true>>>>;
    case 32: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 32, false, kTerms, true>>>>;
    case 64: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 64, false, kTerms, true>>>>;
    case 128: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<Act, kCodes, kPath, 128, false, kTerms, true>>>>;
    default: return nullptr;
  }
}
template <class Act>
GemmKernel experts_kernel_for(int tokens, const RecordFormat& format) {
  constexpr auto kFixed = ConstantsPath::fixed_zeros, kInteger = ConstantsPath::integer_zeros, kFine = ConstantsPath::fine_groups;
  const ConstantsPath path = constants_path(format, kActType<Act>);
  switch (format.codes) {
    case Codes::u4:
      if (path == kFixed) return experts_kernel_for<Act, Codes::u4, kFixed>(tokens);
      if (path == kInteger) return experts_kernel_for<Act, Codes::u4, kInteger>(tokens);
      return path == kFine ? experts_kernel_for<Act, Codes::u4, kFine>(tokens) : nullptr;
    case Codes::u8: return path == kFixed ? experts_kernel_for<Act, Codes::u8, kFixed>(tokens) : nullptr;
    case Codes::e4m3:
      return path == ConstantsPath::float_codes ? experts_kernel_for<Act, Codes::e4m3, ConstantsPath::float_codes>(tokens)
                                                : nullptr;
    case Codes::e2m1:
      if (path == ConstantsPath::groups_of_16) return experts_kernel_for<Act, Codes::e2m1, ConstantsPath::groups_of_16>(tokens);
      return path == kFine ? experts_kernel_for<Act, Codes::e2m1, kFine>(tokens) : nullptr;
    default: return nullptr;
  }
}

/// The kernels for pairs of f16: 16, 32, 64 or 128 tokens a pass.
template <Codes kCodes, ConstantsPath kPath>
GemmKernel pairs_kernel_for(int tokens) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  switch (tokens) {
    case 16: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<__half, kCodes, kPath, 16, false, kTerms, false, true>>>>;
    case 32: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<__half, kCodes, kPath, 32, false, kTerms, false, true>>>>;
    case 64: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<__half, kCodes, kPath, 64, false, kTerms, false, true>>>>;
    case 128: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<__half, kCodes, kPath, 128, false, kTerms, false, true>>>>;
    default: return nullptr;
  }
}

/// The same of s8 codes, without zero points or offsets: 16, 64 or 128 tokens. A token's scale that is not in the terms is 1 there.
template <ConstantsPath kPath>
GemmKernel experts_kernel_of_codes(int tokens) {
  constexpr ActTerms kTerms = ActTerms::scaled;
  constexpr Codes kCodes = Codes::u4;
  switch (tokens) {
    case 16: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<std::int8_t, kCodes, kPath, 16, false, kTerms, true>>>>;
    case 64: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<std::int8_t, kCodes, kPath, 64, false, kTerms, true>>>>;
    case 128: return &kLaunchable<gemm_sm90_kernel<Gemm<GemmTraits<std::int8_t, kCodes, kPath, 128, false, kTerms, true>>>>;
    default: return nullptr;
  }
}

}  // namespace
}  // namespace nibble::cuda
