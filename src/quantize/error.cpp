// How far a quantized weight is from the original, in double precision.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "nibble/quantize.hpp"
#include "quantize/float_matrix.hpp"

namespace nibble {
namespace {

struct Sums {
  double ww = 0, qq = 0, wq = 0, dd = 0, max_abs = 0;

  void add(double w, double q) {
    const double d = w - q;
    ww += w * w;
    qq += q * q;
    wq += w * q;
    dd += d * d;
    max_abs = std::max(max_abs, std::abs(d));
  }
  void add(const Sums& other) {
    ww += other.ww;
    qq += other.qq;
    wq += other.wq;
    dd += other.dd;
    max_abs = std::max(max_abs, other.max_abs);
  }
};

/// Everything a row needs, decoded once: QuantTensor::value() asks for each element anew.
struct Decoder {
  explicit Decoder(const QuantTensor& tensor) : q(tensor), group_of(q.k) {
    for (std::size_t code = 0; code < values.size(); ++code)
      values[code] = static_cast<double>(code_value(q.scheme.codes, static_cast<std::uint8_t>(code)));
    for (std::size_t k = 0; k < group_of.size(); ++k)
      group_of[k] = !q.g_idx.empty() ? q.g_idx[k] : q.scheme.group.k == 0 ? 0 : static_cast<std::int32_t>(k) / q.scheme.group.k;
    for (std::int64_t i = 0; i < q.scales.numel(); ++i) scales.push_back(static_cast<double>(q.scales.at(i)));
    std::vector<double>& shifts = q.scheme.zero == ZeroKind::offset ? offsets : zeros;
    for (std::int64_t i = 0; i < q.zeros.numel() && !q.zeros.empty(); ++i) shifts.push_back(static_cast<double>(q.zeros.at(i)));
    zeros.resize(scales.size());
    offsets.resize(scales.size());
    if (q.prescale.empty()) return;
    for (std::int64_t k = 0; k < q.k; ++k) prescale.push_back(static_cast<double>(q.prescale.at(k)));
  }

  template <class T>
  Sums row(std::int64_t n, const T* w) const {
    const std::uint8_t* codes = q.codes.data() + n * q.k;
    const std::int64_t first = (q.scheme.group.n == 0 ? 0 : n / q.scheme.group.n) * q.groups();
    Sums sums;
    for (std::size_t k = 0; k < group_of.size(); ++k) {
      const std::size_t g = first + group_of[k];
      float value = static_cast<float>((values[codes[k]] - zeros[g]) * scales[g] + offsets[g]);
      if (q.scale2) value *= *q.scale2;
      const double effective = static_cast<double>(value) * (prescale.empty() ? 1.0 : prescale[k]);
      sums.add(static_cast<double>(to_f32(w[k])), effective);
    }
    return sums;
  }

  const QuantTensor& q;
  std::array<double, 256> values{};
  std::vector<std::int32_t> group_of;
  std::vector<double> scales, zeros, offsets, prescale;
};

}  // namespace

// With a prescale p the layer computes (A·diag(p))·Ŵᵀ, so it is Ŵ·diag(p) that stands for the original weight.
Result<QuantError> quantization_error(const ConstTensorView& w, const QuantTensor& q, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_float_matrix(w));
  NIBBLE_RETURN_IF_ERROR(q.validate());
  if (w.dim(0) != q.n || w.dim(1) != q.k)
    return error(StatusCode::invalid_argument, "w is [{},{}], the quantized weight is [{},{}]", w.dim(0), w.dim(1), q.n, q.k);

  const Decoder decoder(q);
  std::vector<Sums> rows(q.n);
  Executor& threads = executor ? *executor : default_executor();
  threads.parallel_for(q.n,
                       [&](std::int64_t n) { rows[n] = with_row(w, n, [&](const auto* row) { return decoder.row(n, row); }); });
  Sums total;  // in row order: the same sum for any number of threads
  for (const Sums& row : rows) total.add(row);

  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  QuantError e;
  e.max_abs = total.max_abs;
  if (total.dd == 0) return QuantError{kInfinity, 1, 0, 0};
  e.sqnr_db = 10 * std::log10(total.ww / total.dd);
  e.relative_l2 = std::sqrt(total.dd / total.ww);
  e.cosine = total.ww > 0 && total.qq > 0 ? total.wq / std::sqrt(total.ww * total.qq) : 0;
  return e;
} catch (const std::bad_alloc&) {
  return Status(StatusCode::io_error, "out of memory while measuring a quantization error");
}

}  // namespace nibble
