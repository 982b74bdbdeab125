// Round-to-nearest quantization, with an optional search for the range with the least error.
//
// A group of weights becomes a scale s, a zero z and codes u in [0, top], top = 2^bits − 1, that mean (u − z)·s. Symmetric
// schemes fix z = 2^(bits−1), which their code type uXbB carries; asymmetric ones store it. The same arithmetic serves both, and signed
// codes, which are u and z minus 128. With a float offset o, codes mean u·s + o: z is 0, and o is subtracted from weights first. Float
// codes are e4m3(w / s) with s = max|w| / 448, or e2m1(w / s) with the least power of two s that is not below max|w| / 6 (MXFP4; the largest
// weight becomes 3 to 6). Dense weights are rounded to their type, and have no scale.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <optional>

#include "nibble/device.hpp"
#include "nibble/quantize.hpp"
#include "quantize/act_rule.hpp"
#include "quantize/float_matrix.hpp"

namespace nibble {
namespace {

/// The clipping search tries the ranges 1, 31/32, ..., 9/32 of the full one. The squared error is flat around its minimum, so
/// finer steps gain little. 9/32 is low enough for 2-bit codes, whose best step is near one standard deviation, while the
/// largest of a few thousand Gaussian weights is near four.
constexpr int kClipSteps = 24;
constexpr double kClipStep = 1.0 / 32;

constexpr double kE2m1Max = 6;
constexpr int kE8m0Bias = 127;  // the exponent of code 0 is −127, that of 254 is 127

/// Rows are assigned to threads in blocks, to keep the overhead small for short rows.
constexpr std::int64_t kRowsPerTask = 8;

struct GroupCode {
  float scale = 1;
  float zero = 0;  // an integer
  float offset = 0;
};

struct Range {
  float low = 0, high = 0;
  bool finite = false;
};

/// Integers in the order of the floats: a maximum of integers vectorizes without permission to reorder float operations. An
/// involution, and NaNs lie outside the infinities.
constexpr std::int32_t order_key(std::int32_t float_bits) { return float_bits ^ ((float_bits >> 31) & 0x7fffffff); }

template <class T>
Range find_range(const T* w, std::int64_t count) {
  std::int32_t low = std::numeric_limits<std::int32_t>::max();
  std::int32_t high = std::numeric_limits<std::int32_t>::min();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t key = order_key(std::bit_cast<std::int32_t>(to_f32(w[i])));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  constexpr std::int32_t kInfinity = 0x7f800000;
  return {std::bit_cast<float>(order_key(low)), std::bit_cast<float>(order_key(high)),
          low > order_key(kInfinity | std::numeric_limits<std::int32_t>::min()) && high < kInfinity};
}

/// Adding this leaves a small number, rounded to an integer (ties to even), in the low bits of the sum.
constexpr float kRounder = 0x1.8p23f;

float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

/// `bias` is subtracted from each code.
template <class T>
void encode(const T* w, std::int64_t count, GroupCode g, float top, float bias, std::uint8_t* codes) {
  const float low = -g.zero, high = top - g.zero, rounder = kRounder + (g.zero - bias);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = clamp((to_f32(w[i]) - g.offset) / g.scale, low, high);
    codes[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(x + rounder));
  }
}

template <class T>
void encode_e4m3(const T* w, std::int64_t count, float scale, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) codes[i] = act_rule::to_e4m3(to_f32(w[i]) / scale);
}

/// To nearest, ties to even codes: the codes of 0, ½, 1, 1½, 2, 3, 4 and 6 are 0 to 7, and 8 more of negative numbers.
template <class T>
void encode_e2m1(const T* w, std::int64_t count, float scale, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = to_f32(w[i]) / scale, size = std::fabs(x);
    const int code =
        (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    codes[i] = static_cast<std::uint8_t>(code + (std::signbit(x) ? 8 : 0));
  }
}

/// The least power of two that is not below `exact` > 0, of those that e8m0 has.
float power_of_two(double exact) {
  int exponent = 0;
  const double fraction = std::frexp(exact, &exponent);  // ½ ≤ fraction < 1
  return std::ldexp(1.0f, std::clamp(fraction == 0.5 ? exponent - 1 : exponent, -kE8m0Bias, kE8m0Bias));
}

