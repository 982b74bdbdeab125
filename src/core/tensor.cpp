#include "nibble/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/buffer.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"
#include "core/weight_check.hpp"

namespace nibble {
namespace {

template <class T, class Byte>
T load(const std::vector<Byte>& bytes, std::int64_t i) {
  T value;
  std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return value;
}
template <class T>
T load(const Tensor& t, std::int64_t i) {
  return load<T>(t.bytes, i);
}

template <class T>
T saturate(float value) {
  const float rounded = std::nearbyint(value);
  return static_cast<T>(
      std::clamp(rounded, static_cast<float>(std::numeric_limits<T>::min()), static_cast<float>(std::numeric_limits<T>::max())));
}

template <class... Args>
Status bad(fmt::string_view format, const Args&... args) {
  return {StatusCode::invalid_argument, fmt::vformat(format, fmt::make_format_args(args...))};
}

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ",")); }

Status expect_shape(std::string_view what, const Tensor& t, std::span<const std::int64_t> expected) {
  if (!std::ranges::equal(t.shape, expected))
    return error(StatusCode::invalid_argument, "{} has shape {}, expected {}", what, shape_text(t.shape), shape_text(expected));
  if (t.bytes.size() != storage_bytes(t.dtype, static_cast<std::uint64_t>(t.numel())))
    return error(StatusCode::invalid_argument, "{} holds {} bytes, its shape {} of {} needs {}", what, t.bytes.size(),
                 shape_text(t.shape), name(t.dtype), storage_bytes(t.dtype, static_cast<std::uint64_t>(t.numel())));
  return {};
}

}  // namespace

Result<std::vector<std::uint8_t>> unpack_nibbles(std::span<const std::uint8_t> bytes, std::int64_t n, std::int64_t k,
                                                 NibbleOrder order) try {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"N", n}, {"K", k}}));
  const std::int64_t row_bytes = (k + 1) / 2;
  if (bytes.size() != static_cast<std::size_t>(n * row_bytes))
    return error(StatusCode::invalid_argument, "{} bytes for the codes of W[{},{}], two to a byte: that takes {}", bytes.size(),
                 n, k, n * row_bytes);
  std::vector<std::uint8_t> codes;
  codes.reserve(static_cast<std::size_t>(n * k));
  const int first = order == NibbleOrder::low_first ? 0 : 4;
  for (std::int64_t row = 0; row < n; ++row)
    for (std::int64_t i = 0; i < k; ++i)
      codes.push_back(bytes[static_cast<std::size_t>(row * row_bytes + i / 2)] >> (i % 2 == 0 ? first : 4 - first) & 15);
  return codes;
} catch (...) {
  return caught();
}

Tensor::Tensor(DType t, std::vector<std::int64_t> dims) : dtype(t), shape(std::move(dims)) {
  bytes = zero_bytes<std::byte>(storage_bytes(dtype, static_cast<std::uint64_t>(numel())));
}

std::int64_t Tensor::numel() const {
  std::int64_t product = 1;
  for (std::int64_t dim : shape) product *= dim;
  return product;
}

float Tensor::at(std::int64_t i) const {
  switch (dtype) {
    case DType::f32: return load<float>(*this, i);
    case DType::f16: return to_f32(load<f16>(*this, i));
    case DType::bf16: return to_f32(load<bf16>(*this, i));
    case DType::f64: return static_cast<float>(load<double>(*this, i));
    case DType::s16: return static_cast<float>(load<std::int16_t>(*this, i));
    case DType::s32: return static_cast<float>(load<std::int32_t>(*this, i));
    case DType::s64: return static_cast<float>(load<std::int64_t>(*this, i));
    case DType::u16: return static_cast<float>(load<std::uint16_t>(*this, i));
    default: return code_value(dtype, load<std::uint8_t>(*this, i));
  }
}

void Tensor::set(std::int64_t i, float value) {
  std::byte* p = bytes.data() + static_cast<std::size_t>(i) * static_cast<std::size_t>(bits(dtype) / 8);
  switch (dtype) {
    case DType::f32: std::memcpy(p, &value, 4); break;
    case DType::f16: {
      const f16 v = to_f16(value);
      std::memcpy(p, &v, 2);
      break;
    }
    case DType::bf16: {
      const bf16 v = to_bf16(value);
      std::memcpy(p, &v, 2);
      break;
    }
    case DType::u8: *p = static_cast<std::byte>(saturate<std::uint8_t>(value)); break;
    case DType::s8: *p = static_cast<std::byte>(saturate<std::int8_t>(value)); break;
    default: assert(false && "Tensor::set: dtype not settable");
  }
}

