#include "kernels/cpu/prepare/prepare.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "core/error.hpp"
#include "core/target.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/intrinsics.hpp"
#include "kernels/cpu/prepare/norm.hpp"
#include "kernels/norm.hpp"

namespace nibble::cpu {
namespace {

#define NIBBLE_LOOPS "kernels/cpu/prepare/prepare.inl"
#include "kernels/cpu/each_isa.inl"

constexpr PrepareIsa kBaseline{baseline::floats, baseline::fixed,    baseline::codes,
                               baseline::halves, baseline::quantize, baseline::quantize_block};
#if defined(__x86_64__)
constexpr PrepareIsa kAvx2{avx2::floats, avx2::fixed, avx2::codes, avx2::halves, avx2::quantize, avx2::quantize_block};
constexpr PrepareIsa kAvx512{avx512::floats, avx512::fixed,    avx512::codes,
                             avx512::halves, avx512::quantize, avx512::quantize_block};
#endif

GivenRules given_rules(const StepArgs& args, const std::optional<StaticActs>& known) {
  GivenRules given;
  if (is_compute_float(args.a.dtype)) return given;
  const ConstTensorView &scale = args.operands.a_scale, &zero = args.operands.a_zero;
  if (scale.empty()) {
    given.scale = &known->scale;
    given.zero = &known->zero;
    return given;
  }
  given.scale = static_cast<const float*>(scale.data);
  if (scale.dim(0) > 1) given.scale_row = scale.stride(0);
  if (scale.rank > 1) given.scale_block = scale.stride(1);
  if (args.act_scheme.zero != ZeroKind::none) {
    if (args.act_scheme.zero == ZeroKind::offset)
      given.offset = static_cast<const float*>(zero.data);
    else
      given.zero = static_cast<const std::int32_t*>(zero.data);
    if (zero.dim(0) > 1) given.zero_row = zero.stride(0);
    if (zero.rank > 1) given.zero_block = zero.stride(1);
  }
  return given;
}

}  // namespace

namespace {

/// As memcpy, but `kCopyBytes` at a time: the call would cost more than copying the few channels of a network's first layer.
void copy_run(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 8 * kCopyBytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    return;
  }
  for (std::int64_t i = 0; i < bytes; i += kCopyBytes) std::memcpy(to + i, from + i, kCopyBytes);
}

}  // namespace

const std::byte* Patches::gather(std::int64_t m, std::int64_t slot) const {
  const std::byte* from = begin(m);
  if (runs_h * runs_w == 1 && scales == nullptr) return from;
  std::byte* const first = row + slot * (runs_h * runs_w * run_bytes + kCopyBytes);
  std::byte* to = first;
  float* scale = row_scales;
  for (std::int64_t h = 0; h < runs_h; ++h)
    for (std::int64_t w = 0; w < runs_w; ++w, to += run_bytes) {
      const std::byte* run = from + h * run_down + w * run_beside;
      copy_run(to, run, run_bytes);
      if (scales != nullptr) scale = std::copy_n(scales + (run - image) / block, run_bytes / block, scale);
    }
  return first;
}

const PrepareIsa& prepare_isa([[maybe_unused]] Isa main) {
#if defined(__x86_64__)
  if (main == Isa::avx512 || main == Isa::avx512vnni || main == Isa::avx512bf16 || main == Isa::amx) return kAvx512;
  if (main == Isa::avx2 || main == Isa::avx2vnni) return kAvx2;
#endif
  return kBaseline;
}

PrepareTask prepare_task(ActForm form, const StepArgs& args, int tile) {
  const PackedWeightData& weight = *args.weight;
  const ActDigits act = ActDigits::make(args.act_scheme, weight.scheme, weight.k, args.far_zeros);
  const bool fixed_scale = args.act_scheme.group == GroupShape::tensor();
  return {.a = static_cast<const std::byte*>(args.a.data),
          .type = args.a.dtype,
          .width = bits(args.a.dtype) / 8,
          .stride = args.a.stride(0) * bits(args.a.dtype) / 8,
          .m = args.a.dim(0),
          .perm = weight.perm.empty() ? nullptr : weight.perm.data(),
          .prescale = weight.prescale_f32.empty() ? nullptr : weight.prescale_f32.data(),
          .segments = {weight.k, weight.group_size(), act.piece, act.unit},
          .digits = act,
          .act_scheme = args.act_scheme,
          .block = args.act_scheme.group.k == 0 ? weight.k : args.act_scheme.group.k,
          .known = fixed_scale ? weight.static_acts : std::nullopt,
          .limit = weight.act_limit.value_or(std::numeric_limits<float>::infinity()),
          .given = given_rules(args, weight.static_acts),
          .bias = code_bias(weight.scheme.codes),
          .token_bytes = prepared_token_bytes(form, args.act_scheme, weight.scheme, weight.k),
          .tile = prepared_tile(form, args.a.dim(0), tile),
          .rows = in_rows(form),
          .terms = bf16_terms(form),
          .out = args.prepared};
}