/// Σ(w − ŵ)² of what encode() would choose. Eight fixed partial sums, so that the order does not depend on the vector width.
template <class T>
double squared_error(const T* w, std::int64_t count, GroupCode g, float top) {
  const float low = -g.zero, high = top - g.zero, rounder = kRounder + g.zero;
  auto square = [&](T element) {
    const float x = to_f32(element);
    const float rounded = (clamp((x - g.offset) / g.scale, low, high) + rounder) - rounder;
    const double d = static_cast<double>(x) - (static_cast<double>(rounded * g.scale) + static_cast<double>(g.offset));
    return d * d;
  };
  std::array<double, 8> sums{};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += square(w[i + lane]);
  for (; i < count; ++i) sums[0] += square(w[i]);
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

/// `exact` > 0 rounded to nearest in `dtype`; infinity beyond the range of that type. Among subnormals, which have few bits, it is rounded
/// up instead: half the range could be clipped otherwise, or all of it when the scale became 0.
float round_scale(double exact, DType dtype) {
  const float x = static_cast<float>(exact);
  auto up_if_low = [exact](auto value, auto& bits, double smallest_normal) {
    if (exact < smallest_normal && to_f32(value) < exact) ++bits;
  };
  if (dtype == DType::f16) {
    f16 h = to_f16(x);
    up_if_low(h, h.bits, 0x1p-14);
    return to_f32(h);
  }
  if (dtype == DType::bf16) {
    bf16 b = to_bf16(x);
    up_if_low(b, b.bits, 0x1p-126);
    return to_f32(b);
  }
  std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  up_if_low(x, bits, 0x1p-126);
  return std::bit_cast<float>(bits);
}

/// x rounded to nearest in `dtype`.
float round_offset(double x, DType dtype) {
  const auto f = static_cast<float>(x);
  return dtype == DType::f16 ? to_f32(to_f16(f)) : dtype == DType::bf16 ? to_f32(to_bf16(f)) : f;
}

/// A part of the matrix that shares a scale: runs of channels, each in a row of its own, or all in one row, at one element of a filter each.
template <class T>
struct Piece {
  const T* first;
  std::int64_t stride, rows, cols;
  std::int64_t n, k;  // its first row and column
  bool all_elements;

  const T* row(std::int64_t i) const { return first + i * stride; }
  /// The row and the first column of run i.
  std::int64_t n_of(std::int64_t i) const { return all_elements ? n : n + i; }
  std::int64_t k_of(std::int64_t i) const { return all_elements ? k + i * stride : k; }
};

Status not_finite(float w, std::int64_t n, std::int64_t k) {
  return error(StatusCode::invalid_argument, "w[{},{}] is {}; only finite weights can be quantized", n, k,
               std::isnan(w) ? "NaN" : "infinite");
}

/// Row n of a dense weight.
template <class To, class From>
Status round_row(std::int64_t n, const From* w, To (*round)(float), QuantTensor& q) {
  auto* const row = reinterpret_cast<To*>(q.codes.data()) + n * q.k;
  for (std::int64_t k = 0; k < q.k; ++k) {
    const float x = to_f32(w[k]);
    if (!std::isfinite(x)) return not_finite(x, n, k);
    row[k] = round(x);
    if (!std::isfinite(to_f32(row[k])))
      return error(StatusCode::invalid_argument, "w[{},{}] = {:g} is beyond the range of {}; use {}", n, k, x,
                   name(q.scheme.codes), q.scheme.codes == DType::f16 ? "bf16 or f32" : "f32");
  }
  return {};
}
template <class From>
Status round_row(std::int64_t n, const From* w, QuantTensor& q) {
  switch (q.scheme.codes) {
    case DType::f16: return round_row<f16>(n, w, to_f16, q);
    case DType::bf16: return round_row<bf16>(n, w, to_bf16, q);
    default: return round_row<float>(n, w, to_f32, q);
  }
}

class Quantizer {
 public:
  Quantizer(const QuantizeSpec& spec, QuantTensor& q)
      : spec_(spec),
        q_(q),
        is_float_(spec.scheme.codes == DType::e4m3 || spec.scheme.codes == DType::e2m1),
        bias_(spec.scheme.codes == DType::s8 ? 128.0f : 0.0f),
        top_(std::ldexp(1.0f, bits(q.scheme.codes)) - 1),
        middle_(std::ldexp(1.0f, bits(q.scheme.codes) - 1)) {}

  /// Quantizes the `rows` rows from row n, which starts at w, with one row of scales.
  template <class T>
  Status band(std::int64_t n, std::int64_t rows, const T* w, std::int64_t stride) const {
    const std::int64_t groups = q_.groups(), size = q_.scheme.group.k == 0 ? q_.k : q_.scheme.group.k;
    const bool all_elements = q_.scheme.group.all_elements;
    if (all_elements) {
      rows = q_.filter.h * q_.filter.w;
      stride = q_.k / rows;
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      const Piece<T> piece{w + g * size, stride, rows, std::min(size, q_.k - g * size), n, g * size, all_elements};
      Range range = find_range(piece.first, piece.cols);
      for (std::int64_t i = 1; i < rows; ++i) {
        const Range other = find_range(piece.row(i), piece.cols);
        range = {std::min(range.low, other.low), std::max(range.high, other.high), range.finite && other.finite};
      }
      if (!range.finite) return first_not_finite(piece);
      const std::optional<GroupCode> code = choose(piece, range);
      if (!code) return too_large(piece, range);
      for (std::int64_t i = 0; i < rows; ++i) {
        std::uint8_t* codes = q_.codes.data() + piece.n_of(i) * q_.k + piece.k_of(i);
        if (q_.scheme.codes == DType::e2m1)
          encode_e2m1(piece.row(i), piece.cols, code->scale, codes);
        else if (is_float_)
          encode_e4m3(piece.row(i), piece.cols, code->scale, codes);
        else
          encode(piece.row(i), piece.cols, *code, top_, bias_, codes);
      }
      const std::int64_t at = (q_.scheme.group.n == 0 ? 0 : n / q_.scheme.group.n) * groups + g;
      if (q_.scheme.scale == DType::e8m0)
        q_.scales.bytes[static_cast<std::size_t>(at)] = static_cast<std::byte>(std::ilogb(code->scale) + kE8m0Bias);
      else
        q_.scales.set(at, code->scale);
      if (!q_.zeros.empty()) q_.zeros.set(at, has_offset() ? code->offset : code->zero - bias_);
    }
    return {};
  }

 private:
  /// Scale and offset for the part `shrink` of the group's range, around its middle. Nothing when they would overflow.
  std::optional<GroupCode> offset_code_for(Range range, double shrink) const {
    const double middle = 0.5 * (static_cast<double>(range.low) + static_cast<double>(range.high));
    const double low = middle + (static_cast<double>(range.low) - middle) * shrink, high = 2 * middle - low;
    GroupCode code;
    code.offset = round_offset(low, spec_.scheme.scale);
    if (const double exact = (high - static_cast<double>(code.offset)) / top_; exact > 0)
      code.scale = round_scale(exact, spec_.scheme.scale);
    const double largest = top_ * static_cast<double>(code.scale) + std::abs(static_cast<double>(code.offset));
    if (!(largest <= std::numeric_limits<float>::max())) return std::nullopt;
    return code;
  }

  /// Scale and zero for the part `shrink` of the group's range, which always includes 0. Nothing when they would overflow.
  ///
  /// Symmetric: s = max|w| / (2^(bits−1) − ½), as compressed-tensors has it. The codes reach from −2^(bits−1) to 2^(bits−1) − 1;
  /// with the step that puts max|w| half a step beyond the short side, no weight is off by more than s/2, and the step is
  /// smaller than if the short side had to reach max|w|.
  std::optional<GroupCode> code_for(Range range, double shrink) const {
    if (has_offset()) return offset_code_for(range, shrink);
    const double low = std::min(0.0, static_cast<double>(range.low)) * shrink;
    const double high = std::max(0.0, static_cast<double>(range.high)) * shrink;
    const double reach = !is_float_ ? 0.5 * top_ : q_.scheme.codes == DType::e2m1 ? kE2m1Max : act_rule::kE4m3Max;
    const double exact = symmetric() ? std::max(-low, high) / reach : (high - low) / top_;
    GroupCode code;
    if (exact > 0)  // a group of zeros keeps 1: any scale is right
      code.scale = spec_.scheme.scale == DType::e8m0 ? power_of_two(exact) : round_scale(exact, spec_.scheme.scale);
    code.zero = symmetric() ? middle_ : clamp(static_cast<float>(std::nearbyint(-low / code.scale)), 0, top_);
    const double largest = (is_float_ ? reach : std::max(code.zero, top_ - code.zero)) * static_cast<double>(code.scale);
    if (!(largest <= std::numeric_limits<float>::max())) return std::nullopt;
    return code;
  }

  template <class T>
  std::optional<GroupCode> choose(const Piece<T>& piece, Range range) const {
    const auto error_of = [&](GroupCode code) {
      double sum = 0;
      for (std::int64_t i = 0; i < piece.rows; ++i) sum += squared_error(piece.row(i), piece.cols, code, top_);
      return sum;
    };
    std::optional<GroupCode> best = code_for(range, 1);
    if (!best || !spec_.clip_search) return best;
    double least = error_of(*best);
    for (int step = 1; step < kClipSteps && least > 0; ++step) {
      const std::optional<GroupCode> candidate = code_for(range, 1 - step * kClipStep);
      if (!candidate) continue;
      const double sum = error_of(*candidate);
      if (sum < least) {
        least = sum;
        best = candidate;
      }
    }
    return best;
  }

  template <class T>
  static Status first_not_finite(const Piece<T>& piece) {
    std::int64_t i = 0;
    const auto finite = [](T w) { return std::isfinite(to_f32(w)); };
    while (std::all_of(piece.row(i), piece.row(i) + piece.cols, finite)) ++i;
    const T* at = std::find_if_not(piece.row(i), piece.row(i) + piece.cols, finite);
    return not_finite(to_f32(*at), piece.n_of(i), piece.k_of(i) + (at - piece.row(i)));
  }

  template <class T>
  Status too_large(const Piece<T>& piece, Range range) const {
    return error(StatusCode::invalid_argument,
                 "w[{}{},{}..{}] reaches from {:g} to {:g}, too much for {} codes with a scale of type {}; {}", piece.n,
                 piece.rows == 1 || piece.all_elements ? "" : fmt::format("..{}", piece.n + piece.rows - 1), piece.k,
                 piece.k_of(piece.rows - 1) + piece.cols - 1, range.low, range.high, name(q_.scheme.codes),
                 name(spec_.scheme.scale),
                 spec_.scheme.scale == DType::f16 ? "use bf16 or f32 scales" : "scale the weights down");
  }

  bool symmetric() const { return spec_.scheme.zero == ZeroKind::none; }
  bool has_offset() const { return spec_.scheme.zero == ZeroKind::offset; }

  const QuantizeSpec& spec_;
  QuantTensor& q_;
  const bool is_float_;
  const float bias_, top_, middle_;
};

Status check(const ConstTensorView& w, const QuantizeSpec& spec, const Extent& filter) {
  NIBBLE_RETURN_IF_ERROR(check_float_matrix(w));
  const WeightScheme& scheme = spec.scheme;
  if (scheme.is_dense() && scheme != WeightScheme::dense(scheme.codes))
    return error(StatusCode::invalid_argument, "a dense weight of {} has no scales, zero points or groups; use the scheme '{}'",
                 name(scheme.codes), name(scheme.codes));
  if (scheme.is_dense() && spec.clip_search)
    return error(StatusCode::invalid_argument, "a clipping search is for integers: {} has no range to choose", scheme.name());
  if (scheme.is_dense()) return {};
  const bool symmetric = scheme.zero == ZeroKind::none, e2m1 = scheme.codes == DType::e2m1,
             is_float = scheme.codes == DType::e4m3 || e2m1, s8 = scheme.codes == DType::s8;
  const DTypeKind kind = info(scheme.codes).kind;
  const bool few_bits =
      bits(scheme.codes) >= 2 && bits(scheme.codes) <= 8 && kind == (symmetric ? DTypeKind::biased : DTypeKind::uint);
  if (is_float && !symmetric)
    return error(StatusCode::invalid_argument, "{} codes have no zero points, {} has", name(scheme.codes), scheme.name());
  if (e2m1 != (scheme.scale == DType::e8m0))
    return error(StatusCode::unsupported,
                 "quantizing to {} with scales of {}: codes of e2m1 and scales of e8m0 go together, as MXFP4 has them",
                 scheme.name(), name(scheme.scale));
  const bool offset = scheme.zero == ZeroKind::offset;
  if ((!is_float && !s8 && !few_bits) || scheme.zero == ZeroKind::real || (offset && s8))
    return error(
        StatusCode::unsupported,
        "quantizing to {}: codes are uXbB, uX with integer zero points (uXz...) or float offsets (uXo...), s8, e4m3, e2m1, "
        "f32, f16 or bf16",
        scheme.name());
  if (is_float && spec.clip_search)
    return error(StatusCode::invalid_argument,
                 "a clipping search is for integers: how precise {} is does not depend on the range", name(scheme.codes));
  if (!e2m1 && !is_compute_float(scheme.scale))
    return error(StatusCode::invalid_argument, "scales of type {} cannot be chosen; use f16, bf16 or f32", name(scheme.scale));
  const GroupShape shape = scheme.group;
  if (shape.n < 0 || shape.k < 0 || (shape.n == 0 && shape.k != 0))
    return error(StatusCode::invalid_argument,
                 "a scale cannot be shared by {}×{} weights; use a tensor, a channel, a group or a block", shape.n, shape.k);
  const std::int64_t elements = shape.all_elements ? filter.h * filter.w : 1, channels = w.dim(1) / elements;
  if (elements > 1 && channels % shape.k != 0)
    return error(StatusCode::invalid_argument,
                 "{} channels of the images are not a multiple of the group size {}; choose a divisor of them, or one scale per "
                 "channel",
                 channels, shape.k);
  if (shape.n == 1 && shape.k > 0 && w.dim(1) % shape.k != 0)
    return error(StatusCode::invalid_argument,
                 "K={} is not a multiple of the group size {}; choose a divisor of K, or one scale per channel", w.dim(1),
                 shape.k);
  return {};
}

}  // namespace