Status check_weight(const WeightFacts& weight) {
  const auto& [scheme, n, k, zero_type, filter, act_order, static_acts, act_limit] = weight;
  if (n < 1 || k < 1) return bad("W[N,K] = [{},{}] is empty; both must be at least 1", n, k);
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"N", n}, {"K", k}}));
  NIBBLE_RETURN_IF_ERROR(check_elements("W", {n, k}));
  if (!scheme.is_dense() && (bits(scheme.codes) == 0 || bits(scheme.codes) > 8))
    return bad("codes of type {} have no 8-bit form", name(scheme.codes));
  if (filter.h < 1 || filter.w < 1 || k % filter.h != 0 || k / filter.h % filter.w != 0)
    return bad("K={} is not a multiple of the {}x{} elements of the convolution's filter", k, filter.h, filter.w);
  if (scheme.group.n < 0 || scheme.group.k < 0) return bad("group shape {}x{} is negative", scheme.group.n, scheme.group.k);
  if (const GroupShape& group = scheme.group; group.all_elements) {
    const std::int64_t channels = k / (filter.h * filter.w);
    if (group.n != 1 || group.k == 0 || channels % group.k != 0)
      return bad("{} groups {} channels of the images, which have {} at each of the {}x{} elements of the filter: no multiple",
                 scheme.name(), group.k, channels, filter.h, filter.w);
    if (act_order) return bad("g_idx cannot be combined with {}, whose groups all elements of the filter share", scheme.name());
  }
  if (scheme.is_dense() && scheme != WeightScheme::dense(scheme.codes))
    return bad("a dense weight of {} has no scales, zero points or groups; use the scheme '{}'", name(scheme.codes),
               name(scheme.codes));
  if (!scheme.is_dense() && (info(scheme.scale).kind != DTypeKind::floating || bits(scheme.scale) < 8))
    return bad("scales of type {} are not supported; use f32, f16, bf16, e4m3 or e8m0", name(scheme.scale));
  if (scheme.zero == ZeroKind::none) {
    if (zero_type != DType::none) return bad("scheme {} has no zero points but zeros are given", scheme.name());
  } else {
    const bool integer = scheme.zero == ZeroKind::integer;
    if (integer ? zero_type != DType::u8 && zero_type != DType::s8 : !is_compute_float(zero_type))
      return bad("zeros are {}, scheme {} needs {}", name(zero_type), scheme.name(), integer ? "u8 or s8" : "f32, f16 or bf16");
  }
  if (act_order && (scheme.group.n != 1 || scheme.group.k == 0))
    return bad("g_idx needs a scheme with groups along K, not {}", scheme.name());
  if (static_acts && !(static_acts->scale > 0.0f && std::isfinite(static_acts->scale)))
    return bad("the activations' scale {} must be positive and finite", static_acts->scale);
  if (static_acts && (static_acts->zero < -128 || static_acts->zero > 127))
    return bad("the activations' zero point {} is outside [-128, 127]", static_acts->zero);
  if (act_limit && !(*act_limit > 0.0f)) return bad("the activations' limit {} must be positive", *act_limit);
  return {};
}

