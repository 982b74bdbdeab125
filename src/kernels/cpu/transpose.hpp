// Transposition of matrices of bytes, halves or words: between channels-last and channels-first images.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nibble::cpu {

/// to[c][r] = from[r][c] for `rows` × `columns` elements of `width` bytes (1, 2 or 4); strides are in bytes.
void transpose(int width, const std::byte* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, std::byte* to,
               std::int64_t to_stride);

}  // namespace nibble::cpu