Result<QuantTensor> quantize_rows(const ConstTensorView& w, const QuantizeSpec& spec, const Extent& filter,
                                  Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  NIBBLE_RETURN_IF_ERROR(check(w, spec, filter));
  QuantTensor q;
  q.filter = filter;
  q.scheme = spec.scheme;
  q.n = w.dim(0);
  q.k = w.dim(1);
  q.codes.resize(q.n * q.k * code_bytes(q.scheme.codes));
  const bool dense = q.scheme.is_dense();
  const std::int64_t bands = dense ? q.n : q.scheme.group.rows(q.n), height = dense                   ? 1
                                                                              : q.scheme.group.n == 0 ? q.n
                                                                                                      : q.scheme.group.n;
  if (!dense) q.scales = Tensor(q.scheme.scale, {bands, q.groups()});
  if (q.scheme.zero == ZeroKind::offset)
    q.zeros = Tensor(q.scheme.scale, {bands, q.groups()});
  else if (q.scheme.zero != ZeroKind::none)
    q.zeros = Tensor(q.scheme.codes == DType::s8 ? DType::s8 : DType::u8, {bands, q.groups()});

  // Of several bands that fail, the first one is reported, whichever thread met its own first.
  std::mutex mutex;
  std::int64_t failed = bands;
  Status failure;
  const Quantizer quantizer(spec, q);
  Executor& threads = executor ? *executor : default_executor();
  const std::int64_t per_task = std::max<std::int64_t>(1, kRowsPerTask / height);
  threads.parallel_for((bands + per_task - 1) / per_task, [&](std::int64_t task) {
    const std::int64_t end = std::min(bands, (task + 1) * per_task);
    for (std::int64_t band = task * per_task; band < end; ++band) {
      const std::int64_t n = band * height, rows = std::min(height, q.n - n);
      Status status = with_row(
          w, n, [&](const auto* first) { return dense ? round_row(n, first, q) : quantizer.band(n, rows, first, w.stride(0)); });
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (band < failed) {
        failed = band;
        failure = std::move(status);
      }
    }
  });
  if (!failure.ok()) return failure;
  return q;
} catch (...) {
  return caught();
}

Result<QuantTensor> quantize(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor) {
  return quantize_rows(w, spec, {}, executor);
}

namespace {

/// Of weights alone.
Result<QuantizeSpec> spec_of(std::string_view scheme) {
  NIBBLE_ASSIGN_OR_RETURN(const Scheme parsed, Scheme::parse(scheme));
  if (parsed.act.codes == DType::none) return QuantizeSpec{parsed.weight};
  return error(StatusCode::invalid_argument, "'{}' says how activations are quantized too; a weight is {}", scheme,
               parsed.weight.name());
}

}  // namespace

Result<QuantTensor> quantize(const ConstTensorView& w, std::string_view scheme, Executor* executor) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeSpec spec, spec_of(scheme));
  return quantize(w, spec, executor);
}

Result<QuantTensor> quantize_conv(const ConstTensorView& w, std::string_view scheme, Executor* executor) {
  NIBBLE_ASSIGN_OR_RETURN(const QuantizeSpec spec, spec_of(scheme));
  return quantize_conv(w, spec, executor);
}

}  // namespace nibble
