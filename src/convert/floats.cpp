// See floats.hpp.
#include "convert/floats.hpp"

#include <cstring>

namespace nibble {

Tensor as_oihw(const Tensor& rows, Extent filter) {
  const std::int64_t elements = filter.h * filter.w, k = rows.shape[1], channels = k / elements;
  const auto width = static_cast<std::size_t>(bits(rows.dtype) / 8);
  Tensor out(rows.dtype, {rows.shape[0], channels, filter.h, filter.w});
  std::byte* to = out.bytes.data();
  for (std::int64_t n = 0; n < rows.shape[0]; ++n)
    for (std::int64_t c = 0; c < channels; ++c)
      for (std::int64_t e = 0; e < elements; ++e, to += width)
        std::memcpy(to, rows.bytes.data() + static_cast<std::size_t>(n * k + e * channels + c) * width, width);
  return out;
}

Tensor as_rows(const Tensor& w) {
  const std::int64_t elements = w.shape[2] * w.shape[3], channels = w.shape[1];
  const auto width = static_cast<std::size_t>(bits(w.dtype) / 8);
  Tensor out(w.dtype, {w.shape[0], elements * channels});
  std::byte* to = out.bytes.data();
  for (std::int64_t n = 0; n < w.shape[0]; ++n)
    for (std::int64_t e = 0; e < elements; ++e)
      for (std::int64_t c = 0; c < channels; ++c, to += width)
        std::memcpy(to, w.bytes.data() + static_cast<std::size_t>((n * channels + c) * elements + e) * width, width);
  return out;
}

Tensor scaled_columns(const Tensor& w, const std::vector<float>& s, Executor& executor) {
  Tensor out(DType::f32, w.shape);
  const std::int64_t cols = w.shape[1];
  executor.parallel_for(w.shape[0], [&](std::int64_t n) {
    for (std::int64_t k = 0; k < cols; ++k) out.as<float>()[n * cols + k] = w.at(n * cols + k) * s[static_cast<std::size_t>(k)];
  });
  return out;
}

Tensor with_prescale(const Tensor& w, const Tensor& prescale, DType dtype, Executor& executor) {
  Tensor out(dtype, w.shape);
  const std::int64_t cols = w.shape[1];
  executor.parallel_for(w.shape[0], [&](std::int64_t n) {
    for (std::int64_t k = 0; k < cols; ++k) out.set(n * cols + k, w.at(n * cols + k) * prescale.at(k));
  });
  return out;
}

}  // namespace nibble
