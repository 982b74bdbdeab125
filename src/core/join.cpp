#include "nibble/join.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace nibble {
namespace {

template <class T>
void append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

/// Rows of `from` behind those of `to`, which has the same type and as many columns.
void append_rows(Tensor& to, const Tensor& from) {
  if (from.empty()) return;
  append(to.bytes, from.bytes);
  to.shape[0] += from.shape[0];
}

/// The row of parameters of a whole tensor, once for each of n output channels.
void repeat_row(Tensor& t, std::int64_t n) {
  if (t.empty()) return;
  const std::vector<std::byte> row = t.bytes;
  t.bytes.clear();
  for (std::int64_t i = 0; i < n; ++i) append(t.bytes, row);
  t.shape[0] = n;
}

/// The same weight with a scale for each output channel where it had one for all of them.
void scale_channels(QuantTensor& q) {
  if (q.scheme.group.n != 0 || q.scheme.is_dense()) return;
  q.scheme.group.n = 1;
  repeat_row(q.scales, q.n);
  repeat_row(q.zeros, q.n);
}

/// The field in which b differs from a, with the values; empty where they can be joined.
std::string difference(const QuantTensor& a, const QuantTensor& b) {
  if (a.k != b.k) return fmt::format("K is {} and {}", a.k, b.k);
  if (a.scheme.scale != b.scheme.scale) return fmt::format("scales are {} and {}", name(a.scheme.scale), name(b.scheme.scale));
  if (a.scheme != b.scheme) return fmt::format("the scheme is {} and {}", a.scheme.name(), b.scheme.name());
  if (a.zeros.dtype != b.zeros.dtype) return fmt::format("zeros are {} and {}", name(a.zeros.dtype), name(b.zeros.dtype));
  if (a.scale2 != b.scale2) return "scale2 differs; multiply it into scales of f32 first";
  if (a.g_idx != b.g_idx) return "g_idx differs: their activations would be permuted differently";
  if (a.prescale != b.prescale) return "prescale differs: their activations would be multiplied by different factors";
  if (a.static_acts != b.static_acts) return "static_acts differ: their activations would be quantized with different scales";
  if (a.act_limit != b.act_limit) return "act_limit differs";
  return {};
}

/// Zeros of the type for n output channels.
Tensor no_bias(DType type, std::int64_t n) { return Tensor(type, {n}); }

}  // namespace

Result<QuantTensor> join(std::span<const QuantTensor> parts) try {
  if (parts.empty()) return error(StatusCode::invalid_argument, "no weights to join");
  DType bias = DType::none;
  for (const QuantTensor& part : parts) {
    NIBBLE_RETURN_IF_ERROR(part.validate());
    if (part.filter != Extent{})
      return error(StatusCode::invalid_argument, "convolutions are not joined: this weight has a filter of {}x{}", part.filter.h,
                   part.filter.w);
    if (part.bias.empty()) continue;
    if (bias != DType::none && bias != part.bias.dtype)
      return error(StatusCode::invalid_argument, "the bias is {} and {}", name(bias), name(part.bias.dtype));
    bias = part.bias.dtype;
  }
  QuantTensor all = parts.front();
  if (parts.size() > 1) scale_channels(all);
  if (bias != DType::none && all.bias.empty()) all.bias = no_bias(bias, all.n);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    QuantTensor part = parts[i];
    scale_channels(part);
    if (const std::string what = difference(all, part); !what.empty())
      return error(StatusCode::invalid_argument, "weights 0 and {} cannot be joined: {}", i, what);
    if (all.scheme.group.n != 0 && all.n % all.scheme.group.n != 0)
      return error(StatusCode::invalid_argument,
                   "weights cannot be joined: {} rows end inside a block of {}, which shares a scale", all.n, all.scheme.group.n);
    append(all.codes, part.codes);
    append_rows(all.scales, part.scales);
    append_rows(all.zeros, part.zeros);
    if (bias != DType::none) append_rows(all.bias, part.bias.empty() ? no_bias(bias, part.n) : part.bias);
    all.n += part.n;
  }
  NIBBLE_RETURN_IF_ERROR(all.validate());
  return all;
} catch (...) {
  return caught();
}

}  // namespace nibble
