// verify_linear and verify_conv: a plan against the oracle, element by element.
#include "nibble/verify.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "core/error.hpp"
#include "core/random.hpp"
#include "core/sizes.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/conv.hpp"
#include "kernels/reference/oracle.hpp"
#include "plan/act_model.hpp"
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
struct OperandData {
  Tensor a_scale, a_zero, row_scale, col_scale, bias, gate, residual, sum_bias, out_scale, out_zero;

  /// `float_type`: of bias, gate and residual.
  OperandData(const LinearSpec& linear, std::int64_t m, std::int64_t n, std::int64_t k, DType float_type, std::uint64_t seed) {
    const EpilogueSpec& spec = linear.epilogue;
    const ActScheme& quantize = linear.act_scheme;
    if (!is_compute_float(linear.a_dtype)) {
      const std::int64_t rows = quantize.group == GroupShape::tensor() ? 1 : m;
      std::vector<std::int64_t> shape{rows};
      if (quantize.group.k != 0) shape.push_back(quantize.group.cols(k));
      a_scale = gaussian(DType::f32, shape, seed + 6, 0.001f, 0.01f);
      if (quantize.zero == ZeroKind::offset) a_zero = gaussian(DType::f32, shape, seed + 7, 0.5f, 1.0f);
      if (quantize.zero == ZeroKind::integer) {
        a_zero = integers(shape, seed + 7, linear.a_dtype == DType::u8 ? 0 : -128, 256);
      }
    }
    if (spec.sum_bias) sum_bias = integers({n}, seed + 8, -100000, 200000);
    if (spec.out_scales) {  // like the layer's results: of the sums of K products of two such factors
      out_scale = gaussian(DType::f32, {spec.columns(n)}, seed + 9, 0.005f, 0.05f);
      out_zero = integers({1}, seed + 10, spec.out == DType::u8 ? 100 : -20, 40);
    }
    if (spec.row_scale) row_scale = gaussian(DType::f32, {m}, seed + 1, 0.1f, 1.0f);
    if (spec.col_scale) col_scale = gaussian(DType::f32, {n}, seed + 2, 0.1f, 1.0f);
    if (spec.bias) bias = gaussian(float_type, {n}, seed + 3, 1.0f);
    if (spec.gate) gate = gaussian(float_type, {m, spec.columns(n)}, seed + 4, 1.0f);
    if (spec.residual) residual = gaussian(float_type, {m, spec.columns(n)}, seed + 5, 1.0f);
  }
  Operands args() const {
    return {.a_scale = view(a_scale),
            .a_zero = view(a_zero),
            .row_scale = view(row_scale),
            .col_scale = view(col_scale),
            .bias = view(bias),
            .gate = view(gate),
            .residual = view(residual),
            .sum_bias = view(sum_bias),
            .out_scale = view(out_scale),
            .out_zero = view(out_zero)};
  }

