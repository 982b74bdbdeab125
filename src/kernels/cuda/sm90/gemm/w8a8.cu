// Launches the sm_90 8-bit GEMM (w8a8_kernel.cuh): how passes are distributed, how much shared memory there is.
#include "kernels/cuda/sm90/gemm/w8a8.hpp"

#include <algorithm>
#include <bit>

#include "kernels/cuda/device/launch_shape.hpp"
#include "kernels/cuda/device/shared_memory.hpp"
#include "kernels/cuda/device/tensor_map.hpp"
#include "kernels/cuda/device/token_tiles.hpp"
#include "kernels/cuda/tasks/conv.hpp"

namespace nibble::cuda {
namespace {

/// Bulk copies read aligned blocks of 16 bytes. A block of the last group may reach past the last scale, but not out of its allocation,
/// which is larger and no less aligned. For few tokens a warp's own copies arrive sooner.
TokenScales token_scales(const QuantizedActs& acts, int tokens) {
  if (acts.scales == nullptr) return TokenScales::one;
  const bool rows = acts.scale_row == 1 && acts.scale_group % 4 == 0;
  return rows && tokens >= 64 && reinterpret_cast<std::uintptr_t>(acts.scales) % 16 == 0 ? TokenScales::rows
                                                                                         : TokenScales::scattered;
}

/// Fills the parameters that follow from the weight, the activations and the epilogue.
template <class Task>
W8A8Params params(const W8A8Weight& weight, const Task& task, int m) {
  W8A8Params p{};
  p.weight = weight;
  p.acts = task.acts;
  p.by_scale_blocks = Divisor(std::max(1, weight.geometry.block_rows / gpu_w8::kRows));
  p.epilogue = task.epilogue;
  p.m = m;
  p.schedule.row_blocks = weight.geometry.tiles();
  p.schedule.records = weight.geometry.records();
  p.zero_points = task.acts.zeros != nullptr || task.acts.zero != 0 || weight.geometry.has_zeros;
  p.half = half_out(task.epilogue, weight.geometry.n);
  p.floats_out = stores_floats(task.epilogue, weight.geometry.n);
  p.codes_out = stores_codes(task.epilogue, weight.geometry.n);
  return p;
}

/// Distributes the passes, chooses the longest ring that fits, and launches. Memory for stream-K ends at `scratch_end`.
cudaError_t launch(W8A8Kernel kernel, W8A8Params& p, const W8A8Config& wanted, W8A8Form form, void* scratch_end,
                   cudaStream_t stream) {
  const gpu_w8::Geometry& geo = p.weight.geometry;
  int device = 0, most = 0;
  if (const cudaError_t e = most_shared(device, most)) return e;
  if (const cudaError_t e = kernel->allow_all_shared()) return e;

  W8A8Config config = wanted;
  const int most_blocks = form.token_rows ? kTokenRowBlocks : w8a8_groups(config.tokens, form) / config.depth;
  config.blocks = std::min(config.blocks, most_blocks);
  // A CTA that shares K owns a unit of 64 rows × 8 tokens at least or, where tokens are the 64-row operand, a warp's tokens.
  const int shares = form.token_rows ? 4 : config.blocks * config.tokens / 8;
  config.split = static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min({config.split, geo.records(), shares}))));
  const int ctas = multiprocessors(device), cluster = std::max(1, config.split);
  const bool experts = p.experts.tiles != nullptr;  // whose tiles begin at any row
  p.token_scales = token_scales(p.acts, experts ? 0 : config.tokens);
  p.blocks = config.blocks;
  p.depth = config.depth;
  p.schedule.token_tiles = experts ? p.experts.most : (p.m + config.tokens - 1) / config.tokens;
  p.schedule.most = config.blocks;
  p.schedule.split = config.split;
  p.schedule.even = form.token_rows && !form.grouped;
  distribute(p.schedule, config.tokens, ctas);
  if (config.split == kStreamK) {
    if (scratch_end == nullptr) return cudaErrorInvalidValue;
    p.parts = stream_k(scratch_end, config.tokens, w8a8_groups(config.tokens, form), ctas);
  }

  // Never more stages than a CTA has records: the remaining shared memory lets the next kernel start.
  const int longest = (p.schedule.longest() + config.depth - 1) / config.depth;
  const auto map = [&](int stages) {
    W8A8Map found = w8a8_map(stages, config, form);
    if (experts) found.total = (found.total + 15) / 16 * 16 + kExpertPassBytes + kScheduleBytes;
    return found;
  };
  p.stages = 1;
  while (p.stages < longest && map(p.stages + 1).total <= most) ++p.stages;
  p.map = map(p.stages);
  if (p.map.total > most || (config.tokens > 128 && p.stages < std::min(p.together, longest)))
    return cudaErrorInvalidConfiguration;
  LaunchShape shape(p.schedule.clusters * cluster, cluster, w8a8_threads(config, form), p.map.total, stream);
  return cudaLaunchKernelEx(&shape.config, kernel->kernel, p);
}

}  // namespace

