// verify_linear: a plan against the oracle, element by element.
#include "nibble/verify.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/error.hpp"
#include "core/random.hpp"
#include "kernels/cpu/segments.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "layouts/gpu_tile.hpp"
#include "plan/compare.hpp"
#include "plan/gaussian.hpp"
#include "plan/host_run.hpp"

namespace nibble {
namespace {

ConstTensorView view(const Tensor& t) {
  if (t.empty()) return {};
  if (t.shape.size() == 1) return {t.bytes.data(), t.dtype, {t.shape[0]}};
  return {t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]}};
}

/// Seeded operands for the parts the spec names.
struct Operands {
  Tensor a_scale, a_zero, row_scale, col_scale, bias, gate, residual;

  /// `float_type`: of bias, gate and residual.
  Operands(const LinearSpec& linear, std::int64_t m, std::int64_t n, std::int64_t k, DType float_type, std::uint64_t seed) {
    const EpilogueSpec& spec = linear.epilogue;
    const ActScheme& quantize = linear.quantize;
    if (!is_compute_float(linear.act)) {
      const std::int64_t rows = quantize.group == GroupShape::tensor() ? 1 : m;
      std::vector<std::int64_t> shape{rows};
      if (quantize.group.k != 0) shape.push_back(quantize.group.cols(k));
      a_scale = gaussian(DType::f32, shape, seed + 6, 0.001f, 0.01f);
      if (quantize.zero == ZeroKind::integer) {
        a_zero = Tensor(DType::s32, shape);
        for (std::int64_t i = 0; i < a_zero.numel(); ++i)
          a_zero.as<std::int32_t>()[i] =
              static_cast<std::int32_t>(random_bits(seed + 7, static_cast<std::uint64_t>(i)) % 256) - 128;
      }
    }
    if (spec.row_scale) row_scale = gaussian(DType::f32, {m}, seed + 1, 0.1f, 1.0f);
    if (spec.col_scale) col_scale = gaussian(DType::f32, {n}, seed + 2, 0.1f, 1.0f);
    if (spec.bias) bias = gaussian(float_type, {n}, seed + 3, 1.0f);
    if (spec.gate) gate = gaussian(float_type, {m, n}, seed + 4, 1.0f);
    if (spec.residual) residual = gaussian(float_type, {m, n}, seed + 5, 1.0f);
  }
  EpilogueArgs args() const {
    return {.a_scale = view(a_scale),
            .a_zero = view(a_zero),
            .row_scale = view(row_scale),
            .col_scale = view(col_scale),
            .bias = view(bias),
            .gate = view(gate),
            .residual = view(residual)};
  }
};

/// Seeded codes [M,K], none of them NaN.
Tensor random_codes(DType type, std::int64_t m, std::int64_t k, std::uint64_t seed) {
  Tensor a(type, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    auto code = static_cast<std::uint8_t>(random_bits(seed, static_cast<std::uint64_t>(i)));
    if (std::isnan(code_value(type, code))) code = 0;
    a.bytes[static_cast<std::size_t>(i)] = static_cast<std::byte>(code);
  }
  return a;
}

/// `count` evenly spread columns of n, the first and the last among them; all of them when count is 0.
std::vector<std::int64_t> pick_columns(std::int64_t n, std::int64_t count) {
  if (count <= 0 || count >= n) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::vector<std::int64_t> some;
  for (std::int64_t i = 0; i < count; ++i) some.push_back(count == 1 ? 0 : i * (n - 1) / (count - 1));
  return some;
}

/// Expected values of `columns`, computed in parallel, [M, columns] row by row.
std::vector<reference::Expected> expect(const QuantTensor& q, const ConstTensorView& a, const EpilogueSpec& spec,
                                        const EpilogueArgs& args, std::span<const std::int64_t> columns,
                                        const reference::ActModel& model, Executor& executor) {
  const reference::WeightArrays weight = reference::arrays_of(q);
  const std::int64_t m = a.dim(0);
  const auto width = static_cast<std::int64_t>(columns.size());
  std::vector<reference::Expected> all(static_cast<std::size_t>(m * width));
  constexpr std::int64_t kColumns = 8;  // per task: enough to share the conversion of A
  executor.parallel_for((width + kColumns - 1) / kColumns, [&](std::int64_t task) {
    const std::int64_t begin = task * kColumns;
    const std::int64_t count = std::min(kColumns, width - begin);
    const auto part = reference::linear(weight, a, spec, args,
                                        columns.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)), model);
    for (std::int64_t row = 0; row < m; ++row) std::copy_n(part.begin() + row * count, count, all.begin() + row * width + begin);
  });
  return all;
}

