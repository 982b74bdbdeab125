#include "kernels/cuda/table/w8a8.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/norm.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/w8a8_sm80.hpp"
#include "kernels/norm.hpp"

namespace nibble::cuda {
namespace {

/// Sizes are counted in 32 bits inside the kernels.
constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;

// ---- prepare

Status accepts_prepare(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  if (name(p.act_scheme.codes) != name(p.form))
    return error(StatusCode::unsupported, "prepares {}, the activations are to be quantized to {}", self.out,
                 name(p.act_scheme.codes));
  if (!is_compute_float(p.a_dtype)) return error(StatusCode::unsupported, "prepares f32, f16 and bf16, not {}", name(p.a_dtype));
  if (std::max(p.m, p.k) > kMostDimension)
    return error(StatusCode::unsupported, "M={} K={}: a dimension is beyond {}", p.m, p.k, kMostDimension);
  return p.normalizes ? accepts_norm_codes(p) : Status();
}

double prepare_cost_us(const Kernel&, const Problem& p) {
  if (p.normalizes) return norm_codes_cost_us(p);
  constexpr double kShare = 0.85;  // of the bandwidth
  const double bytes = static_cast<double>(p.m) * static_cast<double>(p.k) * (bits(p.a_dtype) / 8.0 + 1);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

std::size_t prepare_workspace(const Kernel&, const Problem& p) { return act_map(p.act_scheme, p.m, p.k).bytes; }

/// The workspace between prepare and the main kernel. Only integer codes have sums, and only weights with zeros read them, packed as
/// gpu_w8n64k128.
QuantizedActs prepared_acts(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const ActMap map = act_map(args.act_scheme, args.a.dim(0), w.k);
  QuantizedActs acts{.codes = args.prepared, .pitch = map.pitch};
  if (args.act_scheme.group == GroupShape::tensor()) {
    acts.scale = w.static_acts->scale;
    acts.zero = w.static_acts->zero;
  } else {
    acts.scales = reinterpret_cast<const float*>(args.prepared + map.scales);
    acts.scale_row = 1;
    acts.group = args.act_scheme.group.k;
    if (acts.group != 0) acts.scale_group = map.tokens;
    if (args.act_scheme.zero == ZeroKind::integer) acts.zeros = reinterpret_cast<const std::int32_t*>(args.prepared + map.zeros);
    if (args.act_scheme.zero == ZeroKind::offset) acts.offsets = reinterpret_cast<const float*>(args.prepared + map.zeros);
    acts.zero_row = acts.scale_row;
    acts.zero_group = acts.scale_group;
  }
  if (w.scheme.zero != ZeroKind::none && w.layout == &kGpuW8Layout)
    acts.sums = reinterpret_cast<const std::int32_t*>(args.prepared + map.sums);
  return acts;
}

}  // namespace

QuantizeTask rows_to_quantize(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const QuantizedActs acts = prepared_acts(args);
  QuantizeTask task{.a = args.a.data,
                    .type = args.a.dtype,
                    .a_stride = args.a.stride(0),
                    .m = args.a.dim(0),
                    .k = w.k,
                    .perm = reinterpret_cast<const std::int32_t*>(w.device.perm.data()),
                    .prescale = reinterpret_cast<const float*>(w.device.prescale.data()),
                    .codes_type = args.act_scheme.codes,
                    .zero_points = args.act_scheme.zero == ZeroKind::integer,
                    .known = args.act_scheme.group == GroupShape::tensor(),
                    .group = acts.group,
                    .scale = acts.scale,
                    .zero = acts.zero,
                    .codes = args.prepared,
                    .pitch = acts.pitch,
                    .columns = acts.pitch,
                    .scales = const_cast<float*>(acts.scales),
                    .scale_row = acts.scale_row,
                    .scale_group = acts.scale_group,
                    .zeros = const_cast<std::int32_t*>(acts.zeros),
                    .zero_row = acts.zero_row,
                    .zero_group = acts.zero_group,
                    .offsets = const_cast<float*>(acts.offsets),
                    .sums = const_cast<std::int32_t*>(acts.sums),
                    .sum_row = 1};
  if (w.act_limit) task.limit = *w.act_limit;
  if (const ExpertTiles* experts = args.experts)
    task.source = experts->source, task.divisor = experts->divisor, task.row_of = experts->row_of;
  return task;
}

namespace {

Status run_prepare(const Kernel& self, const StepArgs& args) {
  const QuantizeTask task = rows_to_quantize(args);
  return normalizes(self) ? launch_norm_codes(norm_task(args), task, args.stream) : launch_quantize_acts(task, args.stream);
}

constexpr Kernel prepare_row(ActForm form, std::string_view summary, std::string_view variant = {}) {
  return {.backend = Backend::cuda,
          .isa = Isa::simt,
          .op = Op::prepare,
          .out = name(form),
          .act = "any",
          .weight = "none",
          .layout = "",
          .variant = variant,
          .tile = {},
          .summary = summary,
          .form = form,
          .fetches_rows = variant.empty(),
          .accepts = accepts_prepare,
          .cost_us = prepare_cost_us,
          .workspace = prepare_workspace,
          .run = run_prepare};
}

// ---- linear

/// The conditions of all rows.
Status accepts_w8a8(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_one_weight(self, p));
  const ActScheme& act = p.act_scheme;
  if (act.codes == DType::none)
    return error(StatusCode::unsupported, "multiplies {} activations, {} ones are not to be quantized", self.act,
                 name(p.a_dtype));
  const std::string_view codes = self.quantizes ? "s8" : self.act;
  if (name(act.codes) != codes)
    return error(StatusCode::unsupported, "multiplies {} activations, they are to be quantized to {}", codes, name(act.codes));
  if (const std::string reason = gpu_w8::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  if ((p.scheme.codes == DType::e4m3) != (act.codes == DType::e4m3))
    return error(StatusCode::unsupported, "multiplies {} activations by weights of that kind, not {}", codes,
                 name(p.scheme.codes));
  if (p.permutes_k) return error(StatusCode::unsupported, "reads channels in order, the packed weight has another one");
  if (act.zero == ZeroKind::offset)
    return error(StatusCode::unsupported, "takes activations with zero points that are integers, not with float offsets");
  if (act.codes == DType::s8 && act.group.k != 0)
    return error(StatusCode::unsupported, "takes a scale per token or tensor of s8 activations, not per {} channels",
                 act.group.k);
  if (act.codes == DType::e4m3 && act.group.k != 0 && act.group.k != gpu_w8::kChannels)
    return error(StatusCode::unsupported, "takes a scale per token, tensor or {} channels of e4m3 activations, not per {}",
                 gpu_w8::kChannels, act.group.k);
  if (const std::int64_t most = most_whole_channels(p.scheme, p.zero_type, act); act.codes == DType::s8 && p.k > most)
    return error(StatusCode::unsupported, "K={}: sums of more than {} such products do not fit into 32 bits", p.k, most);
  if (std::max({p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension is beyond {}", p.m, p.n, p.k, kMostDimension);
  return {};
}

/// Whether sums of given codes must be computed, for the weight's zero points.
bool sums_are_missing(const PackedWeightHeader& weight, DType act) {
  return weight.scheme.zero != ZeroKind::none && !is_compute_float(act);
}
std::size_t w8a8_workspace(const Kernel&, const Problem& p) {
  return p.scheme.zero != ZeroKind::none && !is_compute_float(p.a_dtype) ? 4 * static_cast<std::size_t>(p.m) : 0;
}
std::size_t sm90_workspace(const Kernel& self, const Problem& p) {
  return with_parts(w8a8_workspace(self, p), self, w8a8_groups(self.tile.m), p);
}

/// The task, with the sums that its codes came without.
Result<W8A8Task> summed_task(const StepArgs& args) {
  const W8A8Task task = w8a8_task(args);
  if (sums_are_missing(*args.weight, args.a.dtype))
    NIBBLE_RETURN_IF_ERROR(launch_sum_codes(task.acts, task.m, task.weight.geometry.k,
                                            reinterpret_cast<std::int32_t*>(args.scratch.data()), args.stream));
  return task;
}

template <Status (*kLaunch)(const W8A8Task&, Stream)>
Status run_w8a8(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const W8A8Task task, summed_task(args));
  return kLaunch(task, args.stream);
}

/// Whether TMA can read codes that the caller gives.
bool reads_codes(const StepArgs& args) { return readable_rows(args.a.data, args.a.stride(0), args.a.dim(0), args.a.dim(1)); }

Status run_sm90(const Kernel& self, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const W8A8Task task, summed_task(args));
  const int blocks = self.tile.n / gpu_w8::kRows, depth = w8a8_sm90_depth(self.tile.m, blocks);
  return launch_w8a8_sm90(task, self.tile.m, blocks, depth, self.tile.split, args.stream);
}

/// A CTA multiplies a tile of `rows` × `tokens` over all of K; an SM computes `products` per microsecond, whether it runs one tile at a
/// time or several, and none while a tile's first operands arrive and its sums are stored. Estimates, which only have to rank kernels that
/// differ by factors.
double tiled_cost_us(const Problem& p, int rows, int tokens, double share, double products) {
  const GpuInfo gpu = gpu_of(p);
  const double tiles = std::ceil(static_cast<double>(p.n) / rows) * std::ceil(static_cast<double>(p.m) / tokens);
  const double rounds = std::max(1.0, tiles / std::max(1, gpu.sms));
  constexpr double kEndsUs = 4.7;
  const double compute = rows * std::min<double>(tokens, static_cast<double>(p.m) + 8) * static_cast<double>(p.k) / products;
  return kLaunchUs + std::max(2.0 + codes_moved_us(gpu, p) / share, rounds * (kEndsUs + compute));
}

double simt_cost_us(const Kernel&, const Problem& p) {
  return tiled_cost_us(p, gpu_w8::kRows, 32, 0.4, p.act_scheme.codes == DType::s8 ? 1.5e5 : 6e4);
}

double sm80_cost_us(const Kernel& self, const Problem& p) {
  const bool integers = p.act_scheme.codes == DType::s8;
  if (integers && p.experts == 0) {
    const GpuInfo gpu = gpu_of(p);
    const int records = gpu_w8::geometry(p.scheme, p.n, p.k).records(), sms = std::max(1, gpu.sms);
    const int ranks = counted_ranks(w8a8_sm80_ranks(self.tile.split, p.m, p.n, records), gpu);
    const GemmSm80Shape shape = w8a8_sm80_shape(p.m, p.n, records, ranks, sms);
    return kLaunchUs + 2.0 + std::max(codes_moved_us(gpu, p) / 0.7, w8a8_sm80_us(shape, p.m, p.n, records, ranks, sms));
  }
  const double products = integers ? 2.1e6 : 3e5;  // e4m3 is unpacked to f16
  if (p.experts != 0 && self.expert_rows == kSm80ExpertRows.many) return tiled_cost_us(p, 64, 64, 0.7, products);
  return p.m <= 16 || p.experts != 0 ? tiled_cost_us(p, 32, 16, 0.7, products) : tiled_cost_us(p, 128, 128, 0.7, products);
}

Status run_sm80(const Kernel& self, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const W8A8Task task, summed_task(args));
  if (args.experts != nullptr) return launch_w8a8_sm80_experts(task, self.expert_rows, args.stream);
  return launch_w8a8_sm80(task, self.tile.split, args.stream);
}

std::size_t sm80_split_workspace(const Kernel& self, const Problem& p) {
  const std::size_t sums = (w8a8_workspace(self, p) + 255) / 256 * 256;
  return sums + w8a8_sm80_bytes(self.tile.split, p.m, p.n, gpu_w8::geometry(p.scheme, p.n, p.k).records());
}

Status accepts_sm90(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_w8a8(self, p));
  if (has_groups(p) && self.tile.m > 128 && self.tile.n != 128)
    return error(StatusCode::unsupported, "sums of groups of channels, which {} tokens have with 128 rows alone", self.tile.m);
  if (p.experts != 0 && p.accumulation == Accumulation::precise && p.act_scheme.codes == DType::e4m3 && !has_groups(p))
    return error(StatusCode::unsupported, "adds products of experts up in tensor cores, not precisely");
  if (!is_compute_float(p.a_dtype) && p.k % 16 != 0)
    return error(StatusCode::unsupported, "K={}: rows of codes have to begin at multiples of 16 bytes", p.k);
  return {};
}

double sm90_cost_us(const Kernel& self, const Problem& p) {
  return w8a8_sm90_cost_us(self.tile, p.act_scheme.codes, gpu_of(p), p);
}

// ---- linear, of activations that become codes on the way

Status accepts_floats(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_w8a8(self, p));
  if (p.a_dtype != DType::f16 && p.a_dtype != DType::bf16)
    return error(StatusCode::unsupported, "quantizes f16 and bf16 itself, A comes as {}", name(p.a_dtype));
  if (p.act_scheme.group != GroupShape::tensor())
    return error(StatusCode::unsupported, "quantizes while it multiplies, by a scale that is known before; {} has one per token",
                 Scheme{p.scheme, p.act_scheme}.name());
  if (p.scheme.zero != ZeroKind::none)
    return error(StatusCode::unsupported, "does not sum the codes of a token, which the weight's zero points need");
  if (p.prescales_k) return error(StatusCode::unsupported, "quantizes activations as they come, without a prescale");
  return {};
}

bool reads_floats(const StepArgs& args) {
  constexpr std::int64_t kBytes = 2;
  return readable_rows(args.a.data, args.a.stride(0) * kBytes, args.a.dim(0), args.a.dim(1) * kBytes);
}

/// A record of a pass is 128 tokens × 128 channels to quantize, whatever the rows, with a conversion for each, of which an SM does 16 in a clock.
double floats_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const int blocks = self.tile.n / gpu_w8::kRows;
  const PassShape shape{.blocks = blocks, .depth = 1, .even = true};
  const WgmmaFeatures features =
      wgmma_features(WgmmaFamily::s8, self.tile, shape, gpu, p, gpu_w8::geometry(p.scheme, p.n, p.k).total_bytes(), 16);
  // Fitted to bench/shapes/pointwise.txt on an H200: 4 % off in the median, 16 % at worst.
  const WgmmaCost cost = blocks == 1 ? WgmmaCost{.fixed_us = 1.3f, .pass_us = 1.2f, .step_us = 0.95f}
                                     : WgmmaCost{.fixed_us = 0.6f, .pass_us = 1.6f, .step_us = 1.15f};
  return wgmma_cost_us(cost, features);
}

