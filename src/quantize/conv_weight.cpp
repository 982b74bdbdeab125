// The filter of a convolution as the matrix that is quantized: [Co,Ci/groups,Kh,Kw] → rows in the order kh, kw, ci.
#include <cstring>
#include <new>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "nibble/quantize.hpp"
#include "quantize/quantize_rows.hpp"

namespace nibble {

Result<QuantTensor> quantize_conv(const ConstTensorView& w, const QuantizeSpec& spec, Executor* executor) try {
  if (w.empty() || w.rank != 4)
    return error(StatusCode::invalid_argument, "the filter of a convolution is [Co,Ci/groups,Kh,Kw], got rank {}", w.rank);
  const std::int64_t co = w.dim(0), ci = w.dim(1), kh = w.dim(2), kw = w.dim(3);
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"Co", co}, {"Ci/groups", ci}, {"Kh", kh}, {"Kw", kw}, {"K", product({ci, kh, kw})}}));
  NIBBLE_RETURN_IF_ERROR(check_elements("w", {co, ci, kh, kw}));
  Tensor rows(w.dtype, {co, kh * kw * ci});
  const auto width = static_cast<std::size_t>(bits(w.dtype) / 8);
  const auto* from = static_cast<const std::byte*>(w.data);
  std::byte* to = rows.bytes.data();
  for (std::int64_t n = 0; n < co; ++n)
    for (std::int64_t h = 0; h < kh; ++h)
      for (std::int64_t x = 0; x < kw; ++x)
        for (std::int64_t c = 0; c < ci; ++c, to += width) {
          const std::int64_t at = n * w.stride(0) + c * w.stride(1) + h * w.stride(2) + x * w.stride(3);
          std::memcpy(to, from + static_cast<std::size_t>(at) * width, width);
        }
  return quantize_rows({rows.bytes.data(), rows.dtype, {co, kh * kw * ci}}, spec, {kh, kw}, executor);
} catch (...) {
  return caught();
}

}  // namespace nibble
