// FP8 activations × weights that are not FP8, on tensor cores. An e4m3 number is an f16 number, too, so the kernels of f16 activations (wna16.cpp)
// multiply codes as they are, and the epilogue scales the sums of a token.
//
//   prepare   A [M,K] ──quantize_acts──▶ f16 numbers [M,K], a scale per token; in blocks first their codes
//             A (codes), a_scale ──code_halves──▶ the same
//   linear    f16 numbers ──a kernel of wna16──▶ D
//
// Activations in blocks, which have a scale each, are rounded to f16 (CodeHalves); all others are exact.
#include "kernels/cuda/table/e4m3_halves.hpp"

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wna16.hpp"

namespace nibble::cuda {
namespace {

constexpr ActForm kForm = ActForm::e4m3_halves;
constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;  // sizes are counted in 32 bits inside the kernels

Status accepts_acts(const Problem& p) {
  if (p.act_scheme.codes == DType::none)
    return error(StatusCode::unsupported, "multiplies e4m3 activations, {} ones are not to be quantized", name(p.a_dtype));
  if (p.act_scheme.codes != DType::e4m3)
    return error(StatusCode::unsupported, "multiplies e4m3 activations, they are to be quantized to {}",
                 name(p.act_scheme.codes));
  if (std::max(p.m, p.k) > kMostDimension)
    return error(StatusCode::unsupported, "M={} K={}: a dimension is beyond {}", p.m, p.k, kMostDimension);
  return {};
}

// ---- prepare

/// The places of prepared activations: f16 [M][pitch] | scales f32 [M] | of floats in blocks, their codes (act_map).
struct HalvesMap {
  std::int64_t pitch = 0;  // elements
  std::size_t scales = 0, codes = 0, bytes = 0;
};
HalvesMap map_of(const ActScheme& act, DType a_dtype, std::int64_t m, std::int64_t k) {
  const auto round_up = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  HalvesMap map{.pitch = gathered_pitch(k)};
  map.scales = round_up(2 * static_cast<std::size_t>(m * map.pitch));
  map.codes = map.scales + round_up(4 * static_cast<std::size_t>(m));
  map.bytes = map.codes + (is_compute_float(a_dtype) && act.group.k != 0 ? act_map(act, m, k).bytes : 0);
  return map;
}
HalvesMap map_of(const StepArgs& args) { return map_of(args.act_scheme, args.a.dtype, args.a.dim(0), args.weight->k); }

/// Whether all tokens have a scale that the host knows: then the epilogue takes it from there.
bool knows_scale(const StepArgs& args) {
  return args.act_scheme.group == GroupShape::tensor() && args.weight->static_acts &&
         (is_compute_float(args.a.dtype) || args.operands.a_scale.empty());
}

Status accepts_prepare(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  return accepts_acts(p);
}

double prepare_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.85;  // of the bandwidth
  const bool makes_codes = is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0;
  const double bytes = bits(p.a_dtype) / 8.0 + 2 + (makes_codes ? 2 : 0);
  return (makes_codes ? 2 : 1) * kLaunchUs +
         1e-3 * static_cast<double>(p.m) * static_cast<double>(p.k) * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

std::size_t prepare_workspace(const Kernel&, const Problem& p) { return map_of(p.act_scheme, p.a_dtype, p.m, p.k).bytes; }

Status run_prepare(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const HalvesMap map = map_of(args);
  const bool floats = is_compute_float(args.a.dtype);
  float* const scales = knows_scale(args) ? nullptr : reinterpret_cast<float*>(args.prepared + map.scales);
  StepArgs codes = args;
  if (floats) {
    codes.prepared = args.prepared + map.codes;
    QuantizeTask task = rows_to_quantize(codes);
    if (task.group == 0) {
      task.halves = args.prepared;
      task.pitch = task.columns = map.pitch;
      task.scales = scales;
      task.scale_row = 1;
    }
    NIBBLE_RETURN_IF_ERROR(launch_quantize_acts(task, args.stream));
    if (task.group == 0) return {};
  }
  return launch_code_halves({.acts = code_rows(codes),
                             .perm = floats ? nullptr : reinterpret_cast<const std::int32_t*>(w.device.perm.data()),
                             .m = args.a.dim(0),
                             .k = static_cast<int>(w.k),
                             .x = args.prepared,
                             .pitch = map.pitch,
                             .scales = scales},
                            args.stream);
}

// ---- linear

/// The problem that the kernel of f16 activations solves.
Problem of_halves(const Problem& p) {
  Problem halves = p;
  halves.a_dtype = DType::f16;
  halves.act_scheme = {};
  halves.permutes_k = halves.prescales_k = false;
  return halves;
}

Status accepts_linear(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_acts(p));
  if (p.scheme.codes == DType::e4m3 && gpu_w8::refusal(p.scheme, p.zero_type, p.k).empty())
    return error(StatusCode::unsupported, "multiplies FP8 activations by weights that are not FP8: gpu_w8n64k128 is for those");
  return self.halves->accepts(*self.halves, of_halves(p));
}
double linear_cost_us(const Kernel& self, const Problem& p) { return self.halves->cost_us(*self.halves, of_halves(p)); }
std::size_t linear_workspace(const Kernel& self, const Problem& p) {
  return self.halves->workspace == nullptr ? 0 : self.halves->workspace(*self.halves, of_halves(p));
}
Result<std::shared_ptr<const void>> configure_linear(const Kernel& self, const Problem& p) {
  return self.halves->configure(*self.halves, of_halves(p));
}
Status run_linear(const Kernel& self, const StepArgs& args) { return self.halves->run(*self.halves, args); }

// ---- rows

constexpr Kernel kPrepareRow{.backend = Backend::cuda,
                             .isa = Isa::simt,
                             .op = Op::prepare,
                             .out = name(kForm),
                             .act = "any",
                             .weight = "none",
                             .layout = "",
                             .tile = {},
                             .summary = "FP8 activations as f16 numbers, with a scale per token",
                             .form = kForm,
                             .accepts = accepts_prepare,
                             .cost_us = prepare_cost_us,
                             .workspace = prepare_workspace,
                             .run = run_prepare};

}  // namespace