Status run_floats(const Kernel& self, const StepArgs& args) {
  const FloatActs floats{args.a.data, args.a.dtype, args.a.stride(0)};
  return launch_w8a8_sm90_floats(w8a8_task(args), floats, self.tile.n / gpu_w8::kRows, args.stream);
}

// ---- W itself

Status accepts_dequantize(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  const std::string reason = gpu_w8::refusal(p.scheme, p.zero_type, p.k);
  return reason.empty() ? Status() : error(StatusCode::unsupported, "{}", reason);
}

double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.4;  // of the bandwidth: an estimate
  const double bytes = static_cast<double>(gpu_w8::geometry(p.scheme, p.n, p.k).total_bytes()) +
                       static_cast<double>(p.n * p.k) * bits(p.epilogue.out) / 8;
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

Status run_dequantize(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  W8Weight weight{{w.bytes.data(), gpu_w8::geometry(w.scheme, w.n, w.k)}};
  weight.scale2 = w.scale2.value_or(1.0f);
  weight.perm = reinterpret_cast<const std::int32_t*>(w.device.perm.data());
  return launch_dequantize_w8(weight, args.d.data, args.d.dtype, args.d.stride(0), args.transposed, args.stream);
}

// ---- rows

constexpr Kernel dequantize_row() {
  return {.backend = Backend::cuda,
          .isa = Isa::simt,
          .op = Op::dequantize,
          .out = "any",
          .act = "none",
          .weight = "any",
          .layout = "gpu_w8n64k128",
          .variant = "w8",
          .tile = {0, gpu_w8::kRows, gpu_w8::kChannels},
          .summary = "writes the W of W8A8 as f32, f16 or bf16, bit-exact",
          .accepts = accepts_dequantize,
          .cost_us = dequantize_cost_us,
          .run = run_dequantize};
}

