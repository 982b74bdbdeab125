// The checks of a quantized weight that need none of its numbers: QuantTensor::validate() and files of packed weights begin with them.
#pragma once

#include <cstdint>
#include <optional>

#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Everything about a weight but its arrays.
struct WeightFacts {
  WeightScheme scheme;
  std::int64_t n = 0, k = 0;
  DType zero_type = DType::none;  // none: it has no zeros
  Extent filter;
  bool act_order = false;
  std::optional<StaticActs> static_acts;
  std::optional<float> act_limit;
};

/// Errors: invalid_argument with the field and the values.
Status check_weight(const WeightFacts& weight);

/// QuantTensor::validate() without the codes.
Status check_but_codes(const QuantTensor& q);

}  // namespace nibble