namespace {

template <const PrepareIsa& kIsa>
Status run(const Kernel& self, const StepArgs& args) {
  const PrepareTask task = prepare_task(self.form, args, args.prepare_tile);
  const auto prepare_tile = kIsa.of(self.form);
  const std::int64_t tiles = (task.m + task.tile - 1) / task.tile;
  args.executor->parallel_for(tiles, [&](std::int64_t t) { prepare_tile(task, t * task.tile); });
  return {};
}

/// The workspace of a step that normalizes, too: prepared activations | y, a few rows of which are prepared while a core has them in its
/// cache.
std::size_t place_of_y(ActForm form, std::int64_t m, const ActScheme& act, const WeightScheme& weight, std::int64_t k) {
  return (static_cast<std::size_t>(prepared_bytes(form, m, act, weight, k)) + 63) / 64 * 64;
}

/// A task is up to kTogether tokens of a tile, fewer where threads would have none.
template <const PrepareIsa& kIsa>
Status run_norm(const Kernel& self, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const std::int64_t m = args.a.dim(0);
  StepArgs normalizing = args;
  normalizing.prepared = args.prepared + place_of_y(self.form, m, args.act_scheme, w.scheme, w.k);
  const NormTask norm = norm_task(normalizing);
  const NormalizeRow normalize = normalize_row(self.isa);
  StepArgs after = normalized(normalizing);
  after.prepared = args.prepared;
  const PrepareTask task = prepare_task(self.form, after, args.prepare_tile);
  const auto prepare_tile = kIsa.of(self.form);
  const std::int64_t threads = args.executor->threads();
  const std::int64_t each = std::clamp<std::int64_t>((m + threads - 1) / threads, 1, kTogether);
  const std::int64_t tiles = (m + task.tile - 1) / task.tile, parts = (std::min(task.tile, m) + each - 1) / each;
  args.executor->parallel_for(tiles * parts, [&](std::int64_t i) {
    const std::int64_t first = i / parts * task.tile;
    PrepareTask part = task;
    part.begin = i % parts * each;
    part.count = each;
    const std::int64_t end = first + part.end(std::min(task.tile, m - first));
    for (std::int64_t token = first + part.begin; token < end; ++token) normalize(norm, token);
    prepare_tile(part, first);
  });
  return {};
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  return accepts_form(self, p);
}

/// Nanoseconds per activation of one thread on an Emerald Rapids core; of segments a value between those of 128 and of 32 channels. Of layers of 32
/// and of 64 output channels, measured by `nibble bench`, the step is twice the time of the first less that of the second.
template <const double& kNanoseconds>
double cost_us(const Kernel&, const Problem& p) {
  const std::int64_t threads = std::min<std::int64_t>(p.machine.threads, p.m);
  return 1e-3 * kNanoseconds * static_cast<double>(p.m) * static_cast<double>(p.k) / static_cast<double>(threads);
}

std::size_t workspace(const Kernel& self, const Problem& p) {
  return static_cast<std::size_t>(prepared_bytes(self.form, p.m, p.act_scheme, p.scheme, p.k));
}

std::size_t norm_workspace(const Kernel& self, const Problem& p) {
  return place_of_y(self.form, p.m, p.act_scheme, p.scheme, p.k) + normalized_bytes(self, p);
}

/// Of the two steps. That y comes from a cache, and that threads meet once less, is what choice prefers the one step for.
template <const double& kNanoseconds>
double norm_cost_us(const Kernel& self, const Problem& p) {
  return normalize_cost_us(self.isa, p) + cost_us<kNanoseconds>(self, p);
}

template <const PrepareIsa& kIsa, const double& kNanoseconds>
constexpr Kernel row(Isa isa, ActForm form, std::string_view summary) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::prepare,
          .out = name(form),
          .act = "any",
          .weight = "none",
          .layout = "",
          .tile = {},
          .summary = summary,
          .form = form,
          .accepts = accepts,
          .cost_us = cost_us<kNanoseconds>,
          .workspace = workspace,
          .run = run<kIsa>};
}