void take_e4m3_halves(const StepArgs& args, LinearTask& task) {
  const HalvesMap map = map_of(args);
  task.a_dtype = DType::f16;
  task.x = args.prepared;
  task.x_stride = map.pitch;
  task.weight.perm = nullptr;
  task.weight.prescale = nullptr;
  if (knows_scale(args))
    task.epilogue.acc_scale *= args.weight->static_acts->scale;
  else
    task.epilogue.act_scale = reinterpret_cast<const float*>(args.prepared + map.scales);
}

std::span<const Kernel> e4m3_halves_kernels() {
  static std::deque<std::string> summaries;
  static const std::vector<Kernel> kRows = [] {
    constexpr std::string_view kActs = "16-bit activations";  // with which the summaries begin
    std::vector<Kernel> rows;
    for (const Kernel& halves : wna16_kernels()) {
      if (halves.op != Op::linear || halves.act != "f16" || halves.variant == "dense") continue;
      Kernel row = halves;
      row.act = name(kForm);
      row.summary = summaries.emplace_back("FP8 activations as f16 numbers" + std::string(halves.summary.substr(kActs.size())));
      row.form = kForm;
      row.rounds_prescaled = row.fetches_rows = false;
      row.joins = nullptr;
      row.halves = &halves;
      row.accepts = accepts_linear;
      row.cost_us = linear_cost_us;
      row.workspace = linear_workspace;
      if (halves.configure != nullptr) row.configure = configure_linear;
      row.run = run_linear;
      rows.push_back(row);
    }
    rows.push_back(kPrepareRow);
    return rows;
  }();
  return kRows;
}

}  // namespace nibble::cuda
