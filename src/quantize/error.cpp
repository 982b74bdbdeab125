// How far a quantized weight is from the original, in double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "core/row_decoder.hpp"
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

}  // namespace

// With a prescale p the layer computes (A·diag(p))·Ŵᵀ, so Ŵ·diag(p) approximates the original weight.
Result<QuantError> quantization_error(const ConstTensorView& w, const QuantTensor& q, Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_float_matrix(w));
  NIBBLE_RETURN_IF_ERROR(q.validate());
  if (w.dim(0) != q.n || w.dim(1) != q.k)
    return error(StatusCode::invalid_argument, "w is [{},{}], the quantized weight is [{},{}]", w.dim(0), w.dim(1), q.n, q.k);

  const RowDecoder decoder(q);
  std::vector<Sums> rows(q.n);
  Executor& threads = executor ? *executor : default_executor();
  constexpr std::int64_t kRowsPerTask = 16;  // to share the buffer of a row
  threads.parallel_for((q.n + kRowsPerTask - 1) / kRowsPerTask, [&](std::int64_t task) {
    std::vector<float> decoded(q.k);
    for (std::int64_t n = task * kRowsPerTask; n < std::min(q.n, (task + 1) * kRowsPerTask); ++n) {
      decoder.decode(n, decoded.data());
      with_row(w, n, [&](const auto* row) {
        for (std::int64_t k = 0; k < q.k; ++k) {
          const double prescale = q.prescale.empty() ? 1.0 : q.prescale.at(k);
          rows[n].add(to_f32(row[k]), decoded[k] * prescale);
        }
        return true;
      });
    }
  });
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
} catch (...) {
  return caught();
}

}  // namespace nibble
