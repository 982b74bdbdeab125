#include "kernels/reference/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace nibble::reference {
namespace {

constexpr double kUnit32 = 0x1p-24;  // rounding unit of f32

double element(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::f32: {
      float v;
      std::memcpy(&v, static_cast<const std::byte*>(data) + 4 * i, 4);
      return v;
    }
    case DType::f16:
    case DType::bf16: {
      std::uint16_t v;
      std::memcpy(&v, static_cast<const std::byte*>(data) + 2 * i, 2);
      return dtype == DType::f16 ? to_f32(f16{v}) : to_f32(bf16{v});
    }
    default: return code_value(dtype, static_cast<const std::uint8_t*>(data)[i]);
  }
}

/// How far rounding to `out` may move x: half a unit in the last place, or half the smallest subnormal.
double output_rounding(DType out, double x) {
  switch (out) {
    case DType::f16: return std::max(0x1p-11 * std::abs(x), 0x1p-25);
    case DType::bf16: return std::max(0x1p-8 * std::abs(x), 0x1p-134);
    default: return std::max(kUnit32 * std::abs(x), 0x1p-150);
  }
}

/// Rounding error of a K-term f32 dot product relative to Σ|a·w|, from Higham and Mary (2019), "A new approach to probabilistic
/// rounding error analysis": λ·√K·u holds with probability 1 − 2K·exp(−λ²/2); λ = 7 leaves 2e-7 at K = 4096 for one element whose
/// errors all line up at the bound, and in practice nothing. Two more units per term: the rounding of w and of a·prescale.
double dot_error(double k) {
  constexpr double kLambda = 7.0;
  return (kLambda * std::sqrt(k) + 3.0) * kUnit32;
}

struct Activated {
  double value;
  double slope;  // an upper bound of |act'|: how much an error of the argument grows
};

Activated activate(const EpilogueSpec& spec, double x) {
  switch (spec.activation) {
    case Activation::none: return {x, 1};
    case Activation::relu: return {std::max(x, 0.0), 1};
    case Activation::clamp: return {std::clamp(x, static_cast<double>(spec.clamp_low), static_cast<double>(spec.clamp_high)), 1};
    case Activation::gelu_erf: return {0.5 * x * (1 + std::erf(x / std::sqrt(2.0))), 1.13};
    case Activation::gelu_tanh:
      return {0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))), 1.13};
    case Activation::silu: return {x / (1 + std::exp(-x)), 1.1};
  }
  return {x, 1};
}

/// `sum` = Σ a·w, `magnitude` = Σ |a·w|: through the epilogue, carrying the error bound along.
Expected finish(const EpilogueSpec& spec, const EpilogueArgs& args, std::int64_t m, std::int64_t n, double sum, double magnitude,
                double k) {
  double x = sum;
  double bound = dot_error(k) * magnitude;
  const auto scaled = [&](double s) {
    x *= s;
    bound = bound * std::abs(s) + kUnit32 * std::abs(x);
  };
  if (spec.row_scale) scaled(element(args.row_scale.data, args.row_scale.dtype, m));
  if (spec.col_scale) scaled(element(args.col_scale.data, args.col_scale.dtype, n));
  if (spec.bias) {
    x += element(args.bias.data, args.bias.dtype, n);
    bound += kUnit32 * std::abs(x);
  }
  if (spec.activation != Activation::none) {
    const Activated act = activate(spec, x);
    // f32 evaluation of erf, tanh and exp: up to 8 units of the argument, which covers cancellation in 1 + erf(x).
    const bool transcendental = spec.activation != Activation::relu && spec.activation != Activation::clamp;
    bound = act.slope * bound + (transcendental ? 8 * kUnit32 * std::abs(x) : 0.0);
    x = act.value;
  }
  if (spec.gate) scaled(element(args.gate.data, args.gate.dtype, m * args.gate.stride(0) + n));
  if (spec.residual) {
    x += element(args.residual.data, args.residual.dtype, m * args.residual.stride(0) + n);
    bound += kUnit32 * std::abs(x);
  }
  if (spec.out == DType::s8) {  // in codes: the true quotient, half a code of rounding, and the carried error
    const double code = x / spec.out_scale + spec.out_zero;
    const double error = 0.5 + bound / spec.out_scale + 4 * kUnit32 * (std::abs(code) + std::abs(spec.out_zero) + 1);
    return {std::clamp(code, -128.0, 127.0), error};
  }
  return {x, bound + output_rounding(spec.out, std::abs(x) + bound)};
}

}  // namespace

