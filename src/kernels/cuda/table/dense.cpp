// The GPU's rows of dense weights, which lie as they are (layouts/gpu_rows.hpp): cuBLASLt, and f32 arithmetic on every GPU.
#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "layouts/gpu_rows.hpp"

namespace nibble::cuda {
namespace {

DenseWeight dense_weight(const PackedWeightData& packed) {
  return {.rows = packed.bytes.data(),
          .type = packed.scheme.codes,
          .n = packed.n,
          .k = packed.k,
          .stride = gpu_rows::stride(packed.k)};
}

DenseTask dense_task(const StepArgs& args) {
  return {.weight = dense_weight(*args.weight),
          .m = args.a.dim(0),
          .a_dtype = args.a.dtype,
          .x = args.a.data,
          .x_stride = args.a.stride(0),
          .prescale = reinterpret_cast<const float*>(args.weight->device.prescale.data()),
          .scratch = args.scratch.data(),
          .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, 1.0f),
          .experts = args.experts == nullptr ? ExpertTiles{} : *args.experts};
}

Status run_simt(const Kernel&, const StepArgs& args) { return launch_dense_simt(dense_task(args), args.stream); }

Status run_library(const Kernel&, const StepArgs& args) {
  return launch_dense_weight(dense_task(args), *static_cast<const DenseConfig*>(args.config), args.stream);
}

Status run_dequantize(const Kernel&, const StepArgs& args) {
  return launch_dequantize_dense(dense_weight(*args.weight), args.d.data, args.d.dtype, args.d.stride(0), args.transposed,
                                 args.stream);
}

Result<std::shared_ptr<const void>> configure_library(const Kernel&, const Problem& p) { return configure_product(p, true); }

Status accepts_weight(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (!p.scheme.is_dense())
    return error(StatusCode::unsupported, "multiplies dense weights, the weight has {} codes", name(p.scheme.codes));
  return {};
}

Status accepts_simt(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_weight(self, p));
  constexpr std::int64_t kMostOutputs = std::int64_t{1} << 36;  // a CTA has 16 × 4 at most, and a launch fewer than 2³¹
  if ((p.m + 3) * (p.n + 15) > kMostOutputs)
    return error(StatusCode::unsupported, "M={} N={}: more than {} outputs", p.m, p.n, kMostOutputs);
  if (is_compute_float(p.a_dtype) && p.act_scheme.codes == DType::none) return {};
  return error(StatusCode::unsupported, "multiplies floats, the activations are {}",
               name(is_compute_float(p.a_dtype) ? p.act_scheme.codes : p.a_dtype));
}

Status accepts_library(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_simt(self, p));
  if (name(p.a_dtype) != self.act || name(p.scheme.codes) != self.weight)
    return error(StatusCode::unsupported, "multiplies {} by {}, the activations are {} and the weight is {}", self.act,
                 self.weight, name(p.a_dtype), p.scheme.name());
  if (p.prescales_k) return error(StatusCode::unsupported, "reads activations in place, without a prescale");
  return p.gpu != nullptr ? Status() : dense_runs_here();  // last, because it loads the library
}

/// The bytes of W.
double weight_bytes(const Problem& p) { return static_cast<double>(kGpuRowsLayout.size(p.scheme, DType::none, p.n, p.k)); }

/// Estimates. One token reads W at the speed of memory; more are limited by f32 arithmetic.
double simt_row_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.85, kMultiplied = 1e5;  // of the bandwidth; a microsecond and SM: weights times tokens
  const GpuInfo gpu = gpu_of(p);
  const double tokens = p.m == 1 ? 1.0 : 4 * std::ceil(static_cast<double>(p.m) / 4);
  const double read_us = 1e-3 * weight_bytes(p) / (kShare * gpu.read_gbytes_per_s);
  const double products = static_cast<double>(p.n) * static_cast<double>(p.k) * (1 + tokens);  // unpacking is one more
  return kLaunchUs + std::max(read_us, products / (kMultiplied * std::max(1, gpu.sms)));
}

double library_cost_us(const Kernel&, const Problem& p) { return product_cost_us(gpu_of(p), p); }

std::size_t library_workspace(const Kernel&, const Problem& p) {
  return dense_scratch(p.m, p.n, p.k, dense_writes_d(p.epilogue, p.a_dtype), true).bytes;
}

double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.5;  // of the bandwidth: an estimate
  const double bytes = weight_bytes(p) + static_cast<double>(p.n) * static_cast<double>(p.k) * bits(p.epilogue.out) / 8;
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

/// The algorithm of cuBLASLt depends on M, so the row is not batch_invariant. bf16 products begin with compute capability 8.0.
constexpr Kernel library_row(std::string_view type) {
  return {.backend = Backend::cuda,
          .isa = type == "bf16" ? Isa::sm80 : Isa::simt,
          .op = Op::linear,
          .out = "any",
          .act = type,
          .weight = type,
          .layout = "gpu_rows",
          .variant = "dense",
          .tile = {},
          .summary = "dense weights of the activations' type: calls cuBLASLt; the bits of a row depend on M",
          .batch_invariant = false,
          .sums = type == "f32" ? Sums::f32 : Sums::tensor_cores,
          .accepts = accepts_library,
          .cost_us = library_cost_us,
          .workspace = library_workspace,
          .configure = configure_library,
          .run = run_library};
}

constexpr std::array kKernels{
    library_row("f16"), library_row("bf16"), library_row("f32"),
    Kernel{
        .backend = Backend::cuda,
        .isa = Isa::simt,
        .op = Op::linear,
        .out = "any",
        .act = "any",
        .weight = "any",
        .layout = "gpu_rows",
        .variant = "rows",
        .tile = {},
        .summary =
            "dense weights, f32 multiply-adds without tensor cores: every GPU and float type; one token at the speed of memory",
        .expert_rows = kDenseExpertRows,
        .accepts = accepts_simt,
        .cost_us = simt_row_cost_us,
        .run = run_simt},
    Kernel{.backend = Backend::cuda,
           .isa = Isa::simt,
           .op = Op::dequantize,
           .out = "any",
           .act = "none",
           .weight = "any",
           .layout = "gpu_rows",
           .variant = "rows",
           .tile = {},
           .summary = "writes a dense W as f32, f16 or bf16, bit-exact",
           .accepts = accepts_weight,
           .cost_us = dequantize_cost_us,
           .run = run_dequantize}};

}  // namespace

std::span<const Kernel> dense_kernels() { return kKernels; }

}  // namespace nibble::cuda
