#include "kernels/reference/oracle.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>

#include "kernels/recode.hpp"

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

/// The largest error of rounding x to `out`: half a unit in the last place, or half the smallest subnormal.
double output_rounding(DType out, double x) {
  switch (out) {
    case DType::f16: return std::max(0x1p-11 * std::abs(x), 0x1p-25);
    case DType::bf16: return std::max(0x1p-8 * std::abs(x), 0x1p-134);
    default: return std::max(kUnit32 * std::abs(x), 0x1p-150);
  }
}

/// The bound on a sum of independent rounding errors, in standard deviations.
constexpr double kLambda = 7.0;

/// Rounding error of a K-term f32 dot product relative to Σ|a·w|, from Higham and Mary (2019), "A new approach to probabilistic
/// rounding error analysis": λ·√K·u holds with probability 1 − 2K·exp(−λ²/2); λ = 7 leaves 2e-7 at K = 4096 for an element whose errors
/// all reach the bound, and in practice nothing. Two more units per term: the rounding of w and of a·prescale.
double dot_error(double k) { return (kLambda * std::sqrt(k) + 3.0) * kUnit32; }

/// An FP8 tensor core aligns the addends of an instruction of 32 channels to the largest and drops bits below 2⁻¹³ of it. Not all addends
/// lose as much, nor in the same direction: the bound takes four such losses.
constexpr std::int64_t kFp8Channels = 32;
constexpr double kFp8Truncation = 4 * 0x1p-13;

/// Activations in 24-bit fixed point share a power of two per group of the weight, or per this many channels of a longer one.
constexpr std::int64_t kFixedBlock = 128;

/// What an activation stands for, and the size of the parts that kernels add up to it separately: |code·scale| + |offset|.
struct Meaning {
  double value, parts;

  static Meaning of(double value) { return {value, std::abs(value)}; }
  static Meaning of(double code, double scale, double offset) {
    return {code * scale + offset, std::abs(code * scale) + std::abs(offset)};
  }
};

/// The definition of quantized activations (docs/accuracy.md): the codes of the activations of a block, and the values of codes. All
/// operations on activations are f32.
class ActQuantizer {
 public:
  /// For a block that reaches from `low` to `high`, and to 0 without a float offset, and contains a NaN or an infinity unless `finite`.
  ActQuantizer(const ActScheme& act, float low, float high, bool finite) : act_(act) {
    const float range = act.zero == ZeroKind::none ? std::max(-low, high) : high - low;
    const float steps = act.codes == DType::e4m3 ? 448.0f : act.zero == ZeroKind::none ? 127.0f : 255.0f;
    if (!finite || !std::isfinite(range)) {
      scale_ = std::numeric_limits<float>::quiet_NaN();
    } else if (range < 0x1p-113f) {
      scale_ = 0;
      if (act.zero == ZeroKind::offset) offset_ = low;
    } else {
      scale_ = range / steps;
      inverse_ = steps / range;
      if (act.zero == ZeroKind::integer) {
        const float offset = low * inverse_;
        zero_ = std::nearbyint(-128.0f - offset);
      }
      if (act.zero == ZeroKind::offset) {
        low_ = low;
        offset_ = low + 128.0f * scale_;
      }
    }
  }
  ActQuantizer(const ActScheme& act, const StaticActs& known)
      : act_(act), scale_(known.scale), inverse_(1.0f / known.scale), zero_(static_cast<float>(known.zero)) {}

  float scale() const { return scale_; }
  Meaning meaning(float x) const {
    const float scaled = (x - low_) * inverse_;
    if (act_.codes == DType::e4m3) return Meaning::of(scale_ == 0 ? 0 : nearest_e4m3(scaled) * static_cast<double>(scale_));
    if (act_.zero == ZeroKind::offset)
      return Meaning::of(scale_ == 0 ? 0.0 : std::clamp(std::nearbyint(scaled) - 128.0f, -128.0f, 127.0f), scale_, offset_);
    const float code = std::isnan(scaled) ? zero_ : std::clamp(std::nearbyint(scaled) + zero_, -128.0f, 127.0f);
    return Meaning::of(static_cast<double>(code - zero_) * static_cast<double>(scale_));
  }

