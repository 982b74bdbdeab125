#include "core/code_rows.hpp"

#include <cstring>

namespace nibble {

void CodeRows::copy_row(std::int64_t n, int element_bytes, std::uint8_t* to) const {
  const std::uint8_t* const from = row(n);
  const std::int64_t k = channels();
  if (!pairs) {
    std::memcpy(to, from, static_cast<std::size_t>(k * element_bytes));
    return;
  }
  for (std::int64_t i = 0; i < k / 2; ++i) {
    to[2 * i] = from[i] & 15;
    to[2 * i + 1] = from[i] >> 4;
  }
  if (k % 2 != 0) to[k - 1] = from[k / 2] & 15;
}

}  // namespace nibble