constexpr Kernel linear_row(Isa isa, ActForm form, Sums sums) {
  return {.backend = Backend::cuda,
          .isa = isa,
          .op = Op::linear,
          .out = "any",
          .act = name(form),
          .weight = "any",
          .layout = "gpu_w8n64k128",
          .tile = {0, gpu_w8::kRows, gpu_w8::kChannels},
          .form = form,
          .sums = sums,
          .accepts = accepts_w8a8,
          .workspace = w8a8_workspace};
}

/// A CTA of a cluster owns a unit of 64 rows × 8 tokens at least: split ≤ n / 64 · m / 8.
constexpr Tile kTiles[] = {
    {.m = 16, .n = 64},
    {.m = 16, .n = 128},
    {.m = 16, .n = 256},
    {.m = 16, .n = 64, .split = 2},
    {.m = 32, .n = 64},
    {.m = 32, .n = 128},
    {.m = 32, .n = 256},
    {.m = 32, .n = 64, .split = 2},
    {.m = 64, .n = 64},
    {.m = 64, .n = 128},
    {.m = 64, .n = 256},
    {.m = 64, .n = 64, .split = 2},
    {.m = 64, .n = 64, .split = 4},
    {.m = 128, .n = 64},
    {.m = 128, .n = 128},
    {.m = 128, .n = 192},
    {.m = 128, .n = 64, .split = 2},
    {.m = 128, .n = 128, .split = 2},
    {.m = 256, .n = 64},
    {.m = 256, .n = 128},
    {.m = 256, .n = 64, .split = 2},
    {.m = 64, .n = 256, .split = kStreamK},
    {.m = 128, .n = 128, .split = kStreamK},
    {.m = 128, .n = 192, .split = kStreamK},
    {.m = 256, .n = 128, .split = kStreamK},
};
constexpr Summaries kSm90Summaries{
    .whole = "8-bit codes on both sides: wgmma, both operands in shared memory",
    .split = "8-bit codes on both sides: wgmma, both operands in shared memory; the CTAs of a cluster split K",
    .stream_k = "8-bit codes on both sides: wgmma, both operands in shared memory; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel sm90_family(ActForm form) {
  Kernel row = linear_row(Isa::sm90, form, form == ActForm::s8_rows ? Sums::integers : Sums::tensor_core_fp8);
  row.accepts = accepts_sm90;
  row.cost_us = sm90_cost_us;
  row.workspace = sm90_workspace;
  row.reads = reads_codes;
  row.run = run_sm90;
  return row;
}