 private:
  /// The nearest code, by search among the ascending values; of two equally near ones the even code.
  static double nearest_e4m3(double x) {
    static const std::array<double, 0x7f> kValues = [] {
      std::array<double, 0x7f> values{};
      for (std::size_t code = 0; code < values.size(); ++code)
        values[code] = static_cast<double>(code_value(DType::e4m3, static_cast<std::uint8_t>(code)));
      return values;
    }();
    if (std::isnan(x)) return x;
    const auto above = std::ranges::lower_bound(kValues, std::abs(x));
    if (above == kValues.end()) return std::copysign(kValues.back(), x);
    if (above == kValues.begin()) return std::copysign(kValues.front(), x);
    const double up = *above - std::abs(x), down = std::abs(x) - *(above - 1);
    const bool even = (above - kValues.begin()) % 2 == 0;
    return std::copysign(up < down || (up == down && even) ? *above : *(above - 1), x);
  }

  ActScheme act_;
  float scale_ = 0, inverse_ = 0, zero_ = 0, low_ = 0, offset_ = 0;
};

struct Activated {
  double value;
  double slope;         // an upper bound of |act'|, by which an error of the argument grows
  double rounding = 0;  // of the function's evaluation in f32
};

/// Rounding in f32: erf, tanh and exp are right to 2 units in the last place, 4u, and the other operations round to u each: 8u of the
/// argument in all, which covers cancellation in 1 + erf(x) and the rounding of 1.702·x, which moves a sigmoid times x by less than u·|x|.
/// A sigmoid alone is not small where its argument is: 8u of its value, and what is lost where exp(−x) is infinite. Leaky relu is one product.
Activated activate(const EpilogueSpec& spec, double x) {
  const double rounding = 8 * kUnit32 * std::abs(x);
  const auto sigmoid = [](double y) { return 1 / (1 + std::exp(-y)); };
  switch (spec.activation) {
    case Activation::none: return {x, 1};
    case Activation::relu: return {std::max(x, 0.0), 1};
    case Activation::clamp: return {std::clamp(x, static_cast<double>(spec.clamp_low), static_cast<double>(spec.clamp_high)), 1};
    case Activation::gelu_erf: return {0.5 * x * (1 + std::erf(x / std::sqrt(2.0))), 1.13, rounding};
    case Activation::gelu_tanh:
      return {0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))), 1.13, rounding};
    case Activation::silu: return {x * sigmoid(x), 1.1, rounding};
    case Activation::quick_gelu: return {x * sigmoid(1.702 * x), 1.1, rounding};
    case Activation::sigmoid: return {sigmoid(x), 0.25, 8 * kUnit32 * sigmoid(x) + 0x1p-126};
    case Activation::tanh: return {std::tanh(x), 1, rounding};
    case Activation::hardswish: return {x * std::clamp(x + 3, 0.0, 6.0) / 6, 1.5, rounding};
    case Activation::leaky_relu: {
      const double slope = spec.negative_slope;
      return {x < 0 ? slope * x : x, std::max(1.0, std::abs(slope)), x < 0 ? kUnit32 * std::abs(slope * x) + 0x1p-150 : 0};
    }
  }
  return {x, 1};
}

/// What rounding to a code of s8 or u8 leaves of x, which is known to within `bound`.
Expected to_code(const EpilogueSpec& spec, const Operands& args, std::int64_t n, double x, double bound) {
  double scale = spec.out_scale, zero = spec.out_zero;
  if (spec.out_scales) {
    scale = element(args.out_scale.data, DType::f32, args.out_scale.dim(0) == 1 ? 0 : n);
    zero = args.out_zero.empty() ? 0 : *static_cast<const std::int32_t*>(args.out_zero.data);
  }
  const double lowest = spec.out == DType::u8 ? 0 : -128;
  const double low = std::max<double>(spec.out_low, lowest), high = std::min<double>(spec.out_high, lowest + 255);
  const double code = x / scale + zero;
  // The true quotient, half a code of rounding, and the carried error.
  const double error = 0.5 + bound / scale + 4 * kUnit32 * (std::abs(code) + std::abs(zero) + 1);
  if (std::isnan(code)) return {std::clamp(0.0, low, high), 0.0};
  return {std::clamp(code, low, high), error};
}

/// A number that is known to within `bound`, and the operations of an epilogue on it in f32.
struct Bounded {
  double x, bound;

