#include "kernels/norm.hpp"

#include <cmath>

#include "core/error.hpp"

namespace nibble {

std::string_view name(Norm kind) {
  switch (kind) {
    case Norm::none: return "none";
    case Norm::rms: return "rms";
    case Norm::layer: return "layer";
  }
  return "unknown";
}

std::string_view NormSpec::text() const {
  if (kind == Norm::none) return "";
  if (kind == Norm::rms) return add ? "add+rms" : "rms";
  if (bias) return add ? "add+layer+bias" : "layer+bias";
  return add ? "add+layer" : "layer";
}

Status NormSpec::validate() const {
  if (!(eps >= 0.0f) || !std::isfinite(eps))
    return error(StatusCode::invalid_argument, "norm.eps={} must be finite and not negative", eps);
  if (!std::isfinite(weight_offset))
    return error(StatusCode::invalid_argument, "norm.weight_offset={} must be finite", weight_offset);
  if (bias && kind != Norm::layer)
    return error(StatusCode::invalid_argument, "norm.bias is for a layer norm, not for {}", nibble::name(kind));
  if (add && kind == Norm::none)
    return error(StatusCode::invalid_argument, "norm.add is the first half of a norm: set norm.kind to rms or layer");
  return {};
}

namespace {

/// Elements between rows of y: they begin at multiples of 16 bytes, so that every kernel reads them.
std::int64_t pitch_of(DType type, std::int64_t k) {
  const std::int64_t each = 16 * 8 / bits(type);
  return (k + each - 1) / each * each;
}

Status check_vector(std::string_view what, const ConstTensorView& v, std::int64_t k) {
  if (!v.empty() && is_compute_float(v.dtype) && v.rank == 1 && v.dim(0) == k && v.stride(0) == 1) return {};
  return error(StatusCode::invalid_argument,
               "{} must be a contiguous vector of {} f32, f16 or bf16, got rank {} and {} elements of {}", what, k, v.rank,
               v.empty() ? 0 : v.numel(), v.empty() ? "nothing" : name(v.dtype));
}

}  // namespace

Problem normalizing(const Problem& problem) {
  Problem normalizing = problem;
  normalizing.op = Op::prepare;
  normalizing.form = ActForm::normalized;
  normalizing.layout = {};
  normalizing.normalizes = false;
  return normalizing;
}

std::size_t normalized_bytes(const Kernel&, const Problem& p) {
  return static_cast<std::size_t>(p.m * pitch_of(p.a_dtype, p.k) * bits(p.a_dtype) / 8);
}

Status check_norm_args(const NormSpec& spec, const Operands& args, const ConstTensorView& a) {
  if (spec.kind == Norm::none) return {};
  const std::int64_t m = a.dim(0), k = a.dim(1);
  NIBBLE_RETURN_IF_ERROR(check_vector("norm_weight", args.norm_weight, k));
  if (spec.bias) NIBBLE_RETURN_IF_ERROR(check_vector("norm_bias", args.norm_bias, k));
  const auto matrix = [&](const ConstTensorView& v) { return v.rank == 2 && v.dim(0) == m && v.dim(1) == k && v.stride(1) == 1; };
  if (!spec.add) {
    if (args.norm_add.empty() && args.norm_sum.empty()) return {};
    return error(StatusCode::invalid_argument, "norm_add and norm_sum are for a plan with NormSpec::add, which this one has not");
  }
  const ConstTensorView& add = args.norm_add;
  if (add.empty() || !is_compute_float(add.dtype) || !matrix(add))
    return error(StatusCode::invalid_argument, "norm_add must be f32, f16 or bf16 [{},{}] with a last stride of 1", m, k);
  const TensorView& sum = args.norm_sum;
  if (sum.empty()) return {};
  if (sum.dtype != a.dtype || !matrix(sum) || (m > 1 && sum.stride(0) < k))
    return error(StatusCode::invalid_argument, "norm_sum must be {} [{},{}] with a last stride of 1 and rows that do not overlap",
                 name(a.dtype), m, k);
  return {};
}

StepArgs normalized(const StepArgs& args) {
  StepArgs after = args;
  after.a.data = args.prepared;
  after.a.strides[0] = pitch_of(args.a.dtype, args.a.dim(1));
  return after;
}

NormTask norm_task(const StepArgs& args) {
  const StepArgs after = normalized(args);
  const Operands& operands = args.operands;
  NormTask task{.spec = args.norm,
                .type = args.a.dtype,
                .m = args.a.dim(0),
                .k = args.a.dim(1),
                .a = args.a.data,
                .a_stride = args.a.stride(0),
                .weight = operands.norm_weight.data,
                .weight_type = operands.norm_weight.dtype,
                .y = args.prepared,
                .y_stride = after.a.stride(0)};
  if (args.norm.add) {
    task.add = operands.norm_add.data;
    task.add_type = operands.norm_add.dtype;
    task.add_stride = operands.norm_add.stride(0);
    task.sum = operands.norm_sum.data;
    task.sum_stride = operands.norm_sum.stride(0);
  }
  if (args.norm.bias) {
    task.bias = operands.norm_bias.data;
    task.bias_type = operands.norm_bias.dtype;
  }
  return task;
}

}  // namespace nibble
