// Checks of sizes from callers and files, before anything is computed from them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

#include "nibble/conv.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// The product of sizes that are not negative, saturated at the largest number.
constexpr std::int64_t product(std::initializer_list<std::int64_t> sizes) {
  std::int64_t result = 1;
  bool beyond = false;
  for (const std::int64_t size : sizes) {
    if (size == 0) return 0;
    beyond = __builtin_mul_overflow(result, size, &result) || beyond;
  }
  return beyond ? std::numeric_limits<std::int64_t>::max() : result;
}

/// Ok when every size, which has a name for the message, is in [least, kMaxSize].
Status check_sizes(std::initializer_list<std::pair<std::string_view, std::int64_t>> sizes, std::int64_t least = 1);

/// Ok when the product of `sizes` is at most kMaxElements; the name is for the message: "A" of {m, k}.
Status check_elements(std::string_view what, std::initializer_list<std::int64_t> sizes);

/// Ok for D[m,n] = A[m,k]·W[n,k]ᵀ of sizes that are supported.
Status check_product(std::int64_t m, std::int64_t n, std::int64_t k);

/// Ok for a geometry and a batch of images of sizes that are supported.
Status check_batch(const ConvGeometry& geometry, std::int64_t batch);

}  // namespace nibble
