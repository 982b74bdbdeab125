// A QuantizeSpec in parts, for tests that vary them.
#pragma once

#include <array>
#include <optional>

#include "nibble/quantize.hpp"

namespace nibble::testing {

struct SchemeParts {
  int bits = 4;
  std::int32_t group_size = 128;  // 0: a scale per channel
  bool symmetric = true;          // codes uXbB; else uX with integer zero points
  DType scale = DType::f16;
  bool clip_search = false;
  DType codes = DType::none;  // these, whatever `bits` says
  std::optional<GroupShape> group = {};

  operator QuantizeSpec() const {  // NOLINT(google-explicit-constructor): it stands for one
    using enum DType;
    constexpr std::array kSymmetric = {u2b2, u3b4, u4b8, u5b16, u6b32, u7b64, u8b128};
    constexpr std::array kAsymmetric = {u2, u3, u4, u5, u6, u7, u8};
    const DType of_bits = (symmetric ? kSymmetric : kAsymmetric).at(static_cast<std::size_t>(bits - 2));
    return {{codes == none ? of_bits : codes, symmetric ? ZeroKind::none : ZeroKind::integer,
             group             ? *group
             : group_size == 0 ? GroupShape::channel()
                               : GroupShape{1, group_size},
             scale},
            clip_search};
  }
};

}  // namespace nibble::testing