template <const PrepareIsa& kIsa, const double& kNanoseconds>
constexpr Kernel norm_row(Isa isa, ActForm form, std::string_view summary) {
  Kernel kernel = row<kIsa, kNanoseconds>(isa, form, summary);
  kernel.variant = "norm";
  kernel.cost_us = norm_cost_us<kNanoseconds>;
  kernel.workspace = norm_workspace;
  kernel.run = run_norm<kIsa>;
  return kernel;
}

constexpr std::string_view kFloats =
    "activations, or the values of their FP8 codes, as f32 in token tiles, permuted and prescaled for the weight";
constexpr std::string_view kFixed = "activations as 24-bit fixed point, three int8 digits each, with a scale per segment of K";
constexpr std::string_view kInt8 =
    "quantizes activations to int8 per tensor, token or block of K; copies those that are int8 already";
constexpr std::string_view kInt8Rows = "quantizes activations to int8, in rows of 64 channels for AMX tiles";
constexpr std::string_view kHalves =
    "bf16 activations in pairs of channels, permuted for the weight; or FP8 codes as bf16, with a scale per segment of K";
constexpr std::string_view kHalfRows =
    "bf16 activations in rows of 32 channels for AMX tiles, permuted for the weight; or FP8 codes as bf16, with a scale per "
    "segment of K";
constexpr std::string_view kTwoHalfRows = "f16 activations as sums of two bf16, exactly, in rows of 32 channels for AMX tiles";
constexpr std::string_view kThreeHalfRows = "activations as sums of three bf16, exactly, in rows of 32 channels for AMX tiles";

constexpr std::string_view kNormFloats = "RMSNorm or LayerNorm of the activations, as f32 in token tiles";
constexpr std::string_view kNormFixed = "RMSNorm or LayerNorm of the activations, as 24-bit fixed point";
constexpr std::string_view kNormInt8 = "RMSNorm or LayerNorm of the activations, which are quantized to int8";
constexpr std::string_view kNormInt8Rows =
    "RMSNorm or LayerNorm of the activations, which are quantized to int8, in rows for AMX tiles";
constexpr std::string_view kNormHalves = "RMSNorm or LayerNorm of the activations, in pairs of bf16 channels";
constexpr std::string_view kNormHalfRows = "RMSNorm or LayerNorm of the activations, in rows of bf16 for AMX tiles";
constexpr std::string_view kNormSumRows = "RMSNorm or LayerNorm of the activations, in rows of sums of bf16 for AMX tiles";

constexpr double kBaselineFloats = 0.8, kBaselineFixed = 4.0, kBaselineInt8 = 2.0, kBaselineHalves = 1.0;
#if defined(__x86_64__)
constexpr double kAvx2Floats = 0.3, kAvx2Fixed = 1.0, kAvx2Int8 = 0.65, kAvx2Halves = 0.8;
constexpr double kAvx512Floats = 0.25, kAvx512Fixed = 0.6, kAvx512Int8 = 0.5, kAvx512Rows = 0.4, kAvx512Halves = 0.25,
                 kAvx512Two = 0.3, kAvx512Three = 0.4;
#endif