  void multiply(double s) {
    x *= s;
    bound = bound * std::abs(s) + kUnit32 * std::abs(x);
  }
  void multiply(const Bounded& y) {
    bound = bound * (std::abs(y.x) + y.bound) + std::abs(x) * y.bound;
    x *= y.x;
    bound += kUnit32 * (std::abs(x) + bound);
  }
  void add(double y) {
    x += y;
    bound += kUnit32 * std::abs(x);
  }
  void limit(double low, double high) { x = std::clamp(x, low, high); }
  void activate(const EpilogueSpec& spec) {
    if (spec.activation == Activation::none) return;
    const Activated act = reference::activate(spec, x);
    bound = act.slope * bound + act.rounding;
    x = act.value;
  }
};

/// Channel n of x from its sum Σ a·w: scales and bias.
Bounded before_activation(const EpilogueSpec& spec, const Operands& args, std::int64_t m, std::int64_t n, Bounded sum) {
  if (spec.row_scale) sum.multiply(element(args.row_scale.data, args.row_scale.dtype, m));
  if (spec.col_scale) sum.multiply(element(args.col_scale.data, args.col_scale.dtype, n));
  if (spec.bias) sum.add(element(args.bias.data, args.bias.dtype, n));
  return sum;
}

/// `sum` = Σ a·w of column n, and of a glu `other` of column N/2 + n: through the epilogue, carrying the bounds along.
Expected finish(const EpilogueSpec& spec, const Operands& args, std::int64_t m, std::int64_t n, Bounded sum,
                std::optional<Bounded> other = {}, std::int64_t half = 0) {
  Bounded d = before_activation(spec, args, m, n, sum);
  if (spec.glu) d.limit(-std::numeric_limits<double>::infinity(), spec.glu_limit);
  d.activate(spec);
  if (spec.glu) {
    Bounded factor = before_activation(spec, args, m, half + n, *other);
    factor.limit(-spec.glu_limit, spec.glu_limit);
    if (spec.glu_offset != 0.0f) factor.add(spec.glu_offset);
    d.multiply(factor);
  }
  if (spec.gate) d.multiply(element(args.gate.data, args.gate.dtype, m * args.gate.stride(0) + n));
  if (spec.residual) d.add(element(args.residual.data, args.residual.dtype, m * args.residual.stride(0) + n));
  if (spec.out == DType::s8 || spec.out == DType::u8) return to_code(spec, args, n, d.x, d.bound);
  return {d.x, d.bound + output_rounding(spec.out, std::abs(d.x) + d.bound)};
}

/// The group along K of position k, and the index of its scale and zero.
std::int64_t group_of(const WeightArrays& w, std::int64_t k) {
  return w.group_of != nullptr ? w.group_of[k] : w.scheme.group.k == 0 ? 0 : k / w.scheme.group.k % w.groups;
}
std::int64_t scale_index(const WeightArrays& w, std::int64_t n, std::int64_t k) {
  const GroupShape& group = w.scheme.group;
  return (group.n == 0 ? 0 : n / group.n) * w.groups + group_of(w, k);
}

/// |q|·s + |z|·s: the magnitude behind W[n,k] when the two products are computed separately. Codes count from 0, the bias is part of z;
/// both are larger by `offset`.
double weight_parts(const WeightArrays& w, std::int64_t n, std::int64_t k, double offset) {
  const std::int64_t at = scale_index(w, n, k);
  const double s = std::abs(element(w.scales, w.scheme.scale, at) * w.scale2);
  const double span = static_cast<double>(1 << bits(w.scheme.codes)) + offset;
  if (w.scheme.zero == ZeroKind::none) return 2 * span * s;
  const double z = std::abs(element(w.zeros, w.zero_type, at));
  return w.scheme.zero == ZeroKind::offset ? 2 * span * s + std::abs(z * w.scale2) : (2 * span + z) * s;
}

/// Positions 0 … K−1 in the order in which packed weights hold them: by group, stable.
std::vector<std::int64_t> grouped_order(const WeightArrays& w) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(w.k));
  std::iota(order.begin(), order.end(), 0);
  if (w.group_of != nullptr) std::ranges::stable_sort(order, {}, [&](std::int64_t k) { return w.group_of[k]; });
  return order;
}