/// Tiles of 128 tokens × so many rows.
constexpr Kernel floats_row(int rows) {
  Kernel row = linear_row(Isa::sm90, ActForm::as_given, Sums::integers);
  row.variant = "online";
  row.tile = {.m = 128, .n = rows};
  row.summary = "one scale for all activations, few output channels: f16 and bf16 become int8 codes in registers, then wgmma";
  row.least_m = row.tile.m / 2 + 1;
  row.quantizes = true;
  row.accepts = accepts_floats;
  row.cost_us = floats_cost_us;
  row.workspace = nullptr;
  row.reads = reads_floats;
  row.run = run_floats;
  return row;
}

/// e4m3 is unpacked to f16.
constexpr Kernel sm80_row(ActForm form) {
  Kernel row = linear_row(Isa::sm80, form, form == ActForm::s8_rows ? Sums::integers : Sums::tensor_cores);
  row.summary = "8-bit codes on both sides: mma.sync, loads by cp.async";
  row.expert_rows = kSm80ExpertRows.many;
  row.cost_us = sm80_cost_us;
  row.run = run_sm80;
  return row;
}

/// Integers, of which so many CTAs divide K of each tile.
constexpr Kernel sm80_split_row(int split) {
  Kernel row = sm80_row(ActForm::s8_rows);
  row.variant = split_variant(split);
  row.tile.split = split;
  row.summary = "8-bit codes on both sides, few tiles: mma.sync, loads by cp.async; several CTAs split K, with the same sums";
  row.expert_rows = 0;
  row.workspace = sm80_split_workspace;
  return row;
}