constexpr std::array kKernels {
#if defined(__x86_64__)
  row<kAvx512, kAvx512Floats>(Isa::avx512, ActForm::f32, kFloats), row<kAvx512, kAvx512Fixed>(Isa::avx512, ActForm::s8x3, kFixed),
      row<kAvx512, kAvx512Int8>(Isa::avx512, ActForm::s8, kInt8),
      row<kAvx512, kAvx512Rows>(Isa::avx512, ActForm::s8k64, kInt8Rows),
      row<kAvx512, kAvx512Halves>(Isa::avx512, ActForm::bf16, kHalves),
      row<kAvx512, kAvx512Halves>(Isa::avx512, ActForm::bf16k32, kHalfRows),
      row<kAvx512, kAvx512Two>(Isa::avx512, ActForm::bf16x2k32, kTwoHalfRows),
      row<kAvx512, kAvx512Three>(Isa::avx512, ActForm::bf16x3k32, kThreeHalfRows),
      row<kAvx2, kAvx2Floats>(Isa::avx2, ActForm::f32, kFloats), row<kAvx2, kAvx2Fixed>(Isa::avx2, ActForm::s8x3, kFixed),
      row<kAvx2, kAvx2Int8>(Isa::avx2, ActForm::s8, kInt8), row<kAvx2, kAvx2Halves>(Isa::avx2, ActForm::bf16, kHalves),
      norm_row<kAvx512, kAvx512Floats>(Isa::avx512, ActForm::f32, kNormFloats),
      norm_row<kAvx512, kAvx512Fixed>(Isa::avx512, ActForm::s8x3, kNormFixed),
      norm_row<kAvx512, kAvx512Int8>(Isa::avx512, ActForm::s8, kNormInt8),
      norm_row<kAvx512, kAvx512Rows>(Isa::avx512, ActForm::s8k64, kNormInt8Rows),
      norm_row<kAvx512, kAvx512Halves>(Isa::avx512, ActForm::bf16, kNormHalves),
      norm_row<kAvx512, kAvx512Halves>(Isa::avx512, ActForm::bf16k32, kNormHalfRows),
      norm_row<kAvx512, kAvx512Two>(Isa::avx512, ActForm::bf16x2k32, kNormSumRows),
      norm_row<kAvx512, kAvx512Three>(Isa::avx512, ActForm::bf16x3k32, kNormSumRows),
      norm_row<kAvx2, kAvx2Floats>(Isa::avx2, ActForm::f32, kNormFloats),
      norm_row<kAvx2, kAvx2Fixed>(Isa::avx2, ActForm::s8x3, kNormFixed),
      norm_row<kAvx2, kAvx2Int8>(Isa::avx2, ActForm::s8, kNormInt8),
      norm_row<kAvx2, kAvx2Halves>(Isa::avx2, ActForm::bf16, kNormHalves),
#endif
      row<kBaseline, kBaselineFloats>(Isa::baseline, ActForm::f32, kFloats),
      row<kBaseline, kBaselineFixed>(Isa::baseline, ActForm::s8x3, kFixed),
      row<kBaseline, kBaselineInt8>(Isa::baseline, ActForm::s8, kInt8),
      row<kBaseline, kBaselineHalves>(Isa::baseline, ActForm::bf16, kHalves),
      norm_row<kBaseline, kBaselineFloats>(Isa::baseline, ActForm::f32, kNormFloats),
      norm_row<kBaseline, kBaselineFixed>(Isa::baseline, ActForm::s8x3, kNormFixed),
      norm_row<kBaseline, kBaselineInt8>(Isa::baseline, ActForm::s8, kNormInt8),
      norm_row<kBaseline, kBaselineHalves>(Isa::baseline, ActForm::bf16, kNormHalves),
};

}  // namespace

std::int64_t prepared_token_bytes(ActForm form, const ActScheme& quantize, const WeightScheme& weight, std::int64_t k) {
  if (form == ActForm::f32) return 4 * k;
  const ActDigits act = ActDigits::make(quantize, weight, k);
  const Segments segments{k, weight.group.k == 0 ? k : weight.group.k, act.piece, act.unit};
  if (const int terms = bf16_terms(form); terms != 0)
    return token_bytes(segments, act.halves_header(), 2 * terms, in_rows(form) ? kRowBytes / 2 : tile::kOctet);
  return act.token_header() + token_bytes(segments, act.segment_header(), act.digits, in_rows(form) ? kRowBytes : tile::kOctet);
}

std::int64_t prepared_bytes(ActForm form, std::int64_t m, const ActScheme& quantize, const WeightScheme& weight, std::int64_t k) {
  const std::int64_t room = token_room(form);
  return (m + room - 1) / room * room * prepared_token_bytes(form, quantize, weight, k);
}

std::span<const Kernel> prepare_kernels() { return kKernels; }

}  // namespace nibble::cpu
