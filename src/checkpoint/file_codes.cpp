#include "checkpoint/file_codes.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/error.hpp"

namespace nibble {
namespace {

bool is_nan(DType type, std::uint8_t code) { return std::isnan(code_value(type, code)); }

/// The smallest code of a type that is NaN, without its sign; those above it are NaN too.
int first_nan(DType type) {
  int code = 128;
  while (code > 0 && is_nan(type, static_cast<std::uint8_t>(code - 1))) --code;
  return code;
}

}  // namespace

Result<CodeRows> FileCodes::read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const {
  const std::size_t decoded = stored_.decoded_bytes(end - begin);
  const std::int64_t first = stored_.stored_bytes(begin);
  const auto bytes = static_cast<std::size_t>(stored_.stored_bytes(end) - first);
  if (memory.size() < decoded + bytes) memory.resize(decoded + bytes);
  const std::span stored = std::as_writable_bytes(std::span(memory).subspan(decoded, bytes));
  NIBBLE_RETURN_IF_ERROR(file_.read(first_byte_ + static_cast<std::uint64_t>(first), stored));
  const CodeRows rows = stored_.decode(stored.data(), begin, end, memory.data());
  if (nans_ != DType::none) count_nans(rows);
  return rows;
}

void FileCodes::count_nans(const CodeRows& rows) const {
  const int nan = first_nan(nans_);
  for (std::int64_t n = rows.begin; n < rows.end; ++n) {
    const std::uint8_t* const row = rows.row(n);
    std::int64_t count = 0;
    for (std::int64_t k = 0; k < rows.channels(); ++k) count += (row[k] & 0x7f) >= nan;
    if (count == 0) continue;
    nan_count_ += count;
    const std::uint8_t* const at =
        std::find_if(row, row + rows.channels(), [&](std::uint8_t code) { return (code & 0x7f) >= nan; });
    const std::int64_t first = (n * stored_.k + rows.k_begin + (at - row)) * 256 + *at;
    std::int64_t seen = first_nan_;
    while (first < seen && !first_nan_.compare_exchange_weak(seen, first)) {
    }
  }
}

}  // namespace nibble
