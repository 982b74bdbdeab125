// The comparator of verify and the conformance tests.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/reference/oracle.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

struct Comparison {
  std::int64_t checked = 0;
  std::int64_t failures = 0;
  double worst_ratio = 0;  // max |got − expected| / bound; infinity when got is not finite and should be
  double relative_l2 = 0;
  std::int64_t worst_m = 0, worst_n = 0;
  double worst_got = 0;
  reference::Expected worst_expected;
};

/// Compares d[m, columns[j]] with expected[m·|columns| + j].
Comparison compare(const Tensor& d, std::span<const std::int64_t> columns, std::span<const reference::Expected> expected);

}  // namespace nibble
