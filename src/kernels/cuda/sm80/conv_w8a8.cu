// The same GEMM (w8a8_kernel.cuh) of patches of images: a convolution of weights and activations as int8 or e4m3 codes, any geometry.
#include "kernels/cuda/sm80/w8a8_kernel.cuh"
#include "kernels/cuda/tasks/conv.hpp"

namespace nibble::cuda {
namespace {

using Kernel = const Launchable<Params>*;

struct Variant {
  int rows, tokens, threads;
  cudaError_t (*smem)(int& bytes);
  int cycles;  // of an SM for a record of integers, about
  Kernel integers, floats;
};
template <class S>
constexpr Variant variant(int cycles) {
  return {S::kRows,
          S::kTokens,
          S::kThreads,
          shared_of_device<S>,
          cycles,
          &kLaunchable<w8a8_sm80_kernel<S, Mode::integers, PatchCopier>>,
          &kLaunchable<w8a8_sm80_kernel<S, Mode::floats, PatchCopier>>};
}
/// Cycles are estimates: 8 for each product of a scheduler's warps, 1024, 256 and 64 in all, plus the part of copies, ldmatrix and the
/// barrier that so many warps cannot hide. They only have to rank shapes.
constexpr Variant kVariants[] = {variant<Many>(1250), variant<Some>(450), variant<Few>(300)};
static_assert(Many::smem(Many::kStages) + Many::kTokens * kCornerBytes <=
              99 * 1024);  // of the GPUs with the least that have such copies

}  // namespace

cudaError_t conv_w8a8_sm80(const ConvTask& task, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.scaled.geometry;
  if (geo.block_rows != 0 || task.acts.group != 0 || geo.n < 1 ||
      (task.patches.groups > 1 && task.patches.group_outputs % gpu_w8::kRows != 0))
    return cudaErrorInvalidValue;
  int device = 0, sms = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  CodeImages codes;
  if (const cudaError_t e = code_images(task, codes, stream)) return e;

  Params p{};
  p.patches = codes.patches;
  p.task.weight = task.scaled;
  p.task.acts = task.acts;
  p.task.acts.codes = codes.x;
  p.task.acts.pitch = codes.pitch;
  p.task.acts.sums = codes.sums;
  p.task.m = task.images * codes.patches.pixels();
  p.task.epilogue = task.epilogue;
  if (task.d.channel != 1) {
    p.image_stride = task.d.image;
    p.channel_stride = task.d.channel;
  }

  const Variant* best = nullptr;
  std::int64_t best_ctas = 0, best_cycles = 0;
  int best_smem = 0;
  for (const Variant& v : kVariants) {
    if (codes.patches.groups > 1 && codes.patches.group_outputs % v.rows != 0) continue;  // a CTA's rows are of one group
    int smem = 0;
    if (const cudaError_t e = v.smem(smem)) return e;
    smem += v.tokens * kCornerBytes;
    if (smem > most) continue;
    const std::int64_t ctas = (geo.n + v.rows - 1) / v.rows * ((p.task.m + v.tokens - 1) / v.tokens);
    const std::int64_t cycles = (ctas + sms - 1) / sms * v.cycles;
    if (best == nullptr || cycles < best_cycles) best = &v, best_ctas = ctas, best_cycles = cycles, best_smem = smem;
  }
  if (best == nullptr || best_ctas > std::numeric_limits<std::int32_t>::max()) return cudaErrorInvalidConfiguration;
  const Kernel kernel = geo.integers ? best->integers : best->floats;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;
  p.token_blocks = (p.task.m + best->tokens - 1) / best->tokens;
  return launch_dependent(kernel->kernel, static_cast<unsigned>(best_ctas), static_cast<unsigned>(best->threads), best_smem,
                          stream, p);
}

}  // namespace nibble::cuda