 private:
  /// Seeded numbers of s32 in [low, low + count).
  static Tensor integers(const std::vector<std::int64_t>& shape, std::uint64_t seed, std::int32_t low, std::uint64_t count) {
    Tensor t(DType::s32, shape);
    for (std::int64_t i = 0; i < t.numel(); ++i)
      t.as<std::int32_t>()[i] = static_cast<std::int32_t>(random_bits(seed, static_cast<std::uint64_t>(i)) % count) + low;
    return t;
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

/// An image in memory, dense.
struct Image {
  Tensor memory;
  TensorView view;

  Image() = default;
  Image(DType type, ImageLayout layout, std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w)
      : memory(type, {b * c * h * w}), view(memory.bytes.data(), type, {b, c, h, w}) {
    if (layout == ImageLayout::nhwc) view.strides = {c * h * w, 1, w * c, c};
  }
  /// Takes its elements from a matrix [B·H·W, C].
  void fill(const Tensor& pixels) {
    const auto width = static_cast<std::size_t>(bits(view.dtype) / 8);
    const std::byte* from = pixels.bytes.data();
    for (std::int64_t b = 0; b < view.dim(0); ++b)
      for (std::int64_t h = 0; h < view.dim(2); ++h)
        for (std::int64_t w = 0; w < view.dim(3); ++w)
          for (std::int64_t c = 0; c < view.dim(1); ++c, from += width) {
            const std::int64_t at = b * view.stride(0) + c * view.stride(1) + h * view.stride(2) + w * view.stride(3);
            std::memcpy(memory.bytes.data() + static_cast<std::size_t>(at) * width, from, width);
          }
  }
};

/// A plan, the operands of a run, and the expected result.
struct Trial {
  const QuantTensor& q;
  const PackedWeight& weight;
  const Plan& plan;
  std::string kernel;
  ConstTensorView a;
  Operands operands;
  Tensor& memory;  // of D
  TensorView d;
  std::function<Tensor()> rows;  // D as a matrix
  std::vector<std::int64_t> columns;
  std::int64_t group_columns;  // the oracle computes columns of one group at a time
  std::function<std::vector<reference::Expected>(std::span<const std::int64_t> columns)> oracle;
  std::string what;  // for messages: the kernel, sizes and the seed
};

/// Expected values of the trial's columns, computed in parallel, [M, columns] row by row.
std::vector<reference::Expected> expect(const Trial& trial, std::int64_t m, Executor& executor) {
  constexpr std::size_t kColumns = 8;  // per task: enough to share the conversion of A
  const std::span<const std::int64_t> columns = trial.columns;
  std::vector<std::size_t> ends;  // of the tasks
  for (std::size_t begin = 0, i = 1; i <= columns.size(); ++i) {
    if (i < columns.size() && i - begin < kColumns && columns[i] / trial.group_columns == columns[begin] / trial.group_columns)
      continue;
    ends.push_back(i);
    begin = i;
  }
  const auto width = static_cast<std::int64_t>(columns.size());
  std::vector<reference::Expected> all(static_cast<std::size_t>(m * width));
  executor.parallel_for(static_cast<std::int64_t>(ends.size()), [&](std::int64_t task) {
    const std::size_t begin = task == 0 ? 0 : ends[static_cast<std::size_t>(task) - 1];
    const std::size_t count = ends[static_cast<std::size_t>(task)] - begin;
    const auto part = trial.oracle(columns.subspan(begin, count));
    for (std::size_t row = 0; row < static_cast<std::size_t>(m); ++row)
      std::copy_n(part.data() + row * count, count, all.data() + row * columns.size() + begin);
  });
  return all;
}

/// Runs the trial twice and compares.
Result<VerifyReport> report_of(const Trial& trial, Executor& executor) {
  VerifyReport report;
  report.kernel = trial.kernel;
  NIBBLE_ASSIGN_OR_RETURN(const QuantTensor unpacked, unpack(trial.weight));
  report.round_trip = unpacked == trial.q;
  std::vector<std::byte> first;
  for (int run = 0; run < 2; ++run) {
    std::ranges::fill(trial.memory.bytes, std::byte{0xff});
    NIBBLE_RETURN_IF_ERROR(run_on_host(trial.plan, trial.weight, trial.a, trial.d, trial.operands, &executor));
    if (run == 0) first = trial.memory.bytes;
  }
  report.repeatable = trial.memory.bytes == first;

  const Tensor d = trial.rows();
  const Comparison comparison = compare(d, trial.columns, expect(trial, d.shape[0], executor));
  report.checked = comparison.checked;
  report.worst_error_over_bound = comparison.worst_ratio;
  report.relative_l2 = comparison.relative_l2;
  report.passed = comparison.failures == 0 && report.round_trip && report.repeatable;
  if (report.passed) return report;
  if (comparison.failures != 0)
    report.failure =
        fmt::format("{} of {} elements are outside their bound; the worst is D[{},{}] = {:.9g}, expected {:.9g} ± {:.3g}",
                    comparison.failures, comparison.checked, comparison.worst_m, comparison.worst_n, comparison.worst_got,
                    comparison.worst_expected.value, comparison.worst_expected.bound);
  else
    report.failure = report.round_trip ? "two runs gave different bits" : "unpack(pack(weight)) differs from the weight";
  report.failure += fmt::format(" ({})", trial.what);
  return report;
}

/// Plan options for the kernel to verify, on the threads of this run.
PackOptions packing_of(PackOptions options, const PlanOptions& plan, Executor& executor) {
  if (options.kernel.empty() && options.layout.empty()) options.kernel = plan.kernel;
  if (options.executor == nullptr) options.executor = &executor;
  return options;
}

}  // namespace

Result<VerifyReport> verify_linear(const QuantTensor& q, const VerifySpec& spec, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_outliers(spec.outliers));
  Executor& on = executor != nullptr ? *executor : default_executor();
  const LinearSpec& linear = spec.linear;
  const std::int64_t m = linear.m_max;
  if (linear.norm.kind != Norm::none)
    return error(StatusCode::unsupported, "verification has no bound for a norm: verify the layer without it");
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, linear, packing_of(spec.pack, spec.plan, on)));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::linear(weight, linear, spec.plan));

  const bool floats = is_compute_float(linear.a_dtype);
  const Tensor a = floats ? gaussian_activations(linear.a_dtype, m, q.k, spec.seed, spec.outliers)
                          : random_codes(linear.a_dtype, m, q.k, spec.seed);
  const OperandData operands(linear, m, q.n, q.k, floats ? linear.a_dtype : DType::f16, spec.seed);
  const std::int64_t width = linear.epilogue.columns(q.n);
  Tensor d(linear.epilogue.out, {m, width});
  const std::string kernel(plan.kernel(m));
  const reference::WeightArrays arrays = reference::arrays_of(q);
  const reference::ActModel model =
      act_model(*find_kernel(kernel), linear.a_dtype, linear.act_scheme, q.scheme, linear.accumulation);
  const Operands args = operands.args();
  NIBBLE_ASSIGN_OR_RETURN(
      VerifyReport report,
      report_of(
          {.q = q,
           .weight = weight,
           .plan = plan,
           .kernel = kernel,
           .a = view(a),
           .operands = args,
           .memory = d,
           .d = TensorView(d.bytes.data(), d.dtype, {m, width}),
           .rows = [&] { return d; },
           .columns = pick_columns(width, spec.sample_columns),
           .group_columns = width,
           .oracle = [&](auto columns) { return reference::linear(arrays, view(a), linear.epilogue, args, columns, model); },
           .what = fmt::format("kernel {}, M={}, seed {}", kernel, m, spec.seed)},
          on));
  if (spec.added_error && floats && linear.act_scheme.codes != DType::none) {
    // Skipped where NIBBLE_KERNEL names a kernel that supports only one of the two.
    const auto errors = activation_errors(q, {&linear.act_scheme, 1}, {.inputs = view(a), .tokens = m}, &on);
    if (errors.ok() && errors->front().possible.ok()) report.added_error = errors->front().relative_l2;
  }
  return report;
} catch (...) {
  return caught();
}