constexpr Kernel sm80_few_row(ActForm form) {
  Kernel row = sm80_row(form);
  row.tile.m = row.expert_rows = kSm80ExpertRows.few;
  row.summary = "8-bit codes on both sides, few rows of each expert: mma.sync, loads by cp.async";
  row.variant = kOfExperts;
  return row;
}

constexpr Kernel simt_row(ActForm form) {
  Kernel row = linear_row(Isa::simt, form, form == ActForm::s8_rows ? Sums::integers : Sums::f32);
  row.summary = "8-bit codes on both sides, without tensor cores: dp4a for int8, f32 multiply-adds for FP8";
  row.cost_us = simt_cost_us;
  row.expert_rows = kW8A8SimtExpertRows;
  row.run = run_w8a8<launch_w8a8_simt>;
  return row;
}

}  // namespace

std::span<const Kernel> w8a8_kernels() {
  static const std::vector<Kernel> kRows = [] {
    constexpr ActForm kForms[] = {ActForm::s8_rows, ActForm::e4m3_rows};
    std::vector<Kernel> rows;
    for (const ActForm form : kForms) append(rows, sm90_family(form), kTiles, kSm90Summaries);
    for (Kernel& row : rows)
      if (row.variant == "wgmma" && (row.tile.m == 16 || row.tile.m == 64 || row.tile.m == 128)) row.expert_rows = row.tile.m;
    for (const int of_pass : {64, 128}) rows.push_back(floats_row(of_pass));
    for (const ActForm form : kForms) rows.insert(rows.end(), {sm80_few_row(form), sm80_row(form)});
    for (const int split : kSm80Splits) rows.push_back(sm80_split_row(split));
    for (const ActForm form : kForms) rows.push_back(simt_row(form));
    rows.push_back(prepare_row(ActForm::s8_rows, "quantizes activations to int8 per token, tensor or group"));
    rows.push_back(prepare_row(ActForm::e4m3_rows, "quantizes activations to FP8 per token, tensor or group"));
    rows.push_back(prepare_row(ActForm::s8_rows, "RMSNorm or LayerNorm of the activations, which are quantized to int8", "norm"));
    rows.push_back(
        prepare_row(ActForm::e4m3_rows, "RMSNorm or LayerNorm of the activations, which are quantized to FP8", "norm"));
    rows.push_back(dequantize_row());
    return rows;
  }();
  return kRows;
}

