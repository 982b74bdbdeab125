#include "core/row_decoder.hpp"

namespace nibble {

RowDecoder::RowDecoder(const QuantTensor& q) : q_(q), group_of_(q.g_idx) {
  if (q.scheme.is_dense()) return;
  for (std::size_t code = 0; code < values_.size(); ++code)
    values_[code] = static_cast<double>(code_value(q.scheme.codes, static_cast<std::uint8_t>(code)));
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) {
    scales_.push_back(static_cast<double>(q.scales.at(i)));
    zeros_.push_back(q.zeros.empty() ? 0.0 : static_cast<double>(q.zeros.at(i)));
  }
  if (!group_of_.empty()) return;
  group_of_.reserve(static_cast<std::size_t>(q.k));
  for (std::int64_t k = 0; k < q.k; ++k) group_of_.push_back(static_cast<std::int32_t>(q.group_of(k)));
}

void RowDecoder::decode(std::int64_t n, float* out) const {
  if (q_.scheme.is_dense()) {
    for (std::int64_t k = 0; k < q_.k; ++k) out[k] = q_.value(n, k);
    return;
  }
  const std::uint8_t* codes = q_.codes.data() + n * q_.k;
  const auto first = static_cast<std::size_t>((q_.scheme.group.n == 0 ? 0 : n / q_.scheme.group.n) * q_.groups());
  const bool offset = q_.scheme.zero == ZeroKind::offset;
  for (std::size_t k = 0; k < group_of_.size(); ++k) {
    const std::size_t at = first + static_cast<std::size_t>(group_of_[k]);
    const double value = values_[codes[k]];
    const double w = offset ? value * scales_[at] + zeros_[at] : (value - zeros_[at]) * scales_[at];
    const float once = static_cast<float>(w);
    out[k] = q_.scale2 ? once * *q_.scale2 : once;
  }
}

}  // namespace nibble
