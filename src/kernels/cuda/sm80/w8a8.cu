// Launches the GEMM of 8-bit codes for GPUs without wgmma (w8a8_kernel.cuh), of rows of activations.
#include "kernels/cuda/sm80/w8a8_kernel.cuh"

namespace nibble::cuda {
namespace {

using Kernel = const Launchable<Params>*;

struct Variant {
  int rows, tokens, threads, smem;
  Kernel kernels[3];  // by mode

  std::int64_t ctas(const W8A8Task& task) const {
    return (task.weight.geometry.n + rows - 1) / rows * ((task.m + tokens - 1) / tokens);
  }
};
template <class S, Kernel kGrouped>
constexpr Variant kVariant{S::kRows,
                           S::kTokens,
                           S::kThreads,
                           S::kSmem,
                           {&kLaunchable<w8a8_sm80_kernel<S, Mode::integers, RowCopier>>,
                            &kLaunchable<w8a8_sm80_kernel<S, Mode::floats, RowCopier>>, kGrouped}};
constexpr Variant kFew = kVariant<Few, &kLaunchable<w8a8_sm80_kernel<Few, Mode::grouped, RowCopier>>>;
constexpr Variant kSome = kVariant<Some, &kLaunchable<w8a8_sm80_kernel<Some, Mode::grouped, RowCopier>>>;
constexpr Variant kMany = kVariant<Many, nullptr>;  // no registers for both sums and partial sums

}  // namespace

cudaError_t linear_w8a8_sm80(const W8A8Task& task, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1) return cudaErrorInvalidValue;
  int device = 0, sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const Mode mode = geo.integers ? Mode::integers : is_grouped(task) ? Mode::grouped : Mode::floats;
  const Variant& v = task.m <= kFew.tokens ? kFew : mode == Mode::grouped || kMany.ctas(task) < sms ? kSome : kMany;
  const Kernel kernel = v.kernels[static_cast<int>(mode)];
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  Params p{};
  p.task = task;
  p.token_blocks = (task.m + v.tokens - 1) / v.tokens;
  p.vector_codes =
      (reinterpret_cast<std::uintptr_t>(task.acts.codes) | static_cast<std::uintptr_t>(task.acts.pitch)) % kChunk == 0;
  if (v.ctas(task) > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  return launch_dependent(kernel->kernel, static_cast<unsigned>(v.ctas(task)), static_cast<unsigned>(v.threads), v.smem, stream,
                          p);
}

}  // namespace nibble::cuda
