// Activations that are codes × weights in gpu_n64k128, on every GPU: what the fast families of codes (wna8, w8a8) do not take.
#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/conv.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wgmma_cost.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/codes_task.hpp"

namespace nibble::cuda {
namespace {

constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;  // sizes are counted in 32 bits inside the kernels

/// The conditions of all rows.
Status accepts_codes(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (p.act_scheme.codes == DType::none)
    return error(StatusCode::unsupported, "multiplies {} activations, {} ones are not to be quantized", self.act,
                 name(p.a_dtype));
  if (name(p.act_scheme.codes) != self.act)
    return error(StatusCode::unsupported, "multiplies {} activations, they are to be quantized to {}", self.act,
                 name(p.act_scheme.codes));
  if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  if (std::max({p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension is beyond {}", p.m, p.n, p.k, kMostDimension);
  if (sums_whole_rows(p.scheme, p.act_scheme) && p.k > kMostWholeChannels)
    return error(StatusCode::unsupported, "K={}: sums over more than {} channels do not fit into a lane's 32 bits", p.k,
                 kMostWholeChannels);
  return {};
}

/// Whether products are of floats: codes that are none but on one side, or blocks of given codes that act-order tears apart. Then codes are
/// decoded to f32, and the kernels of floats multiply them.
bool multiplies_floats(const WeightScheme& weight, const ActScheme& act, bool torn) {
  return act.codes != DType::s8 || info(weight.codes).kind == DTypeKind::floating || torn;
}
bool tears_blocks(DType a_dtype, const ActScheme& act, bool permutes) {
  return !is_compute_float(a_dtype) && permutes && act.group.k != 0;
}

// ---- linear

/// Rows of floats that are decoded and multiplied at a time.
constexpr std::int64_t kFloatBytes = 64 << 20;
std::int64_t decoded_rows(std::int64_t m, std::int64_t k) { return std::clamp<std::int64_t>(kFloatBytes / (4 * k), 1, m); }

bool linear_floats(const Problem& p) {
  return multiplies_floats(p.scheme, p.act_scheme, tears_blocks(p.a_dtype, p.act_scheme, p.permutes_k));
}

std::size_t linear_workspace(const Kernel&, const Problem& p) {
  if (!linear_floats(p)) return 0;
  return 4 * static_cast<std::size_t>((p.experts != 0 ? p.m : decoded_rows(p.m, p.k)) * p.k);  // tiles of experts are of all rows
}

/// Rows from `m` on.
QuantizedActs from_row(QuantizedActs acts, std::int64_t m) {
  acts.codes = static_cast<const std::byte*>(acts.codes) + m * acts.pitch;
  if (acts.scales != nullptr) acts.scales += m * acts.scale_row;
  if (acts.zeros != nullptr) acts.zeros += m * acts.zero_row;
  if (acts.offsets != nullptr) acts.offsets += m * acts.zero_row;
  return acts;
}

Status run_floats(const CodesTask& task, DType codes, const StepArgs& args) {
  auto* const x = reinterpret_cast<float*>(args.scratch.data());
  const std::int64_t k = task.weight.geometry.k, rows = task.experts.tiles != nullptr ? task.m : decoded_rows(task.m, k);
  LinearTask floats{.weight = task.weight, .a_dtype = DType::f32, .x = x, .x_stride = k, .experts = task.experts};
  floats.weight.perm = nullptr;
  floats.weight.prescale = nullptr;  // of floats, which were multiplied before they became codes
  for (std::int64_t m = 0; m < task.m; m += rows) {
    floats.m = static_cast<int>(std::min(rows, task.m - m));
    floats.epilogue = task.epilogue.from_row(m);
    NIBBLE_RETURN_IF_ERROR(launch_decode_acts(from_row(task.acts, m), codes, task.weight.perm, floats.m, k, x, args.stream));
    NIBBLE_RETURN_IF_ERROR(launch_linear_simt(floats, args.stream));
  }
  return {};
}

Status run_linear(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  CodesTask task{.weight = device_weight(w),
                 .acts = code_rows(args),
                 .m = static_cast<int>(args.a.dim(0)),
                 .whole = sums_whole_rows(w.scheme, args.act_scheme),
                 .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f))};
  if (args.experts != nullptr) task.experts = *args.experts;
  if (is_compute_float(args.a.dtype)) task.weight.perm = nullptr;  // codes were made in the weight's order
  if (multiplies_floats(w.scheme, args.act_scheme, tears_blocks(args.a.dtype, args.act_scheme, !w.perm.empty())))
    return run_floats(task, args.act_scheme.codes, args);
  return launch_codes_simt(task, args.stream);
}

/// Cautious estimates of what an SM does in a microsecond: these kernels have not been measured, and a fast one that takes the layer goes
/// first. Reading and computing overlap, so the longer of the two counts.
double product_us(const GpuInfo& gpu, const Problem& p, bool floats) {
  constexpr double kDecoded = 5e3;                                 // weights, taken apart for a few tokens
  constexpr double kWhole = 1.6e5, kFolds = 1.1e5, kPieces = 4e4;  // products, by how often sums are scaled
  constexpr double kShare = 0.25;                                  // of the bandwidth
  if (floats) return simt_cost_us(gpu, p);
  const double sms = std::max(1, gpu.sms), tiles = std::ceil(static_cast<double>(p.n) / gpu_tile::kRows);
  const double busy = std::min(1.0, 3.3 * tiles / sms);  // of few rows, about three SMs a tile
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k) / sms;
  const int run = std::min(gpu_tile::span(p.act_scheme.group.k), gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span);
  const double products = sums_whole_rows(p.scheme, p.act_scheme) ? kWhole : run >= 32 ? kFolds : kPieces;
  const double compute = weights / busy * (1 / kDecoded + static_cast<double>(p.m) / products);
  return kLaunchUs + 2.0 + std::max(tile_moved_us(gpu, p, 8) / kShare, compute);
}

/// Decoding writes floats, which the product reads.
double decode_us(const GpuInfo& gpu, double elements) { return kLaunchUs + 1e-3 * 9 * elements / (0.7 * gpu.read_gbytes_per_s); }

double linear_cost_us(const Kernel&, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const bool floats = linear_floats(p);
  return product_us(gpu, p, floats) + (floats ? decode_us(gpu, static_cast<double>(p.m) * static_cast<double>(p.k)) : 0);
}

// ---- convolutions: patches of some output pixels become rows of codes in the workspace, and are multiplied there

Status accepts_patches(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_codes(self, p));
  constexpr std::int64_t kMostBlocks = 65535, kBlock = 8;  // of a grid's second dimension: groups, or 8 outputs of one
  const std::int64_t blocks = p.geometry.groups * ((p.geometry.group_outputs() + kBlock - 1) / kBlock);
  if (blocks > kMostBlocks)
    return error(StatusCode::unsupported, "{} groups of {} output channels are more than {} blocks of {}", p.geometry.groups,
                 p.geometry.group_outputs(), kMostBlocks, kBlock);
  return {};
}

/// The workspace of patches: ActMap of `tokens` × groups rows | f32 [rows][K], where floats are multiplied.
struct PatchMap {
  std::int64_t tokens = 0;
  ActMap acts;
  std::size_t floats = 0, bytes = 0;
};
PatchMap patch_map(const ConvGeometry& g, const WeightScheme& weight, const ActScheme& act, std::int64_t images) {
  constexpr std::int64_t kBytes = 128 << 20, kLeastTokens = 32;  // of a piece, whose tokens fill the GPU; for very long patches
  const bool floats = multiplies_floats(weight, act, false);
  const std::int64_t k = g.k(), all = images * g.out_height() * g.out_width();
  const std::int64_t token_bytes = g.groups * ((k + 127) / 128 * 128 + 12 * act.group.cols(k) + (floats ? 4 * k : 0));
  PatchMap map;
  map.tokens = std::min(all, std::max(kLeastTokens, kBytes / token_bytes));
  map.acts = act_map(act, map.tokens * g.groups, k);
  map.floats = map.acts.bytes;
  map.bytes = map.floats + (floats ? 4 * static_cast<std::size_t>(map.tokens * g.groups * k) : 0);
  return map;
}

std::size_t conv_workspace(const Kernel&, const Problem& p) { return patch_map(p.geometry, p.scheme, p.act_scheme, p.m).bytes; }

/// The rows of patches as a pointwise convolution of an image of one line, whose pixels have the channels of all groups side by side; all
/// of it within one image of D.
ConvTask pointwise(const ConvTask& task, const float* x, int k, int first, int tokens) {
  ConvTask rows = task;
  rows.patches = {.channels = k,
                  .groups = task.patches.groups,
                  .group_outputs = task.patches.group_outputs,
                  .width = tokens,
                  .out_width = tokens};
  rows.images = 1;
  rows.a_dtype = DType::f32;
  rows.x = x;
  rows.prescale = nullptr;  // of pixels before they became codes
  rows.a = {.image = 0, .pixel = std::int64_t{k} * task.patches.groups, .channel = 1};
  const std::int64_t image = first / task.patches.pixels(), pixel = first % task.patches.pixels();
  const auto advance = [&](epilogue::Operand& operand) {
    if (operand.data == nullptr) return;
    const std::int64_t elements = image * operand.image + pixel * operand.stride;
    operand.data = static_cast<const std::byte*>(operand.data) + elements * bits(operand.type) / 8;
  };
  epilogue::Element& epilogue = rows.epilogue;
  epilogue.d = static_cast<std::byte*>(epilogue.d) + (image * task.d.image + pixel * task.d.pixel) * bits(epilogue.out) / 8;
  advance(epilogue.gate), advance(epilogue.residual);
  return rows;
}

Status run_conv(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const ConvGeometry& g = args.conv->geometry;
  const ActScheme& act = args.act_scheme;
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  task.weight = device_weight(w);
  const PatchMap map = patch_map(g, w.scheme, act, task.images);
  const bool floats = multiplies_floats(w.scheme, act, false), known = act.group == GroupShape::tensor();
  const int pixels = task.patches.pixels(), all = task.images * pixels;

  QuantizedActs acts;
  if (known) acts = acts_per_tensor(args);
  QuantizeTask quantize{
      .a = task.x, .type = task.a_dtype, .k = g.k(), .codes_type = act.codes, .known = known, .group = act.group.k};
  quantize.scale = acts.scale, quantize.zero = acts.zero;
  quantize.prescale = reinterpret_cast<const float*>(w.device.prescale.data());
  if (w.act_limit) quantize.limit = *w.act_limit;
  const PatchRows patches{.patches = task.patches, .a = task.a, .pad = acts.zeros};
  acts.codes = quantize.codes = args.scratch.data();
  acts.pitch = quantize.pitch = quantize.columns = map.acts.pitch;
  acts.group = act.group.k;
  if (!known) {
    void* const zeros = args.scratch.data() + map.acts.zeros;
    acts.scales = quantize.scales = reinterpret_cast<float*>(args.scratch.data() + map.acts.scales);
    if (act.zero == ZeroKind::integer) acts.zeros = quantize.zeros = static_cast<std::int32_t*>(zeros);
    if (act.zero == ZeroKind::offset) acts.offsets = quantize.offsets = static_cast<float*>(zeros);
    quantize.zero_points = act.zero == ZeroKind::integer;
    acts.scale_row = acts.zero_row = quantize.scale_row = quantize.zero_row = 1;
    if (acts.group != 0) acts.scale_group = acts.zero_group = quantize.scale_group = quantize.zero_group = map.tokens * g.groups;
  }

  for (int first = 0, tokens = 0; first < all; first += tokens) {
    tokens = static_cast<int>(std::min<std::int64_t>(map.tokens, floats ? pixels - first % pixels : all - first));
    PatchRows part = patches;
    part.first = first;
    quantize.m = tokens * g.groups;
    NIBBLE_RETURN_IF_ERROR(launch_quantize_patches(quantize, part, args.stream));
    if (floats) {
      auto* const x = reinterpret_cast<float*>(args.scratch.data() + map.floats);
      NIBBLE_RETURN_IF_ERROR(launch_decode_acts(acts, act.codes, nullptr, quantize.m, g.k(), x, args.stream));
      NIBBLE_RETURN_IF_ERROR(launch_conv_direct(pointwise(task, x, static_cast<int>(g.k()), first, tokens), args.stream));
    } else {
      NIBBLE_RETURN_IF_ERROR(launch_codes_simt({.weight = task.weight,
                                                .acts = acts,
                                                .m = tokens,
                                                .whole = sums_whole_rows(w.scheme, act),
                                                .epilogue = task.epilogue,
                                                .groups = task.patches.groups,
                                                .group_outputs = task.patches.group_outputs,
                                                .pixels = pixels,
                                                .first = first,
                                                .d = task.d},
                                               args.stream));
    }
  }
  return {};
}

/// The product of each group, which has whole fragments of rows, and an estimate of the time to find the place of each activation, twice.
double conv_cost_us(const Kernel&, const Problem& p) {
  constexpr double kPlaced = 1e3;  // activations of an SM in a microsecond
  const GpuInfo gpu = gpu_of(p);
  const bool floats = multiplies_floats(p.scheme, p.act_scheme, false);
  const double groups = static_cast<double>(p.geometry.groups);
  const double tokens = static_cast<double>(p.m * p.geometry.out_height() * p.geometry.out_width());
  const double elements = groups * tokens * static_cast<double>(p.k);
  Problem rows = p;
  rows.op = Op::linear;
  rows.m = static_cast<std::int64_t>(tokens);
  rows.n = p.geometry.groups * ((p.geometry.group_outputs() + 15) / 16 * 16);
  return product_us(gpu, rows, floats) + kLaunchUs + elements / (kPlaced * std::max(1, gpu.sms)) +
         (floats ? decode_us(gpu, elements) : 0);
}

// ---- rows

constexpr Kernel linear_row(ActForm form, Sums sums) {
  return {.backend = Backend::cuda,
          .isa = Isa::simt,
          .op = Op::linear,
          .out = "any",
          .act = name(form),
          .weight = "any",
          .layout = "gpu_n64k128",
          .variant = "codes",
          .tile = {0, gpu_tile::kRows, gpu_tile::kChannels},
          .summary = form == ActForm::s8_rows
                         ? "int8 activations × codes in any groups: dp4a, without tensor cores; every GPU"
                         : "FP8 activations × codes in any groups: as floats, without tensor cores; every GPU",
          .form = form,
          .sums = sums,
          .expert_rows = kSimtExpertRows,
          .accepts = accepts_codes,
          .cost_us = linear_cost_us,
          .workspace = linear_workspace,
          .run = run_linear};
}

constexpr Kernel conv_row(ActForm form, Sums sums) {
  Kernel row = linear_row(form, sums);
  row.expert_rows = 0;
  row.op = Op::conv;
  row.tile = {};
  row.summary = form == ActForm::s8_rows
                    ? "int8 patches × codes in any groups: gathered into the workspace, dp4a; every geometry and GPU"
                    : "FP8 patches × codes in any groups: gathered into the workspace, as floats; every geometry and GPU";
  row.form = ActForm::as_given;
  row.accepts = accepts_patches;
  row.cost_us = conv_cost_us;
  row.workspace = conv_workspace;
  row.run = run_conv;
  return row;
}

constexpr Kernel kRows[] = {linear_row(ActForm::s8_rows, Sums::integers), linear_row(ActForm::e4m3_rows, Sums::f32),
                            conv_row(ActForm::s8_rows, Sums::integers), conv_row(ActForm::e4m3_rows, Sums::f32)};

}  // namespace

std::span<const Kernel> codes_kernels() { return kRows; }

}  // namespace nibble::cuda
