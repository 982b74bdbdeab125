// Parts of layers held against the whole.
#pragma once

#include "nibble/tensor.hpp"

namespace nibble::testing {

/// How many numbers of `part` differ from those of `all`, whose output channel n0 and input channel k0 are the part's first.
inline std::int64_t differences(const QuantTensor& part, const QuantTensor& all, std::int64_t n0, std::int64_t k0) {
  std::int64_t count = part.bias.empty() != all.bias.empty();
  count += part.static_acts != all.static_acts || part.prescale.empty() != all.prescale.empty();
  for (std::int64_t n = 0; n < part.n; ++n) {
    for (std::int64_t k = 0; k < part.k; ++k) count += part.value(n, k) != all.value(n0 + n, k0 + k);
    if (!part.bias.empty()) count += part.bias.at(n) != all.bias.at(n0 + n);
  }
  if (!part.prescale.empty())
    for (std::int64_t k = 0; k < part.k; ++k) count += part.prescale.at(k) != all.prescale.at(k0 + k);
  return count;
}

}  // namespace nibble::testing
