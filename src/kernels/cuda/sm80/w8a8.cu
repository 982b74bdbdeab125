// Launches the GEMM of 8-bit codes for GPUs without wgmma (w8a8_kernel.cuh), of rows of activations.
#include "kernels/cuda/sm80/w8a8_kernel.cuh"
#include "kernels/cuda/tasks/w8a8_sm80.hpp"

namespace nibble::cuda {
namespace {

using Kernel = const Launchable<Params>*;

struct Variant {
  int rows, tokens, threads;
  cudaError_t (*smem)(int& bytes);
  Kernel kernels[3];  // by mode
};
constexpr bool has_shape(const Variant& v, const GemmSm80Shape& shape) {
  return v.rows == shape.rows && v.tokens == shape.tokens;
}
template <class S, Kernel kGrouped>
constexpr Variant kVariant{S::kRows,
                           S::kTokens,
                           S::kThreads,
                           shared_of_device<S>,
                           {&kLaunchable<w8a8_sm80_kernel<S, Mode::integers, RowCopier>>,
                            &kLaunchable<w8a8_sm80_kernel<S, Mode::floats, RowCopier>>, kGrouped}};
constexpr Variant kFew = kVariant<Few, &kLaunchable<w8a8_sm80_kernel<Few, Mode::grouped, RowCopier>>>;
constexpr Variant kSome = kVariant<Some, &kLaunchable<w8a8_sm80_kernel<Some, Mode::grouped, RowCopier>>>;
constexpr Variant kMany = kVariant<Many, nullptr>;  // no registers for both sums and partial sums
static_assert(has_shape(kFew, kW8A8Sm80Few) && has_shape(kSome, kW8A8Sm80Some) && has_shape(kMany, kW8A8Sm80Many));

}  // namespace

cudaError_t linear_w8a8_sm80(const W8A8Task& task, int split, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  if (task.m < 1 || geo.n < 1 || geo.k < 1 || split < 1 || split > kMostSplitRanks || (split > 1 && !geo.integers))
    return cudaErrorInvalidValue;
  int device = 0, sms = 0, most = 0, smem = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = kMany.smem(smem)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  const Mode mode = geo.integers ? Mode::integers : is_grouped(task) ? Mode::grouped : Mode::floats;
  const int ranks = w8a8_sm80_ranks(split, task.m, geo.n, geo.records());
  const GemmSm80Shape shape = w8a8_sm80_shape(task.m, geo.n, geo.records(), ranks, sms);
  const bool some = mode == Mode::grouped || has_shape(kSome, shape) || smem > most;
  const Variant& v = has_shape(kFew, shape) ? kFew : some ? kSome : kMany;
  if (const cudaError_t e = v.smem(smem)) return e;
  const Kernel kernel = v.kernels[static_cast<int>(mode)];
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  Params p{};
  p.task = task;
  p.token_blocks = (task.m + v.tokens - 1) / v.tokens;
  p.vector_codes =
      (reinterpret_cast<std::uintptr_t>(task.acts.codes) | static_cast<std::uintptr_t>(task.acts.pitch)) % kChunk == 0;
  const std::int64_t tiles = (geo.n + v.rows - 1) / v.rows * p.token_blocks;
  if (tiles * ranks > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  p.split = split_k(task.scratch_end, ranks, tiles, v.rows, v.tokens);
  return launch_dependent(kernel->kernel, static_cast<unsigned>(tiles * ranks), static_cast<unsigned>(v.threads), smem, stream,
                          p);
}

}  // namespace nibble::cuda