WgmmaFeatures w8a8_sm90_features(const Tile& tile, DType codes, const GpuInfo& gpu, const Problem& p) {
  const bool groups = has_groups(p);
  const int most = tile.n / gpu_w8::kRows, depth = w8a8_sm90_depth(tile.m, most);
  const bool precise = p.accumulation == Accumulation::precise && codes == DType::e4m3;
  const bool token_rows = takes_tokens_as_rows(tile.m, most, tile.split, groups, precise);
  const PassShape shape{.blocks = std::min(most, w8a8_groups(tile.m, groups) / depth),
                        .depth = depth,
                        .even = p.op == Op::linear && !groups && token_rows,
                        .part = p.experts == 0 ? 0 : w8a8_part(tile.m, token_rows)};
  const WgmmaFamily family = codes != DType::s8 ? groups ? WgmmaFamily::e4m3_groups : WgmmaFamily::e4m3
                             : p.op == Op::conv ? WgmmaFamily::s8_patches
                                                : WgmmaFamily::s8;
  return wgmma_features(family, tile, shape, gpu, p, gpu_w8::geometry(p.scheme, p.n, p.k).total_bytes(), 8);
}

double w8a8_sm90_cost_us(const Tile& tile, DType codes, const GpuInfo& gpu, const Problem& p) {
  const WgmmaFeatures features = w8a8_sm90_features(tile, codes, gpu, p);
  WgmmaCost cost = wgmma_cost(features.family, tile, gpu);
  if (features.family == WgmmaFamily::e4m3 && p.accumulation == Accumulation::precise) {
    const float extra = tile.m > 128 ? 1.08f : 1.03f;  // partial sums of tensor cores are added in f32: an estimate
    cost.step_us *= extra, cost.block_us *= extra;
  }
  return wgmma_cost_us(cost, features);
}