Status check_but_codes(const QuantTensor& q) {
  const auto& [scheme, n, k, codes, scales, zeros, scale2, g_idx, prescale, bias, filter, static_acts, act_limit] = q;
  NIBBLE_RETURN_IF_ERROR(check_weight({scheme, n, k, zeros.dtype, filter, !g_idx.empty(), static_acts, act_limit}));
  const std::int64_t groups = q.groups();
  if (scales.dtype != scheme.scale) return bad("scales are {}, the scheme says {}", name(scales.dtype), name(scheme.scale));
  if (scheme.is_dense() && scale2) return bad("a dense weight has no scale2, this one is {}", *scale2);
  const std::int64_t expected[] = {scheme.group.rows(n), groups};
  if (!scheme.is_dense()) NIBBLE_RETURN_IF_ERROR(expect_shape("scales", scales, expected));
  if (scheme.zero != ZeroKind::none) NIBBLE_RETURN_IF_ERROR(expect_shape("zeros", zeros, expected));
  if (!g_idx.empty()) {
    if (g_idx.size() != static_cast<std::size_t>(k)) return bad("g_idx has {} entries, K is {}", g_idx.size(), k);
    std::vector<std::int32_t> used(static_cast<std::size_t>(groups), 0);
    for (std::size_t i = 0; i < g_idx.size(); ++i) {
      if (g_idx[i] < 0 || g_idx[i] >= groups) return bad("g_idx[{}] = {} is outside [0,{})", i, g_idx[i], groups);
      ++used[static_cast<std::size_t>(g_idx[i])];
    }
    for (std::size_t g = 0; g < used.size(); ++g) {
      const std::int64_t size = std::min<std::int64_t>(scheme.group.k, k - static_cast<std::int64_t>(g) * scheme.group.k);
      if (used[g] != size) return bad("g_idx puts {} input channels into group {}, which holds {}", used[g], g, size);
    }
  }
  if (!prescale.empty()) {
    const std::int64_t dims[] = {k};
    if (!is_compute_float(prescale.dtype)) return bad("prescale is {}, expected f32, f16 or bf16", name(prescale.dtype));
    NIBBLE_RETURN_IF_ERROR(expect_shape("prescale", prescale, dims));
    const std::int64_t channels = k / (filter.h * filter.w);
    const auto size = static_cast<std::size_t>(bits(prescale.dtype) / 8);
    const std::byte* const first = prescale.bytes.data();
    for (std::int64_t i = channels; i < k; ++i)
      if (std::memcmp(first + static_cast<std::size_t>(i) * size, first + static_cast<std::size_t>(i % channels) * size, size) !=
          0)
        return bad(
            "prescale is {} for channel {} under the first element of the filter and {} under element {}: a channel has one "
            "factor",
            prescale.at(i % channels), i % channels, prescale.at(i), i / channels);
  }
  if (!bias.empty()) {
    const std::int64_t dims[] = {n};
    if (!is_compute_float(bias.dtype)) return bad("bias is {}, expected f32, f16 or bf16", name(bias.dtype));
    NIBBLE_RETURN_IF_ERROR(expect_shape("bias", bias, dims));
  }
  return {};
}

Status QuantTensor::validate() const {
  NIBBLE_RETURN_IF_ERROR(check_but_codes(*this));
  if (const std::int64_t needed = n * k * code_bytes(scheme.codes); codes.size() != static_cast<std::size_t>(needed))
    return bad("codes holds {} bytes, W[{},{}] needs {}", codes.size(), n, k, needed);
  const int width = std::min(bits(scheme.codes), 8);
  std::uint8_t all = 0;  // the OR of all codes: a search for the first bad one would be slower than memory
  for (const std::uint8_t code : codes) all |= code;
  if (all >> width != 0) {
    const auto it = std::ranges::find_if(codes, [width](std::uint8_t c) { return (c >> width) != 0; });
    if (it != codes.end()) {
      const std::int64_t at = it - codes.begin();
      return bad("code {} at [{},{}] does not fit in {} bits", static_cast<int>(*it), at / k, at % k, width);
    }
  }
  return {};
}

float QuantTensor::value(std::int64_t row, std::int64_t col) const {
  switch (scheme.codes) {
    case DType::f32: return load<float>(codes, row * k + col);
    case DType::f16: return to_f32(load<f16>(codes, row * k + col));
    case DType::bf16: return to_f32(load<bf16>(codes, row * k + col));
    default: break;
  }
  const std::int64_t at = (scheme.group.n == 0 ? 0 : row / scheme.group.n) * groups() + group_of(col);
  const double q = code_value(scheme.codes, codes[static_cast<std::size_t>(row * k + col)]);
  const double s = scales.at(at);
  double w = q * s;
  if (scheme.zero == ZeroKind::integer || scheme.zero == ZeroKind::real) w = (q - static_cast<double>(zeros.at(at))) * s;
  if (scheme.zero == ZeroKind::offset) w += static_cast<double>(zeros.at(at));
  const float once = static_cast<float>(w);
  return scale2 ? once * *scale2 : once;
}

double QuantTensor::bits_per_weight() const {
  const double code_bits = static_cast<double>(n) * static_cast<double>(k) * bits(scheme.codes);
  double zero_bits = 8.0 * static_cast<double>(zeros.bytes.size());
  if (scheme.zero == ZeroKind::integer) zero_bits *= bits(scheme.codes) / 8.0;
  const double other =
      8.0 * static_cast<double>(scales.bytes.size() + prescale.bytes.size() + bias.bytes.size() + 4 * g_idx.size());
  return (code_bits + zero_bits + other) / (static_cast<double>(n) * static_cast<double>(k));
}

}  // namespace nibble
