#include "epilogue/epilogue.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "epilogue/activation.hpp"

namespace nibble {

std::string_view name(Activation activation) {
  switch (activation) {
    case Activation::none: return "none";
    case Activation::relu: return "relu";
    case Activation::clamp: return "clamp";
    case Activation::gelu_erf: return "gelu_erf";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::silu: return "silu";
    case Activation::sigmoid: return "sigmoid";
    case Activation::tanh: return "tanh";
    case Activation::hardswish: return "hardswish";
    case Activation::leaky_relu: return "leaky_relu";
    case Activation::quick_gelu: return "quick_gelu";
  }
  return "unknown";
}

std::optional<Activation> parse_activation(std::string_view token) {
  if (token == "relu6") return Activation::clamp;
  for (Activation a : kActivations)
    if (name(a) == token) return a;
  return std::nullopt;
}

std::string EpilogueSpec::name() const {
  std::vector<std::string_view> parts;
  if (sum_bias) parts.push_back("sum_bias");
  if (row_scale) parts.push_back("row_scale");
  if (col_scale) parts.push_back("col_scale");
  if (bias) parts.push_back("bias");
  if (activation != Activation::none) parts.push_back(nibble::name(activation));
  if (glu) parts.push_back("glu");
  if (gate) parts.push_back("gate");
  if (residual) parts.push_back("residual");
  return fmt::format("{}->{}", fmt::join(parts, "+"), nibble::name(out));
}

Status EpilogueSpec::validate() const {
  const bool codes = out == DType::s8 || out == DType::u8;
  if (!is_compute_float(out) && !codes && out != DType::s32)
    return error(StatusCode::unsupported, "output type {} is not one of f32, f16, bf16, s8, u8, s32", nibble::name(out));
  if (out == DType::s32 && (row_scale || col_scale || bias || activation != Activation::none || glu || gate || residual))
    return error(StatusCode::unsupported, "a D of s32 is the integer sums: {} is for other types, sum_bias is added to them",
                 name());
  if (activation == Activation::clamp && !(clamp_low <= clamp_high))
    return error(StatusCode::invalid_argument, "clamp range [{}, {}] is empty", clamp_low, clamp_high);
  if (activation == Activation::leaky_relu && !std::isfinite(negative_slope))
    return error(StatusCode::invalid_argument, "negative_slope={} must be finite", negative_slope);
  if (glu && sum_bias)
    return error(StatusCode::unsupported, "sum_bias has no glu: pass a_zero instead, whose sums the packed weight holds");
  if (!(glu_limit > 0.0f)) return error(StatusCode::invalid_argument, "glu_limit={} must be positive", glu_limit);
  if (!std::isfinite(glu_offset)) return error(StatusCode::invalid_argument, "glu_offset={} must be finite", glu_offset);
  if (!glu && (glu_limit != std::numeric_limits<float>::infinity() || glu_offset != 0.0f))
    return error(StatusCode::invalid_argument, "glu_limit={} and glu_offset={} are for a glu", glu_limit, glu_offset);
  if (!codes && out_scales)
    return error(StatusCode::invalid_argument, "a D of {} has no out_scale; s8 and u8 do", nibble::name(out));
  if (!codes) return {};
  if (!(out_scale > 0.0f && std::isfinite(out_scale)))
    return error(StatusCode::invalid_argument, "out_scale={} must be positive and finite", out_scale);
  const std::int32_t low = out == DType::u8 ? 0 : -128, high = low + 255;
  if (out_zero < low || out_zero > high)
    return error(StatusCode::invalid_argument, "out_zero={} is outside [{}, {}]", out_zero, low, high);
  if (out_low > out_high || out_low > high || out_high < low)
    return error(StatusCode::invalid_argument, "the range of codes [{}, {}] holds none of [{}, {}]", out_low, out_high, low,
                 high);
  return {};
}

namespace epilogue {
namespace {

Status check_vector(std::string_view what, const ConstTensorView& v, std::int64_t length, bool f32_only) {
  if (v.empty()) return error(StatusCode::invalid_argument, "the plan's epilogue needs {}, none was given", what);
  if (f32_only ? v.dtype != DType::f32 : !is_compute_float(v.dtype))
    return error(StatusCode::invalid_argument, "{} is {}, expected {}", what, name(v.dtype),
                 f32_only ? "f32" : "f32, f16 or bf16");
  if (v.rank != 1 || v.dim(0) != length || v.stride(0) != 1)
    return error(StatusCode::invalid_argument, "{} must be a contiguous vector of {} elements, got rank {} and {} elements", what,
                 length, v.rank, v.numel());
  return {};
}

Status check_matrix(std::string_view what, const ConstTensorView& v, const TensorView& d) {
  if (v.empty()) return error(StatusCode::invalid_argument, "the plan's epilogue needs {}, none was given", what);
  if (!is_compute_float(v.dtype))
    return error(StatusCode::invalid_argument, "{} is {}, expected f32, f16 or bf16", what, name(v.dtype));
  if (v.rank != 2 || v.dim(0) != d.dim(0) || v.dim(1) != d.dim(1) || v.stride(1) != 1)
    return error(StatusCode::invalid_argument, "{} must be [{},{}] with a last stride of 1", what, d.dim(0), d.dim(1));
  return {};
}

/// A vector of s32, or for out_scale of f32 that may be one number for all channels.
Status check_numbers(std::string_view what, const ConstTensorView& v, DType type, std::int64_t length, bool one) {
  if (v.empty()) return error(StatusCode::invalid_argument, "the plan's epilogue needs {}, none was given", what);
  if (v.dtype == type && v.rank == 1 && v.stride(0) == 1 && (v.dim(0) == length || (one && v.dim(0) == 1))) return {};
  return error(StatusCode::invalid_argument, "{} must be a contiguous vector of {} {}{}, got rank {} and {} elements of {}", what,
               length, name(type), one && length != 1 ? " or one" : "", v.rank, v.numel(), name(v.dtype));
}

/// f(i, element i as f32) for a run of `count` elements of a float view starting at element `start`.
template <class F>
void for_each(const ConstTensorView& v, std::int64_t start, std::int64_t count, F&& f) {
  auto loop = [&](const auto* p) {
    for (std::int64_t i = 0; i < count; ++i) f(i, to_f32(p[start + i]));
  };
  if (v.dtype == DType::f32) loop(static_cast<const float*>(v.data));
  if (v.dtype == DType::f16) loop(static_cast<const f16*>(v.data));
  if (v.dtype == DType::bf16) loop(static_cast<const bf16*>(v.data));
}

/// acc[i · step] becomes channel n + i of x.
void scale_and_add(const EpilogueSpec& spec, const Operands& args, float* acc, std::int64_t step, std::int64_t m, std::int64_t n,
                   std::int64_t count) {
  if (spec.row_scale) {
    const float scale = static_cast<const float*>(args.row_scale.data)[m];
    for (std::int64_t i = 0; i < count; ++i) acc[i * step] *= scale;
  }
  if (spec.col_scale) for_each(args.col_scale, n, count, [&](std::int64_t i, float s) { acc[i * step] *= s; });
  if (spec.bias) for_each(args.bias, n, count, [&](std::int64_t i, float b) { acc[i * step] += b; });
}

template <class Function>
void apply(Function function, float* acc, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) acc[i] = function(acc[i]);
}

/// Of four numbers at a time, the last ones filled up: a number has the same bits wherever it stands.
void apply(Sigmoid sigmoid, float* acc, std::int64_t count) {
  typedef float Floats __attribute__((vector_size(16)));
  typedef std::uint32_t Bits __attribute__((vector_size(16)));
  constexpr std::int64_t kLanes = sizeof(Floats) / sizeof(float);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const std::size_t bytes = static_cast<std::size_t>(std::min(kLanes, count - i)) * sizeof(float);
    Floats x{};
    bytes == sizeof x ? std::memcpy(&x, acc + i, sizeof x) : std::memcpy(&x, acc + i, bytes);
    Floats power = -sigmoid.beta * x;
    exp_in_sum<Floats, Bits>(power);
    const Floats y = (sigmoid.times_x ? x : Floats{} + 1.0f) / (1.0f + power);
    bytes == sizeof y ? std::memcpy(acc + i, &y, sizeof y) : std::memcpy(acc + i, &y, bytes);
  }
}

/// The sums of a glu become the products of its halves, half as many.
void multiply_halves(const EpilogueSpec& spec, const Operands& args, float* acc, std::int64_t m, std::int64_t j,
                     std::int64_t count, std::int64_t half) {
  const auto round = [&](auto there) { std::transform(acc, acc + 2 * count, acc, [&](float x) { return to_f32(there(x)); }); };
  if (spec.factor_type() == DType::f16) round(to_f16);
  if (spec.factor_type() == DType::bf16) round(to_bf16);
  scale_and_add(spec, args, acc, 2, m, j, count);
  scale_and_add(spec, args, acc + 1, 2, m, half + j, count);
  const GluLimits limits{spec.glu_limit, spec.glu_offset};
  with_activation(spec, [&](auto function) {
    constexpr std::int64_t kPart = 16;  // halves of their own: loops over them are vectors
    float gate[kPart], other[kPart];
    for (std::int64_t i = 0; i < count; i += kPart) {
      const std::int64_t part = std::min(kPart, count - i);
      for (std::int64_t c = 0; c < part; ++c)
        gate[c] = limits.gate(acc[2 * (i + c)]), other[c] = limits.other(acc[2 * (i + c) + 1]);
      apply(function, gate, part);
      for (std::int64_t c = 0; c < part; ++c) acc[i + c] = gate[c] * other[c];
    }
  });
}

void store(const EpilogueSpec& spec, const Operands& args, const float* acc, std::int64_t n0, std::int64_t count,
           const TensorView& d, std::int64_t start) {
  switch (d.dtype) {
    case DType::f32: std::copy(acc, acc + count, static_cast<float*>(d.data) + start); break;
    case DType::f16: std::transform(acc, acc + count, static_cast<f16*>(d.data) + start, to_f16); break;
    case DType::bf16: std::transform(acc, acc + count, static_cast<bf16*>(d.data) + start, to_bf16); break;
    default: {
      const OutCodes codes(spec, args);
      auto* const to = static_cast<std::uint8_t*>(d.data) + start;
      for (std::int64_t i = 0; i < count; ++i)
        to[i] = static_cast<std::uint8_t>(quantize(acc[i], codes.scale(n0 + i), codes.zero, codes.range));
    }
  }
}

}  // namespace

