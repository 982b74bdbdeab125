// Seeded Gaussian numbers: the operands of verify and of measured errors.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/random.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

inline Tensor gaussian(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, float scale, float mean = 0.0f) {
  Tensor t(dtype, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, mean + scale * random_normal(seed, static_cast<std::uint64_t>(i)));
  return t;
}

/// Ok for a factor that outliers can be larger by.
inline Status check_outliers(float factor) {
  if (std::isfinite(factor) && factor > 0) return {};
  return error(StatusCode::invalid_argument, "outliers={} is not a positive, finite number", factor);
}

/// Activations [M,K], every 256th channel `outliers` times as large.
inline Tensor gaussian_activations(DType dtype, std::int64_t m, std::int64_t k, std::uint64_t seed, float outliers) {
  constexpr std::int64_t kOutlierStep = 256;
  Tensor a = gaussian(dtype, {m, k}, seed, 1.0f);
  for (std::int64_t row = 0; row < m && outliers != 1.0f; ++row)
    for (std::int64_t i = row * k; i < (row + 1) * k; i += kOutlierStep) a.set(i, outliers * a.at(i));
  return a;
}

}  // namespace nibble
