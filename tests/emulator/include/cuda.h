// A tensor map is opaque: here it says what ptx::load_box has to know.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const std::uint8_t* rows;
  std::int64_t pitch, m, row_bytes;
  int box_rows;
};