/// x rounded to f16 or bf16; where that is infinite, x: a kernel that overflows is wrong.
double rounded_to(DType type, double x) {
  const auto f = static_cast<float>(x);
  const double rounded = type == DType::f16 ? to_f32(to_f16(f)) : to_f32(to_bf16(f));
  return std::isinf(rounded) ? x : rounded;
}

/// The error of rounding a row of W to the type of the activations.
class RowRounding {
 public:
  RowRounding(const WeightArrays& w, const ActModel& model)
      : w_(w), scale2_(std::abs(w.scale2)), model_(model), order_(grouped_order(w)) {
    w_.scale2 = 1;  // multiplies the sums, which are not rounded
  }

  /// Reads W[n,:].
  void take(std::int64_t n) {
    n_ = n;
    weights_.clear();
    moved_.clear();
    for (std::int64_t k = 0; k < w_.k; ++k) {
      weights_.push_back(weight_value(w_, n, k));
      moved_.push_back(rounded_to(model_.weight_type, weights_.back()) - weights_.back());
    }
  }

  /// The bound on the error of Σ x·w that follows. If W is rounded once, the rounded matrix is known, and the difference is computed.
  double error(const double* x) const {
    if (model_.rounds_scales) return scale2_ * error_of_factors(x);
    return scale2_ * std::abs(std::inner_product(moved_.begin(), moved_.end(), x, 0.0));
  }

 private:
  /// W' = fl( (q − z₀)·fl(s) + fl(r) ): z₀ is the integer z, or the integer nearest to a float zero, within the range of codes, and r is
  /// the remainder, at most half a step. An error per weight and two per group, all independent.
  double error_of_factors(const double* x) const {
    const bool half = model_.weight_type == DType::f16;
    const double unit = half ? 0x1p-11 : 0x1p-8;
    const double least = half ? 0x1p-31 : 0x1p-134;  // of what is rounded; kernels multiply f16 scales by 2⁶ first
    const double scale_unit = w_.scheme.scale == model_.weight_type ? 0.0 : unit;
    double squares = 0;
    for (std::size_t begin = 0, end = 0; begin < order_.size(); begin = end) {
      const std::int64_t group = group_of(w_, order_[begin]);
      const double s = element(w_.scales, w_.scheme.scale, scale_index(w_, n_, order_[begin]));
      const double r = rest(order_[begin], s);
      double plain = 0, scaled = 0;  // Σ x; Σ x·(w − r)
      for (; end < order_.size() && group_of(w_, order_[end]) == group; ++end) {
        const std::int64_t k = order_[end];
        plain += x[k];
        const double weight = weights_[static_cast<std::size_t>(k)];
        scaled += x[k] * (weight - r);
        squares += std::pow(x[k] * std::max(unit * std::abs(weight), least), 2);
      }
      if (s != 0) squares += std::pow(scaled * std::max(scale_unit, least / std::abs(s)), 2);
      if (r != 0) squares += std::pow(plain * std::max(unit * std::abs(r), least), 2);
    }
    return kLambda * std::sqrt(squares);
  }

  double rest(std::int64_t k, double s) const {
    if (w_.scheme.zero == ZeroKind::none || w_.scheme.zero == ZeroKind::integer) return 0;
    const double zero = element(w_.zeros, w_.zero_type, scale_index(w_, n_, k));
    const double reach = bits(w_.scheme.codes) <= 4 ? 64 : 128;  // q − z₀ has to be exact in the type
    const bool offset = w_.scheme.zero == ZeroKind::offset;
    const double steps = !offset ? zero : s == 0 ? 0 : -zero / s;
    const double whole = std::nearbyint(std::clamp(steps, -reach, reach));
    return offset ? whole * s + zero : (whole - zero) * s;
  }

  WeightArrays w_;
  double scale2_;
  const ActModel& model_;
  std::vector<std::int64_t> order_;
  std::int64_t n_ = 0;
  std::vector<double> weights_, moved_;  // w; fl(w) − w
};

/// The larger of two scales.
double larger(double a, double b) { return std::abs(b) > std::abs(a) ? b : a; }

