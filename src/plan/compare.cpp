#include "plan/compare.hpp"

#include <cmath>
#include <limits>

namespace nibble {
namespace {

/// The largest finite value of an output type; beyond it a correct kernel stores infinity.
double largest(DType dtype) { return dtype == DType::f16 ? 65504.0 : 3.3895313892515355e38; }

/// Element i. Integers of 32 bits are more than a float holds.
double value_at(const Tensor& d, std::int64_t i) {
  return d.dtype == DType::s32 ? static_cast<double>(d.as<std::int32_t>()[i]) : static_cast<double>(d.at(i));
}

/// |got − expected| / bound, where NaN and infinity agree only with themselves or with a value that overflows.
double error_ratio(double got, const reference::Expected& e, DType dtype) {
  if (std::isnan(e.value)) return std::isnan(got) ? 0.0 : std::numeric_limits<double>::infinity();
  if (std::isnan(got)) return std::numeric_limits<double>::infinity();
  if (std::isinf(got) || std::isinf(e.value)) {
    const bool overflows = std::isinf(e.value) || std::abs(e.value) + e.bound >= largest(dtype);
    const bool same_sign = std::signbit(got) == std::signbit(e.value);
    return overflows && same_sign ? 0.0 : std::numeric_limits<double>::infinity();
  }
  const double error = std::abs(got - e.value);
  if (error == 0.0) return 0.0;
  return e.bound > 0.0 ? error / e.bound : std::numeric_limits<double>::infinity();
}

}  // namespace

Comparison compare(const Tensor& d, std::span<const std::int64_t> columns, std::span<const reference::Expected> expected) {
  Comparison c;
  const std::int64_t n = d.shape[1];
  const auto width = static_cast<std::int64_t>(columns.size());
  double error_square = 0, value_square = 0;
  for (std::int64_t m = 0; m < d.shape[0]; ++m)
    for (std::int64_t j = 0; j < width; ++j) {
      const std::int64_t column = columns[static_cast<std::size_t>(j)];
      const reference::Expected& e = expected[static_cast<std::size_t>(m * width + j)];
      const double got = value_at(d, m * n + column);
      const double ratio = error_ratio(got, e, d.dtype);
      ++c.checked;
      if (ratio > 1.0) ++c.failures;
      if (ratio > c.worst_ratio || c.checked == 1) {
        c.worst_ratio = ratio;
        c.worst_m = m;
        c.worst_n = column;
        c.worst_got = got;
        c.worst_expected = e;
      }
      if (std::isfinite(got) && std::isfinite(e.value)) {
        error_square += (got - e.value) * (got - e.value);
        value_square += e.value * e.value;
      }
    }
  c.relative_l2 = value_square > 0 ? std::sqrt(error_square / value_square) : std::sqrt(error_square);
  return c;
}

}  // namespace nibble