/// What the kernel may do with activations and codes, from its row.
reference::ActModel act_model(const LinearSpec& spec, const WeightScheme& scheme, std::string_view kernel_name) {
  const Kernel& kernel = *find_kernel(kernel_name);
  reference::ActModel model{.quantize = spec.quantize};
  if (kernel.act == "s8" && cpu::sums_whole_rows(scheme, spec.quantize))
    return model;  // exact integers: only scaling them rounds
  if (kernel.act == "e4m3" && kernel.backend == Backend::cuda) {
    const bool grouped = spec.quantize.group.k != 0 || scheme.group.n > 1;
    if (kernel.isa == Isa::sm90) return {.quantize = spec.quantize, .dot_factor = 4, .fp8_group = grouped ? 128 : 0};
    return {.quantize = spec.quantize, .dot_factor = kernel.isa == Isa::simt ? 1.0 : 4.0};  // f32 sums
  }
  if (kernel.backend == Backend::cuda && kernel.act == "s8i16") {
    // Integers up to the end of a fold, codes taken as u − 8 or u − 128, and what zeros differ from that apart.
    const int base = 1 << (gpu_tile::stored_bits(scheme.codes) - 1);
    const bool centred = scheme.zero == ZeroKind::none && code_bias(scheme.codes) == base;
    return {.quantize = spec.quantize, .subtracts_zeros = true, .code_offset = centred ? 0.0 : static_cast<double>(base)};
  }
  if (kernel.rounds_weights)  // what is left are products of two 16-bit floats, summed by tensor cores as said below
    return {.quantize = spec.quantize, .dot_factor = 4, .weight_type = spec.act, .rounds_scales = kernel.rounds_scales};
  if (kernel.backend == Backend::cuda) {
    // Tensor cores: codes are multiplied as they are stored and zeros subtracted from the sums of a record of 128 channels; bf16
    // carries a 4-bit code u as 128 + u. They align products to the largest and truncate, a whole unit in the last place (two
    // rounding units) for every 8 channels, where rounding to nearest errs by half of one and to both sides.
    if (kernel.isa != Isa::simt)
      model = {.quantize = spec.quantize,
               .subtracts_zeros = true,
               .part_roundings = 4 + 2.0 * gpu_tile::kChannels / 8,
               .code_offset = kernel.act == "bf16" && gpu_tile::stored_bits(scheme.codes) == 4 ? 128.0 : 0.0,
               .dot_factor = 4};
    return model;
  }
  model.fixed_point = kernel.act == "s8x3";
  model.subtracts_zeros = kernel.act == "s8x3" || kernel.act == "s8";
  return model;
}

}  // namespace

Result<VerifyReport> verify_linear(const QuantTensor& q, const VerifySpec& spec, Executor* executor) {
  Executor& on = executor != nullptr ? *executor : default_executor();
  const std::int64_t m = spec.linear.m_max;
  PackOptions pack_options = spec.pack;
  if (pack_options.kernel.empty() && pack_options.layout.empty()) pack_options.kernel = spec.plan.kernel;
  if (pack_options.executor == nullptr) pack_options.executor = &on;
  pack_options.quantize = spec.linear.quantize;
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, pack_options));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::linear(weight, spec.linear, spec.plan));

  VerifyReport report;
  report.kernel = plan.kernel(m);
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor unpacked, unpack(weight));
  report.round_trip = unpacked == q;

  const EpilogueSpec& epilogue = spec.linear.epilogue;
  const bool floats = is_compute_float(spec.linear.act);
  const Tensor a = floats ? gaussian_activations(spec.linear.act, m, q.k, spec.seed, spec.outliers)
                          : random_codes(spec.linear.act, m, q.k, spec.seed);
  const Operands operands(spec.linear, m, q.n, q.k, floats ? spec.linear.act : DType::f16, spec.seed);
  Tensor d(epilogue.out, {m, q.n});
  Tensor again(epilogue.out, {m, q.n});
  for (Tensor* out : {&d, &again}) {
    std::ranges::fill(out->bytes, std::byte{0xff});
    NIBBLE_RETURN_IF_ERROR(
        run_on_host(plan, weight, view(a), TensorView(out->bytes.data(), out->dtype, {m, q.n}), operands.args(), &on));
  }
  report.repeatable = d.bytes == again.bytes;

  const std::vector<std::int64_t> columns = pick_columns(q.n, spec.sample_columns);
  const auto expected =
      expect(q, view(a), epilogue, operands.args(), columns, act_model(spec.linear, q.scheme, report.kernel), on);
  const Comparison comparison = compare(d, columns, expected);
  report.checked = comparison.checked;
  report.worst_error_over_bound = comparison.worst_ratio;
  report.relative_l2 = comparison.relative_l2;
  if (spec.added_error && floats && spec.linear.quantize.codes != DType::none) {
    // Left out where NIBBLE_KERNEL asks for a kernel that does only the one or the other.
    const auto errors = activation_errors(q, {&spec.linear.quantize, 1}, {.inputs = view(a), .tokens = m}, &on);
    if (errors.ok() && errors->front().possible.ok()) report.added_error = errors->front().relative_l2;
  }
  report.passed = comparison.failures == 0 && report.round_trip && report.repeatable;
  if (report.passed) return report;
  if (comparison.failures != 0)
    report.failure =
        fmt::format("{} of {} elements are outside their bound; the worst is D[{},{}] = {:.9g}, expected {:.9g} ± {:.3g}",
                    comparison.failures, comparison.checked, comparison.worst_m, comparison.worst_n, comparison.worst_got,
                    comparison.worst_expected.value, comparison.worst_expected.bound);
  else
    report.failure = report.round_trip ? "two runs gave different bits" : "unpack(pack(weight)) differs from the weight";
  report.failure += fmt::format(" (kernel {}, M={}, seed {})", report.kernel, m, spec.seed);
  return report;
}

}  // namespace nibble
