// W row by row: QuantTensor::value for whole rows, with everything that does not depend on the element computed once.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "nibble/tensor.hpp"

namespace nibble {

class RowDecoder {
 public:
  /// `q` must be valid and outlive the decoder.
  explicit RowDecoder(const QuantTensor& q);

  /// out[k] = q.value(n, k) for all k, bit for bit.
  void decode(std::int64_t n, float* out) const;

 private:
  const QuantTensor& q_;
  std::array<double, 256> values_;      // of each code
  std::vector<std::int32_t> group_of_;  // of each input channel
  std::vector<double> scales_, zeros_;
};

}  // namespace nibble
