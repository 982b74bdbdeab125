// Quantizes activations token by token, directly by the rule.
#include "nibble/quantize.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.hpp"
#include "nibble/device.hpp"
#include "quantize/act_rule.hpp"
#include "quantize/check_act_outputs.hpp"
#include "quantize/float_matrix.hpp"

namespace nibble {
namespace {

Status check_scheme(const ActScheme& scheme, const ActOptions& options) {
  const bool per_tensor = scheme.group == GroupShape::tensor();
  if (scheme.codes != DType::s8 && scheme.codes != DType::e4m3)
    return error(StatusCode::unsupported, "activations cannot be quantized to {}; use s8 or e4m3", name(scheme.codes));
  if (!per_tensor && scheme.group.n != 1)
    return error(StatusCode::unsupported, "a scale of activations is not shared by {} tokens", scheme.group.n);
  if (scheme.group.k < 0) return error(StatusCode::invalid_argument, "activations in groups of {} channels", scheme.group.k);
  if (scheme.zero == ZeroKind::real || (scheme.zero != ZeroKind::none && scheme.codes != DType::s8))
    return error(StatusCode::unsupported, "activations of type {} have no such zero points; s8 has integers or offsets",
                 name(scheme.codes));
  if (scheme.zero == ZeroKind::offset && per_tensor)
    return error(StatusCode::unsupported, "a scale per tensor, known beforehand, has an integer zero point and no float offset");
  if (per_tensor != options.known.has_value())
    return error(StatusCode::invalid_argument, "{}",
                 per_tensor ? "a scale per tensor has to be known beforehand: set options.known"
                            : "options.known is for a scale per tensor");
  if (per_tensor && !(options.known->scale > 0 && options.known->scale <= act_rule::kLargest))
    return error(StatusCode::invalid_argument, "a known scale of {} is no positive number", options.known->scale);
  const std::int32_t zero = per_tensor ? options.known->zero : 0, reach = scheme.zero == ZeroKind::none ? 0 : 128;
  if (zero < -reach || zero > std::max(0, reach - 1))
    return error(StatusCode::invalid_argument, "a known zero of {}, of {} {} zero points", zero, name(scheme.codes),
                 reach == 0 ? "without" : "with");
  if (options.limit && !(*options.limit > 0))
    return error(StatusCode::invalid_argument, "a limit of {} is no positive number", *options.limit);
  return {};
}

/// Whether `v` is present exactly when it is wanted, and then has this type and shape.
Status check_output(std::string_view what, const ConstTensorView& v, bool wanted, DType type,
                    std::initializer_list<std::int64_t> shape) {
  if (v.empty() && !wanted) return {};
  if (!wanted) return error(StatusCode::invalid_argument, "{} is not written with this scheme", what);
  if (v.empty()) return error(StatusCode::invalid_argument, "{} has no data", what);
  if (v.dtype != type || v.rank != static_cast<int>(shape.size()) || !std::equal(shape.begin(), shape.end(), v.shape.begin()))
    return error(StatusCode::invalid_argument, "{} must be {} [{}], got {} [{}]", what, name(type),
                 fmt::join(shape.begin(), shape.end(), ","), name(v.dtype),
                 fmt::join(v.shape.begin(), v.shape.begin() + v.rank, ","));
  return {};
}

/// Element [m, group] of a view [M,G], or [m] of one [M].
std::int64_t at(const TensorView& v, std::int64_t m, std::int64_t group) {
  return m * v.stride(0) + (v.rank == 2 ? group * v.stride(1) : 0);
}

/// The rule of channels [begin, end) of a token.
template <class Activation>
act_rule::Rule find_rule(std::int64_t begin, std::int64_t end, const ActScheme& scheme, float limit, const Activation& x) {
  // A range without a float offset contains 0.
  float low = scheme.zero == ZeroKind::offset ? act_rule::kLargest : 0, high = -low;
  bool finite = true;
  for (std::int64_t i = begin; i < end; ++i) {
    finite = finite && std::isfinite(x(i));
    low = std::min(low, x(i));
    high = std::max(high, x(i));
  }
  low = std::clamp(low, -limit, limit), high = std::clamp(high, -limit, limit);
  if (!finite) high = act_rule::kNan;
  switch (scheme.zero) {
    case ZeroKind::integer: return act_rule::asymmetric(low, high);
    case ZeroKind::offset: return act_rule::with_offset(low, high);
    default: break;
  }
  return act_rule::symmetric(finite ? std::max(-low, high) : high, scheme.codes == DType::e4m3 ? act_rule::kE4m3Max : 127.0f);
}

/// One token. `x(k)` is an activation, times its prescale.
template <class Activation>
void quantize_row(std::int64_t m, std::int64_t k, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options,
                  const Activation& x) {
  auto* const codes = static_cast<std::uint8_t*>(out.codes.data) + m * out.codes.stride(0);
  const bool e4m3 = scheme.codes == DType::e4m3;
  const float limit = options.limit.value_or(std::numeric_limits<float>::infinity());
  std::int64_t sum = 0;
  for (std::int64_t begin = 0, end = 0, group = 0; begin < k; begin = end, ++group) {
    end = scheme.group.k == 0 ? k : std::min<std::int64_t>(k, begin + scheme.group.k);
    act_rule::Rule rule;
    if (options.known) {
      rule = act_rule::known(options.known->scale, options.known->zero);
    } else {
      rule = find_rule(begin, end, scheme, limit, x);
      static_cast<float*>(out.scales.data)[at(out.scales, m, group)] = rule.scale;
      if (scheme.zero == ZeroKind::offset) static_cast<float*>(out.zeros.data)[at(out.zeros, m, group)] = rule.offset;
      if (scheme.zero == ZeroKind::integer) static_cast<std::int32_t*>(out.zeros.data)[at(out.zeros, m, group)] = rule.zero;
    }
    for (std::int64_t i = begin; i < end; ++i) {
      codes[i] = rule.inverse == 0 ? 0
                 : e4m3            ? act_rule::to_e4m3(act_rule::multiply(x(i), rule.inverse))
                                   : static_cast<std::uint8_t>(act_rule::to_s8(x(i) - rule.low, rule));
      sum += static_cast<std::int8_t>(codes[i]);
    }
  }
  if (!out.sums.empty()) static_cast<std::int32_t*>(out.sums.data)[m * out.sums.stride(0)] = static_cast<std::int32_t>(sum);
}

}  // namespace

Status check_act_outputs(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_scheme(scheme, options));
  NIBBLE_RETURN_IF_ERROR(check_float_matrix(a).with_context("activations"));
  const std::int64_t m = a.dim(0), k = a.dim(1);
  NIBBLE_RETURN_IF_ERROR(check_output("codes", out.codes, true, scheme.codes, {m, k}));
  if (out.codes.stride(1) != 1 || (m > 1 && out.codes.stride(0) < k))
    return error(StatusCode::invalid_argument,
                 "rows of codes are {} elements apart and {} long, with a last stride of {}; it must be 1", out.codes.stride(0),
                 k, out.codes.stride(1));
  const bool dynamic = scheme.group != GroupShape::tensor();
  const bool zeros = dynamic && scheme.zero != ZeroKind::none;
  const DType zero_type = scheme.zero == ZeroKind::offset ? DType::f32 : DType::s32;
  if (scheme.group.k == 0) {
    NIBBLE_RETURN_IF_ERROR(check_output("scales", out.scales, dynamic, DType::f32, {m}));
    NIBBLE_RETURN_IF_ERROR(check_output("zeros", out.zeros, zeros, zero_type, {m}));
  } else {
    NIBBLE_RETURN_IF_ERROR(check_output("scales", out.scales, dynamic, DType::f32, {m, scheme.group.cols(k)}));
    NIBBLE_RETURN_IF_ERROR(check_output("zeros", out.zeros, zeros, zero_type, {m, scheme.group.cols(k)}));
  }
  NIBBLE_RETURN_IF_ERROR(check_output("sums", out.sums, scheme.codes == DType::s8 && !out.sums.empty(), DType::s32, {m}));
  if (!options.prescale.empty() && options.prescale.rank == 1 && options.prescale.stride(0) != 1)
    return error(StatusCode::invalid_argument, "the prescale has a stride of {}; it must be 1", options.prescale.stride(0));
  return check_output("the prescale", options.prescale, !options.prescale.empty(), DType::f32, {k});
}

Status quantize_activations(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options,
                            Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  NIBBLE_RETURN_IF_ERROR(check_act_outputs(a, scheme, out, options));
  const auto* prescale = static_cast<const float*>(options.prescale.data);
  (executor != nullptr ? *executor : default_executor()).parallel_for(a.dim(0), [&](std::int64_t m) {
    with_row(a, m, [&](const auto* row) {
      quantize_row(m, a.dim(1), scheme, out, options, [=](std::int64_t k) {
        return prescale == nullptr ? to_f32(row[k]) : act_rule::multiply(to_f32(row[k]), prescale[k]);
      });
    });
  });
  return {};
} catch (...) {
  return caught();
}

}  // namespace nibble
