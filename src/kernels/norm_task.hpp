// The work of normalizing activations (norm.hpp), as plain values.
#pragma once

#include <cstdint>

#include "nibble/norm.hpp"
#include "nibble/types.hpp"

namespace nibble {

/// Of y [M,K]. Strides are elements between rows; channels are side by side.
struct NormTask {
  NormSpec spec;
  DType type = DType::none;  // of A, the stored sum and y
  std::int64_t m = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_stride = 0;
  const void* add = nullptr;  // null: A is normalized as it is
  DType add_type = DType::none;
  std::int64_t add_stride = 0;
  void* sum = nullptr;  // null: it is not stored
  std::int64_t sum_stride = 0;
  const void* weight = nullptr;  // [K]
  DType weight_type = DType::none;
  const void* bias = nullptr;  // [K]; null: none
  DType bias_type = DType::none;
  void* y = nullptr;
  std::int64_t y_stride = 0;
};

}  // namespace nibble