double codes_moved_us(const GpuInfo& gpu, const Problem& p) {
  return moved_us(gpu, p, gpu_w8::geometry(p.scheme, p.n, p.k).total_bytes(), 8);
}

bool has_groups(const Problem& p) { return p.act_scheme.group.k != 0 || p.scheme.group.n > 1; }

QuantizedActs given_acts(const StepArgs& args) {
  QuantizedActs acts{.codes = args.a.data, .pitch = args.a.stride(0), .group = args.act_scheme.group.k};
  const ConstTensorView& scale = args.operands.a_scale;
  const ConstTensorView& zero = args.operands.a_zero;
  const bool per_tensor = args.act_scheme.group == GroupShape::tensor();
  if (scale.empty() && per_tensor && args.weight->static_acts) {
    acts.scale = args.weight->static_acts->scale;
    acts.zero = args.weight->static_acts->zero;
  } else {
    if (!scale.empty()) {  // a D of s32 needs none
      acts.scales = static_cast<const float*>(scale.data);
      acts.scale_row = scale.dim(0) == 1 ? 0 : scale.stride(0);
      acts.scale_group = scale.rank == 2 ? scale.stride(1) : 0;
    }
    if (args.act_scheme.zero != ZeroKind::none) {
      if (args.act_scheme.zero == ZeroKind::offset)
        acts.offsets = static_cast<const float*>(zero.data);
      else
        acts.zeros = static_cast<const std::int32_t*>(zero.data);
      acts.zero_row = zero.dim(0) == 1 ? 0 : zero.stride(0);
      acts.zero_group = zero.rank == 2 ? zero.stride(1) : 0;
    }
  }
  return acts;
}

QuantizedActs code_rows(const StepArgs& args) { return is_compute_float(args.a.dtype) ? prepared_acts(args) : given_acts(args); }

W8A8Task w8a8_task(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  QuantizedActs acts = code_rows(args);
  if (sums_are_missing(w, args.a.dtype)) acts.sums = reinterpret_cast<const std::int32_t*>(args.scratch.data());
  return {.weight = {w.bytes.data(), gpu_w8::geometry(w.scheme, w.n, w.k)},
          .acts = acts,
          .m = static_cast<int>(args.a.dim(0)),
          .together = args.accumulation == Accumulation::precise ? kPreciseChannels / gpu_w8::kChannels : 0,
          .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f)),
          .scratch_end = end_of(args.scratch),
          .next = next_weight(args.operands.next),
          .experts = args.experts == nullptr ? ExpertTiles{} : *args.experts};
}

}  // namespace nibble::cuda