WeightArrays arrays_of(const QuantTensor& q) {
  WeightArrays w;
  w.scheme = q.scheme;
  w.n = q.n;
  w.k = q.k;
  w.codes = q.codes.data();
  w.scales = q.scales.bytes.data();
  w.zeros = q.zeros.empty() ? nullptr : q.zeros.bytes.data();
  w.zero_type = q.zeros.dtype;
  w.scale2 = q.scale2.value_or(1.0f);
  w.group_of = q.g_idx.empty() ? nullptr : q.g_idx.data();
  w.prescale = q.prescale.empty() ? nullptr : &q.prescale;
  return w;
}

double weight_value(const WeightArrays& w, std::int64_t n, std::int64_t k) {
  const GroupShape& group = w.scheme.group;
  const std::int64_t g = w.group_of != nullptr ? w.group_of[k] : group.k == 0 ? 0 : k / group.k;
  const std::int64_t at = (group.n == 0 ? 0 : n / group.n) * group.cols(w.k) + g;
  const double q = code_value(w.scheme.codes, w.codes[n * w.k + k]);
  const double s = element(w.scales, w.scheme.scale, at);
  switch (w.scheme.zero) {
    case ZeroKind::none: return q * s * w.scale2;
    case ZeroKind::integer:
    case ZeroKind::real: return (q - element(w.zeros, w.zero_type, at)) * s * w.scale2;
    case ZeroKind::offset: return (q * s + element(w.zeros, w.zero_type, at)) * w.scale2;
  }
  return 0;
}

std::vector<Expected> linear(const WeightArrays& w, const ConstTensorView& a, const EpilogueSpec& spec, const EpilogueArgs& args,
                             std::span<const std::int64_t> columns) {
  const std::int64_t rows = a.dim(0);
  const auto width = static_cast<std::int64_t>(columns.size());
  std::vector<Expected> expected(static_cast<std::size_t>(rows * width));
  std::vector<double> activations(static_cast<std::size_t>(rows * w.k));
  for (std::int64_t m = 0; m < rows; ++m)
    for (std::int64_t k = 0; k < w.k; ++k) {
      const std::int64_t channel = w.channel_of == nullptr ? k : w.channel_of[k];
      const double scale = w.prescale == nullptr ? 1.0 : element(w.prescale->bytes.data(), w.prescale->dtype, channel);
      activations[static_cast<std::size_t>(m * w.k + k)] = scale * element(a.data, a.dtype, m * a.stride(0) + channel);
    }
  std::vector<double> weights(static_cast<std::size_t>(w.k));
  for (std::int64_t j = 0; j < width; ++j) {
    const std::int64_t n = columns[static_cast<std::size_t>(j)];
    for (std::int64_t k = 0; k < w.k; ++k) weights[static_cast<std::size_t>(k)] = weight_value(w, n, k);
    for (std::int64_t m = 0; m < rows; ++m) {
      const double* x = activations.data() + m * w.k;
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < w.k; ++k) {
        const double term = x[k] * weights[static_cast<std::size_t>(k)];
        sum += term;
        magnitude += std::abs(term);
      }
      expected[static_cast<std::size_t>(m * width + j)] = finish(spec, args, m, n, sum, magnitude, static_cast<double>(w.k));
    }
  }
  return expected;
}

}  // namespace nibble::reference
