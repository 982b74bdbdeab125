// The work of making s8 codes of an A of u8 codes (recode.hpp), as plain values.
#pragma once

#include <cstdint>

namespace nibble {

/// [images][rows][length] codes, and [tokens][groups] zero points. Strides are in elements.
struct RecodeTask {
  const std::uint8_t* from = nullptr;
  std::int8_t* to = nullptr;
  std::int64_t images = 1, rows = 1, length = 0;
  std::int64_t from_image = 0, from_row = 0, to_image = 0, to_row = 0;
  const std::int32_t* zeros = nullptr;  // null: there are none, or the weight has them
  std::int32_t* to_zeros = nullptr;     // dense
  std::int64_t tokens = 0, groups = 0, zero_token = 0, zero_group = 0;
};

}  // namespace nibble