cudaError_t linear_w8a8_sm90(const W8A8Task& task, const W8A8Config& config, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  const bool grouped = task.acts.group != 0 || geo.block_rows != 0, precise = !grouped && !geo.integers && task.together > 0;
  const bool experts = task.experts.tiles != nullptr;
  const W8A8Form form{.grouped = grouped,
                      .token_rows = takes_tokens_as_rows(config.tokens, config.blocks, config.split, grouped, precise)};
  if (experts && (config.split != 1 || precise || (geo.integers && grouped))) return cudaErrorInvalidValue;
  const W8A8Kernel kernel = experts && geo.integers ? w8a8_sm90_experts_s8(config.tokens, form.token_rows)
                            : experts               ? w8a8_sm90_experts_e4m3(config.tokens, grouped, form.token_rows)
                            : geo.integers          ? grouped ? nullptr : w8a8_sm90_s8(config.tokens, form.token_rows)
                                     : grouped ? w8a8_sm90_e4m3_grouped(config.tokens, form.token_rows)
                            : precise               ? w8a8_sm90_e4m3_precise(config.tokens)
                                                    : w8a8_sm90_e4m3(config.tokens, form.token_rows);
  if (kernel == nullptr || task.m < 1) return cudaErrorInvalidValue;
  if (!readable_rows(task.acts.codes, task.acts.pitch, task.m, geo.k)) return cudaErrorInvalidAddressSpace;
  W8A8Params p = params(task.weight, task, task.m);
  p.next = task.next;
  p.experts = task.experts;
  p.together = w8a8_together(config, task.together);
  const int part = experts ? w8a8_part(config.tokens, form.token_rows) : 0;
  if (!describe_token_tiles(p, DType::s8, task.acts.codes, task.acts.pitch, task.m, geo.k, config.tokens, part))
    return cudaErrorInvalidValue;
  return launch(kernel, p, config, form, task.scratch_end, stream);
}

cudaError_t linear_w8a8_sm90_floats(const W8A8Task& task, const FloatActs& floats, int blocks, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.weight.geometry;
  const W8A8Kernel kernel = w8a8_sm90_floats(floats.type, blocks);
  const bool one_scale = task.acts.scales == nullptr && task.acts.zeros == nullptr && task.acts.group == 0;
  if (kernel == nullptr || task.m < 1 || !one_scale || !geo.integers || geo.has_zeros || geo.block_rows != 0 ||
      task.experts.tiles != nullptr)
    return cudaErrorInvalidValue;
  constexpr std::int64_t kBytes = 2;  // of a float
  if (!readable_rows(floats.a, floats.stride * kBytes, task.m, geo.k * kBytes)) return cudaErrorInvalidAddressSpace;
  W8A8Params p = params(task.weight, task, task.m);
  p.next = task.next;
  p.rule = act_rule::known(task.acts.scale, task.acts.zero);
  if (!describe_token_tiles(p, floats.type, floats.a, floats.stride * kBytes, task.m, geo.k, kFloatTokens))
    return cudaErrorInvalidValue;
  return launch(kernel, p, {.tokens = kFloatTokens, .blocks = blocks}, {.token_rows = true, .floats = true}, nullptr, stream);
}

cudaError_t conv_w8a8_sm90(const ConvTask& task, const W8A8Config& config, cudaStream_t stream) {
  const gpu_w8::Geometry& geo = task.scaled.geometry;
  const W8A8Kernel kernel = geo.integers ? w8a8_sm90_patches_s8(config.tokens) : w8a8_sm90_patches_e4m3(config.tokens);
  if (kernel == nullptr || geo.block_rows != 0 || task.acts.group != 0 || task.patches.groups != 1 ||
      task.patches.channels % kPatchChannels != 0)
    return cudaErrorInvalidValue;
  CodeImages codes;
  if (const cudaError_t e = code_images(task, codes, stream)) return e;
  const Patches& patches = codes.patches;
  W8A8Params p = params(task.scaled, task, task.images * patches.pixels());
  p.acts.sums = codes.sums;
  p.patches = patches;
  p.images = task.images;
  p.box_channels = patches.channels % gpu_w8::kChannels == 0 ? gpu_w8::kChannels : kPatchChannels;
  describe_store(task, p);
  if (!describe_patches(p.x, DType::s8, codes.x, codes.pitch, task.images, patches, p.box_channels, config.tokens))
    return cudaErrorInvalidValue;
  return launch(kernel, p, config, {}, task.scratch_end, stream);
}

}  // namespace nibble::cuda