/// Quantizes activations [M,K], with their parts, as the model says, or gives the bound on the error of fixed point for each. `scales`:
/// receives the largest of each row's blocks.
std::vector<double> round_activations(const WeightArrays& w, const ConstTensorView& a, const ActModel& model,
                                      std::vector<Meaning>& activations, std::vector<double>& scales) {
  std::vector<double> error;
  const bool quantizes = model.act_scheme.codes != DType::none;
  const bool moves = model.fixed_point || model.scaled_f16;
  if ((!quantizes && !moves) || !is_compute_float(a.dtype)) return error;
  if (moves) error.resize(activations.size());
  const std::vector<std::int64_t> order = grouped_order(w);
  const std::int64_t group = w.scheme.group.k == 0 ? w.k : w.scheme.group.k;
  const std::int64_t block = quantizes && model.act_scheme.group.k != 0 ? model.act_scheme.group.k : w.k;
  for (std::int64_t m = 0; m < a.dim(0); ++m) {
    Meaning* row = activations.data() + m * w.k;
    for (std::int64_t begin = 0, end = 0; begin < w.k; begin = end) {
      end = std::min(w.k, begin + block);
      if (model.fixed_point)
        end = std::min({w.k, (begin / group + 1) * group, begin + kFixedBlock - (begin % group) % kFixedBlock});
      constexpr double kFar = std::numeric_limits<double>::infinity();
      double low = model.act_scheme.zero == ZeroKind::offset ? kFar : 0, high = -low;
      bool finite = true;
      for (std::int64_t i = begin; i < end; ++i) {
        const double x = row[order[static_cast<std::size_t>(i)]].value;
        finite = finite && std::isfinite(x);
        low = std::min(low, x);
        high = std::max(high, x);
      }
      if (quantizes && w.act_limit && finite) {
        const double limit = *w.act_limit;
        low = std::clamp(low, -limit, limit);
        high = std::clamp(high, -limit, limit);
      }
      const bool known = model.act_scheme.group == GroupShape::tensor() && w.static_acts;
      const ActQuantizer quantizer =
          known ? ActQuantizer(model.act_scheme, *w.static_acts)
                : ActQuantizer(model.act_scheme, static_cast<float>(low), static_cast<float>(high), finite);
      scales[static_cast<std::size_t>(m)] = larger(scales[static_cast<std::size_t>(m)], quantizer.scale());
      const double absmax = finite ? std::max(-low, high) : std::numeric_limits<double>::quiet_NaN();
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t k = order[static_cast<std::size_t>(i)];
        if (moves)
          error[static_cast<std::size_t>(m * w.k + k)] =
              model.fixed_point ? std::max(1.01 * 0x1p-23 * absmax, 0x1p-126) : std::max(0x1p-39 * absmax, 0x1p-150);
        else
          row[k] = quantizer.meaning(static_cast<float>(row[k].value));
      }
    }
  }
  return error;
}

}  // namespace

WeightArrays arrays_of(const QuantTensor& q) {
  WeightArrays w;
  w.scheme = q.scheme;
  w.n = q.n;
  w.k = q.k;
  w.codes = q.codes.data();
  w.groups = q.groups();
  w.scales = q.scales.bytes.data();
  w.zeros = q.zeros.empty() ? nullptr : q.zeros.bytes.data();
  w.zero_type = q.zeros.dtype;
  w.scale2 = q.scale2.value_or(1.0f);
  w.group_of = q.g_idx.empty() ? nullptr : q.g_idx.data();
  w.prescale = q.prescale.empty() ? nullptr : &q.prescale;
  w.static_acts = q.static_acts;
  w.act_limit = q.act_limit;
  return w;
}

