// Activations that are codes × weights in gpu_n64k128, on every GPU: what the fast families of codes (wna8, w8a8) do not take.
#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
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

Status accepts_linear(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_codes(self, p));
  if (!is_compute_float(p.a_dtype) && p.permutes_k && p.act_scheme.group.k != 0)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  return {};
}

CodesTask codes_task(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  CodesTask task{.weight = device_weight(w),
                 .acts = code_rows(args),
                 .m = static_cast<int>(args.a.dim(0)),
                 .whole = sums_whole_rows(w.scheme, args.act_scheme),
                 .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f))};
  if (is_compute_float(args.a.dtype)) task.weight.perm = nullptr;  // codes were made in the weight's order
  return task;
}

Status run_linear(const Kernel&, const StepArgs& args) { return launch_codes_simt(codes_task(args), args.stream); }

/// Estimates of what an SM does in a microsecond. Reading and computing overlap, so the longer of the two counts.
double codes_cost_us(const Kernel&, const Problem& p) {
  constexpr double kDecoded = 1.5e4;                               // weights, taken apart for a few tokens
  constexpr double kWhole = 1.6e5, kFolds = 1.1e5, kPieces = 4e4;  // products, by how often sums are scaled
  constexpr double kShare = 0.4;                                   // of the bandwidth
  const GpuInfo gpu = gpu_of(p);
  const double sms = std::max(1, gpu.sms), tiles = std::ceil(static_cast<double>(p.n) / gpu_tile::kRows);
  const double busy = std::min(1.0, 3.3 * tiles / sms);  // of few rows, about three SMs a tile
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k) / sms;
  const int run = std::min(gpu_tile::span(p.act_scheme.group.k), gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span);
  const double products = sums_whole_rows(p.scheme, p.act_scheme) ? kWhole : run >= 32 ? kFolds : kPieces;
  const double compute = weights / busy * (1 / kDecoded + static_cast<double>(p.m) / products);
  return kLaunchUs + 2.0 + std::max(tile_moved_us(gpu, p, 8) / kShare, compute);
}

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
          .summary = "int8 activations × integer codes in any groups: dp4a, without tensor cores; every GPU",
          .form = form,
          .sums = sums,
          .accepts = accepts_linear,
          .cost_us = codes_cost_us,
          .run = run_linear};
}

constexpr Kernel kRows[] = {linear_row(ActForm::s8_rows, Sums::integers)};

}  // namespace

std::span<const Kernel> codes_kernels() { return kRows; }

}  // namespace nibble::cuda
