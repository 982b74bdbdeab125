// Round-to-nearest quantization, with an optional search for the range that loses least.
//
// A group of weights becomes a scale s, a zero z and codes u in [0, top], top = 2^bits − 1, that mean (u − z)·s. Symmetric
// schemes fix z = 2^(bits−1), which their code type uXbB carries; asymmetric ones store it. The same arithmetic serves both.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <optional>

#include "nibble/quantize.hpp"
#include "quantize/float_matrix.hpp"

namespace nibble {
namespace {

/// The clipping search tries the ranges 1, 31/32, ..., 9/32 of the full one. The squared error is flat around its minimum, so
/// finer steps gain little. 9/32 is low enough for 2-bit codes, whose best step is near one standard deviation, while the
/// largest of a few thousand Gaussian weights is near four.
constexpr int kClipSteps = 24;
constexpr double kClipStep = 1.0 / 32;

/// Rows are handed to threads in blocks, to keep the cost of handing out small for short rows.
constexpr std::int64_t kRowsPerTask = 8;

struct GroupCode {
  float scale = 1;
  float zero = 0;  // an integer
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

template <class T>
void encode(const T* w, std::int64_t count, GroupCode g, float top, std::uint8_t* codes) {
  const float low = -g.zero, high = top - g.zero, rounder = kRounder + g.zero;
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = clamp(to_f32(w[i]) / g.scale, low, high);
    codes[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(x + rounder));
  }
}

/// Σ(w − ŵ)² of what encode() would choose. Eight fixed partial sums, so that the order does not depend on the vector width.
template <class T>
double squared_error(const T* w, std::int64_t count, GroupCode g, float top) {
  const float low = -g.zero, high = top - g.zero, rounder = kRounder + g.zero;
  auto square = [&](T element) {
    const float x = to_f32(element);
    const float rounded = (clamp(x / g.scale, low, high) + rounder) - rounder;
    const double d = static_cast<double>(x) - static_cast<double>(rounded * g.scale);
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

/// `exact` > 0 rounded to nearest in `dtype`; infinity when that type ends before. Among subnormals, which have few bits, it
/// is rounded up instead: half the range could be clipped otherwise, or all of it when the scale became 0.
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

class Quantizer {
 public:
  Quantizer(const QuantizeSpec& spec, QuantTensor& q)
      : spec_(spec), q_(q), top_(static_cast<float>((1 << spec.bits) - 1)), middle_(static_cast<float>(1 << (spec.bits - 1))) {}

  /// Quantizes row n, which starts at w.
  template <class T>
  Status row(std::int64_t n, const T* w) const {
    const std::int64_t groups = q_.groups(), size = q_.k / groups;
    for (std::int64_t g = 0; g < groups; ++g) {
      const T* first = w + g * size;
      const Range range = find_range(first, size);
      if (!range.finite) return not_finite(n, w);
      const std::optional<GroupCode> code = choose(first, size, range);
      if (!code) return too_large(n, g * size, size, range);
      encode(first, size, *code, top_, q_.codes.data() + n * q_.k + g * size);
      q_.scales.set(n * groups + g, code->scale);
      if (!spec_.symmetric) q_.zeros.set(n * groups + g, code->zero);
    }
    return {};
  }

 private:
  /// Scale and zero for the part `shrink` of the group's range, which always includes 0. Nothing when they would overflow.
  ///
  /// Symmetric: s = max|w| / (2^(bits−1) − ½), as compressed-tensors has it. The codes reach from −2^(bits−1) to 2^(bits−1) − 1;
  /// with the step that puts max|w| half a step beyond the short side, no weight is off by more than s/2, and the step is
  /// smaller than if the short side had to reach max|w|.
  std::optional<GroupCode> code_for(Range range, double shrink) const {
    const double low = std::min(0.0, static_cast<double>(range.low)) * shrink;
    const double high = std::max(0.0, static_cast<double>(range.high)) * shrink;
    const double exact = spec_.symmetric ? std::max(-low, high) / (0.5 * top_) : (high - low) / top_;
    GroupCode code;
    if (exact > 0) code.scale = round_scale(exact, spec_.scale);  // a group of zeros keeps 1: any scale is right
    code.zero = spec_.symmetric ? middle_ : clamp(static_cast<float>(std::nearbyint(-low / code.scale)), 0, top_);
    const double largest = static_cast<double>(std::max(code.zero, top_ - code.zero)) * code.scale;
    if (!(largest <= std::numeric_limits<float>::max())) return std::nullopt;
    return code;
  }

  template <class T>
  std::optional<GroupCode> choose(const T* w, std::int64_t count, Range range) const {
    std::optional<GroupCode> best = code_for(range, 1);
    if (!best || !spec_.clip_search) return best;
    double least = squared_error(w, count, *best, top_);
    for (int step = 1; step < kClipSteps && least > 0; ++step) {
      const std::optional<GroupCode> candidate = code_for(range, 1 - step * kClipStep);
      if (!candidate) continue;
      const double sum = squared_error(w, count, *candidate, top_);
      if (sum < least) {
        least = sum;
        best = candidate;
      }
    }
    return best;
  }

  template <class T>
  Status not_finite(std::int64_t n, const T* row) const {
    std::int64_t k = 0;
    while (std::isfinite(to_f32(row[k]))) ++k;
    return error(StatusCode::invalid_argument, "w[{},{}] is {}; only finite weights can be quantized", n, k,
                 std::isnan(to_f32(row[k])) ? "NaN" : "infinite");
  }

  Status too_large(std::int64_t n, std::int64_t k, std::int64_t size, Range range) const {
    return error(StatusCode::invalid_argument,
                 "w[{},{}..{}] reaches from {:g} to {:g}, too much for {} codes with a scale of type {}; {}", n, k, k + size - 1,
                 range.low, range.high, name(q_.scheme.codes), name(spec_.scale),
                 spec_.scale == DType::f16 ? "use bf16 or f32 scales" : "scale the weights down");
  }

  const QuantizeSpec& spec_;
  QuantTensor& q_;
  const float top_, middle_;
};

Status check(const ConstTensorView& w, const QuantizeSpec& spec) {
  NIBBLE_RETURN_IF_ERROR(check_float_matrix(w));
  if (spec.bits < 2 || spec.bits > 8) return error(StatusCode::invalid_argument, "bits={} is outside 2…8", spec.bits);
  if (!is_compute_float(spec.scale))
    return error(StatusCode::invalid_argument, "scales of type {} cannot be chosen; use f16, bf16 or f32", name(spec.scale));
  if (spec.group_size < 0)
    return error(StatusCode::invalid_argument, "group_size={} is negative; 0 means one group per channel", spec.group_size);
  if (spec.group_size > 0 && w.dim(1) % spec.group_size != 0)
    return error(StatusCode::invalid_argument,
                 "K={} is not a multiple of group_size={}; choose a divisor of K, or 0 for one group per channel", w.dim(1),
                 spec.group_size);
  return {};
}

DType code_type(const QuantizeSpec& spec) {
  using enum DType;
  constexpr std::array kSymmetric = {u2b2, u3b4, u4b8, u5b16, u6b32, u7b64, u8b128};
  constexpr std::array kAsymmetric = {u2, u3, u4, u5, u6, u7, u8};
  return (spec.symmetric ? kSymmetric : kAsymmetric)[spec.bits - 2];
}

}  // namespace

Result<QuantTensor> quantize(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check(w, spec));
  QuantTensor q;
  q.scheme.codes = code_type(spec);
  q.scheme.zero = spec.symmetric ? ZeroKind::none : ZeroKind::integer;
  q.scheme.group = spec.group_size == 0 ? GroupShape::channel() : GroupShape::group(spec.group_size);
  q.scheme.scale = spec.scale;
  q.n = w.dim(0);
  q.k = w.dim(1);
  q.codes.resize(q.n * q.k);
  q.scales = Tensor(spec.scale, {q.n, q.groups()});
  if (!spec.symmetric) q.zeros = Tensor(DType::u8, {q.n, q.groups()});

  // Of several rows that fail, the first one is reported, whichever thread met its own first.
  std::mutex mutex;
  std::int64_t failed_row = q.n;
  Status failure;
  const Quantizer quantizer(spec, q);
  Executor& threads = executor ? *executor : default_executor();
  threads.parallel_for((q.n + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task) {
    const std::int64_t end = std::min(q.n, (task + 1) * kRowsPerTask);
    for (std::int64_t n = task * kRowsPerTask; n < end; ++n) {
      Status status = with_row(w, n, [&](const auto* row) { return quantizer.row(n, row); });
      if (status.ok()) continue;
      const std::lock_guard lock(mutex);
      if (n < failed_row) {
        failed_row = n;
        failure = std::move(status);
      }
    }
  });
  if (!failure.ok()) return failure;
  return q;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::io_error, "out of memory while quantizing");
}

}  // namespace nibble