Status check_args(const EpilogueSpec& spec, const Operands& args, const TensorView& d) {
  const std::int64_t n = spec.glu ? 2 * d.dim(1) : d.dim(1);  // of x
  if (spec.row_scale) NIBBLE_RETURN_IF_ERROR(check_vector("row_scale", args.row_scale, d.dim(0), true));
  if (spec.col_scale) NIBBLE_RETURN_IF_ERROR(check_vector("col_scale", args.col_scale, n, true));
  if (spec.bias) NIBBLE_RETURN_IF_ERROR(check_vector("bias", args.bias, n, false));
  if (spec.sum_bias) NIBBLE_RETURN_IF_ERROR(check_numbers("sum_bias", args.sum_bias, DType::s32, d.dim(1), false));
  if (spec.out_scales) {
    NIBBLE_RETURN_IF_ERROR(check_numbers("out_scale", args.out_scale, DType::f32, d.dim(1), true));
    if (!args.out_zero.empty()) NIBBLE_RETURN_IF_ERROR(check_numbers("out_zero", args.out_zero, DType::s32, 1, false));
  }
  if (spec.gate) NIBBLE_RETURN_IF_ERROR(check_matrix("gate", args.gate, d));
  if (spec.residual) NIBBLE_RETURN_IF_ERROR(check_matrix("residual", args.residual, d));
  return {};
}

void store_row(const EpilogueSpec& spec, const Operands& args, float* acc, std::int64_t m, std::int64_t n0, std::int64_t count,
               const TensorView& d) {
  if (spec.glu) {
    n0 /= 2, count /= 2;
    multiply_halves(spec, args, acc, m, n0, count, d.dim(1));
  } else {
    scale_and_add(spec, args, acc, 1, m, n0, count);
    if (spec.activation != Activation::none) with_activation(spec, [&](auto function) { apply(function, acc, count); });
  }
  if (spec.gate) for_each(args.gate, m * args.gate.stride(0) + n0, count, [&](std::int64_t i, float g) { acc[i] *= g; });
  if (spec.residual)
    for_each(args.residual, m * args.residual.stride(0) + n0, count, [&](std::int64_t i, float r) { acc[i] += r; });
  store(spec, args, acc, n0, count, d, m * d.stride(0) + n0);
}

}  // namespace epilogue
}  // namespace nibble