double weight_value(const WeightArrays& w, std::int64_t n, std::int64_t k) {
  if (w.scheme.is_dense()) return element(w.codes, w.scheme.codes, n * w.k + k);
  const std::int64_t at = scale_index(w, n, k);
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

namespace {

/// The scale and the zero point, or the float offset, of channel k of token m of an A that comes quantized, of codes of `type`. The weight's
/// zero point is that of s8 codes.
struct ActScale {
  double scale = 1, zero = 0, offset = 0;
};
ActScale act_scale(const WeightArrays& w, const Operands& args, const ActScheme& act, DType type, std::int64_t m,
                   std::int64_t k) {
  if (args.a_scale.empty() && act.group == GroupShape::tensor() && w.static_acts)
    return {w.static_acts->scale, static_cast<double>(w.static_acts->zero + code_shift(type))};
  const auto at = [&](const ConstTensorView& v) {
    return (v.dim(0) == 1 ? 0 : m * v.stride(0)) + (v.rank == 1 ? 0 : k / act.group.k * v.stride(1));
  };
  ActScale of;
  if (!args.a_scale.empty()) of.scale = static_cast<const float*>(args.a_scale.data)[at(args.a_scale)];
  if (act.zero == ZeroKind::integer) of.zero = static_cast<const std::int32_t*>(args.a_zero.data)[at(args.a_zero)];
  if (act.zero == ZeroKind::offset) of.offset = static_cast<const float*>(args.a_zero.data)[at(args.a_zero)];
  return of;
}

/// What is left of the integer sums of W8A8: I + sum_bias[n], modulo 2³².
Expected integer_sum(const WeightArrays& w, const EpilogueSpec& spec, const Operands& args, std::int64_t m, std::int64_t n,
                     const ConstTensorView& a, const ActModel& model) {
  std::int64_t sum = spec.sum_bias ? static_cast<const std::int32_t*>(args.sum_bias.data)[n] : 0;
  const std::int64_t at = scale_index(w, n, 0);
  const double zero = w.scheme.zero == ZeroKind::integer ? element(w.zeros, w.zero_type, at) : 0.0;
  for (std::int64_t k = 0; k < w.k; ++k) {
    const std::int64_t channel = w.channel_of == nullptr ? k : w.channel_of[k];
    const double x =
        element(a.data, a.dtype, m * a.stride(0) + channel) - act_scale(w, args, model.act_scheme, a.dtype, m, channel).zero;
    sum += static_cast<std::int64_t>(x * (code_value(w.scheme.codes, w.codes[n * w.k + k]) - zero));
  }
  return {static_cast<double>(static_cast<std::int32_t>(static_cast<std::uint32_t>(sum))), 0.0};
}

}  // namespace

std::vector<Expected> linear(const WeightArrays& w, const ConstTensorView& a, const EpilogueSpec& spec, const Operands& args,
                             std::span<const std::int64_t> columns, const ActModel& model) {
  const std::int64_t rows = a.dim(0);
  const auto width = static_cast<std::int64_t>(columns.size());
  std::vector<Expected> expected(static_cast<std::size_t>(rows * width));
  if (spec.out == DType::s32) {
    for (std::int64_t m = 0; m < rows; ++m)
      for (std::int64_t j = 0; j < width; ++j)
        expected[static_cast<std::size_t>(m * width + j)] =
            integer_sum(w, spec, args, m, columns[static_cast<std::size_t>(j)], a, model);
    return expected;
  }
  std::vector<Meaning> meanings(static_cast<std::size_t>(rows * w.k));
  std::vector<double> act_scales(static_cast<std::size_t>(rows));  // the largest of a row; of W8A8 its only one
  for (std::int64_t m = 0; m < rows; ++m)
    for (std::int64_t k = 0; k < w.k; ++k) {
      const std::int64_t channel = w.channel_of == nullptr ? k : w.channel_of[k];
      const double scale = w.prescale == nullptr ? 1.0 : element(w.prescale->bytes.data(), w.prescale->dtype, channel);
      const double given = element(a.data, a.dtype, m * a.stride(0) + channel);
      Meaning& x = meanings[static_cast<std::size_t>(m * w.k + k)];
      if (!is_compute_float(a.dtype)) {
        const ActScale of = act_scale(w, args, model.act_scheme, a.dtype, m, channel);
        x = Meaning::of(given - of.zero, of.scale, of.offset);
        act_scales[static_cast<std::size_t>(m)] = larger(act_scales[static_cast<std::size_t>(m)], of.scale);
      } else if (model.act_scheme.codes != DType::none) {
        x = Meaning::of(static_cast<float>(scale * given));  // quantization starts from f32
      } else {
        x = Meaning::of(scale * given);
      }
    }
  const std::vector<double> moved = round_activations(w, a, model, meanings, act_scales);
  std::vector<double> activations, parts;
  for (const Meaning& x : meanings) {
    activations.push_back(x.value);
    parts.push_back(x.parts);
  }
  std::vector<double> rounded;  // by how much rounding moves an activation
  if (w.prescale != nullptr && model.prescaled_type != DType::f32)
    for (const double x : activations) rounded.push_back(rounded_to(model.prescaled_type, x) - x);
  if (model.block_type != DType::f32)
    for (std::size_t i = 0; i < activations.size(); ++i) {
      const double scale = std::abs(act_scales[i / static_cast<std::size_t>(w.k)]);
      const double unit = std::isnormal(scale) ? std::exp2(std::floor(std::log2(scale))) : 1;
      rounded.push_back(unit * rounded_to(model.block_type, activations[i] / unit) - activations[i]);
    }
  std::vector<double> weights(static_cast<std::size_t>(w.k)), apart(static_cast<std::size_t>(w.k));
  std::optional<RowRounding> row_rounding;
  if (model.weight_type != DType::f32) row_rounding.emplace(w, model);
  /// Σ a·w of channel n of all rows of A.
  const auto sums_of = [&](std::int64_t n) {
    std::vector<Bounded> sums;
    for (std::int64_t k = 0; k < w.k; ++k) {
      weights[static_cast<std::size_t>(k)] = weight_value(w, n, k);
      apart[static_cast<std::size_t>(k)] = model.subtracts_zeros ? weight_parts(w, n, k, model.code_offset) : 0.0;
    }
    if (row_rounding) row_rounding->take(n);
    for (std::int64_t m = 0; m < rows; ++m) {
      const double* x = activations.data() + m * w.k;
      double sum = 0, magnitude = 0, error = row_rounding ? row_rounding->error(x) : 0.0;
      if (!rounded.empty()) error += std::abs(std::inner_product(weights.begin(), weights.end(), rounded.begin() + m * w.k, 0.0));
      double part = 0, largest = 0;  // of an FP8 sum; the largest addend of an instruction
      for (std::int64_t k = 0; k < w.k; ++k) {
        const double term = x[k] * weights[static_cast<std::size_t>(k)];
        sum += term;
        const double size = parts[static_cast<std::size_t>(m * w.k + k)];
        magnitude += size * std::abs(weights[static_cast<std::size_t>(k)]);
        if (model.fp8_group >= 0) {
          largest = std::max({largest, std::abs(term), std::abs(part)});
          part += term;
          if ((k + 1) % kFp8Channels == 0 || k + 1 == w.k) {
            error += kFp8Truncation * std::max(largest, std::abs(part));
            largest = 0;
            if (model.fp8_group != 0 && (k + 1) % model.fp8_group == 0) part = 0;
          }
        }
        error += model.part_roundings * kUnit32 * size * apart[static_cast<std::size_t>(k)];
        if (!moved.empty())
          error += moved[static_cast<std::size_t>(m * w.k + k)] * std::abs(weights[static_cast<std::size_t>(k)]);
      }
      if (spec.sum_bias) {
        const double unit =
            act_scales[static_cast<std::size_t>(m)] * element(w.scales, w.scheme.scale, scale_index(w, n, 0)) * w.scale2;
        const double bias = static_cast<const std::int32_t*>(args.sum_bias.data)[n] * unit;
        sum += bias;
        magnitude += std::abs(bias);
      }
      const double bound = model.dot_factor * dot_error(static_cast<double>(w.k)) * magnitude + error;
      const DType type = spec.glu ? spec.factor_type() : DType::f32;
      sums.push_back({sum, type == DType::f32 ? bound : bound + output_rounding(type, std::abs(sum) + bound)});
    }
    return sums;
  };
  const std::int64_t half = spec.glu ? w.n / 2 : 0;
  for (std::int64_t j = 0; j < width; ++j) {
    const std::int64_t n = columns[static_cast<std::size_t>(j)];
    const std::vector<Bounded> sums = sums_of(w.paired ? 2 * n : n);
    std::vector<Bounded> others;
    if (spec.glu) others = sums_of(w.paired ? 2 * n + 1 : half + n);
    for (std::size_t m = 0; m < sums.size(); ++m)
      expected[m * static_cast<std::size_t>(width) + static_cast<std::size_t>(j)] =
          finish(spec, args, static_cast<std::int64_t>(m), n, sums[m], spec.glu ? std::optional(others[m]) : std::nullopt, half);
  }
  return expected;
}

}  // namespace nibble::reference