Result<VerifyReport> verify_conv(const QuantTensor& q, const VerifyConvSpec& spec, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_outliers(spec.outliers));
  Executor& on = executor != nullptr ? *executor : default_executor();
  const ConvSpec& conv = spec.conv;
  const ConvGeometry& g = conv.geometry;
  const std::int64_t batch = conv.batch_max;
  NIBBLE_RETURN_IF_ERROR(check_batch(g, batch));
  const std::int64_t pixels = batch * g.out_height() * g.out_width();
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, conv, packing_of(spec.pack, spec.plan, on)));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::conv(weight, conv, spec.plan));

  const bool floats = is_compute_float(conv.a_dtype);
  const std::int64_t inputs = batch * g.height * g.width;
  Image a(conv.a_dtype, conv.input, batch, g.in_channels, g.height, g.width);
  a.fill(floats ? gaussian_activations(conv.a_dtype, inputs, g.in_channels, spec.seed, spec.outliers)
                : random_codes(conv.a_dtype, inputs, g.in_channels, spec.seed));
  const auto image_of_d = [&](DType type) { return Image(type, conv.output, batch, q.n, g.out_height(), g.out_width()); };
  const OperandData operands({.a_dtype = conv.a_dtype, .epilogue = conv.epilogue, .act_scheme = conv.act_scheme}, pixels, q.n,
                             q.k, floats ? conv.a_dtype : DType::f16, spec.seed);
  Operands args = operands.args();
  Image gate, residual;
  if (conv.epilogue.gate) {
    gate = image_of_d(operands.gate.dtype);
    gate.fill(operands.gate);
    args.gate = gate.view;
  }
  if (conv.epilogue.residual) {
    residual = image_of_d(operands.residual.dtype);
    residual.fill(operands.residual);
    args.residual = residual.view;
  }
  Image d = image_of_d(conv.epilogue.out);
  const std::string kernel(plan.kernel(batch));
  const reference::WeightArrays arrays = reference::arrays_of(q);
  const reference::ActModel model = act_model(*find_kernel(kernel), conv.a_dtype, conv.act_scheme, q.scheme, conv.accumulation);
  return report_of({.q = q,
                    .weight = weight,
                    .plan = plan,
                    .kernel = kernel,
                    .a = a.view,
                    .operands = args,
                    .memory = d.memory,
                    .d = d.view,
                    .rows = [&] { return reference::pixels(d.view); },
                    .columns = pick_columns(q.n, spec.sample_columns),
                    .group_columns = g.group_outputs(),
                    .oracle = [&](auto columns) { return reference::conv(arrays, conv, a.view, args, columns, model); },
                    .what = fmt::format("rows of D are its pixels; kernel {}, {} of {}x{}x{}, seed {}", kernel,
                                        batch == 1 ? "an image" : fmt::format("{} images", batch), g.in_channels, g.height,
                                        g.width, spec.seed)},
                   on);
} catch (...) {
  return caught();
}

}  // namespace nibble
