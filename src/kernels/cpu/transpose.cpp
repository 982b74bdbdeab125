// Squares of 16 bytes a side, by interleaving. Registers of 128 bits, which every machine has: wider ones gain nothing, because a
// transposition touches a cache line per row whatever their width.
#include "kernels/cpu/transpose.hpp"

#include <cstring>

namespace nibble::cpu {
namespace {

template <class T>
struct Square {
  static constexpr int kSide = 16 / sizeof(T);
  typedef T Row __attribute__((vector_size(16)));
};

// Element i of `a`, element i of `b`, and so on, of the lower and the upper halves.
template <class Row>
Row low(Row a, Row b) {
  if constexpr (sizeof(a[0]) == 1)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  else if constexpr (sizeof(a[0]) == 2)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
}
template <class Row>
Row high(Row a, Row b) {
  if constexpr (sizeof(a[0]) == 1)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  else if constexpr (sizeof(a[0]) == 2)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
}

/// log2(side) rounds of interleaving row i with row i + side/2.
template <class T>
void square(const std::byte* from, std::int64_t from_stride, std::byte* to, std::int64_t to_stride) {
  constexpr int kSide = Square<T>::kSide;
  typename Square<T>::Row a[kSide], b[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&a[i], from + i * from_stride, 16);
#pragma GCC unroll 4
  for (int round = 1; round < kSide; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kSide / 2; ++i) {
      b[2 * i] = low(a[i], a[i + kSide / 2]);
      b[2 * i + 1] = high(a[i], a[i + kSide / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) a[i] = b[i];
  }
  for (int i = 0; i < kSide; ++i) std::memcpy(to + i * to_stride, &a[i], 16);
}

template <class T>
void transpose_all(const std::byte* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, std::byte* to,
                   std::int64_t to_stride) {
  constexpr int kSide = Square<T>::kSide;
  constexpr std::int64_t kWidth = sizeof(T);
  const auto one = [&](std::int64_t r, std::int64_t c) {
    std::memcpy(to + c * to_stride + r * kWidth, from + r * from_stride + c * kWidth, kWidth);
  };
  if (rows < kSide || columns < kSide) {
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < columns; ++c) one(r, c);
    return;
  }
  // The last squares of a row and a column overlap the ones before.
  for (std::int64_t c = 0; c < columns; c += kSide) {
    const std::int64_t column = c + kSide <= columns ? c : columns - kSide;
    for (std::int64_t r = 0; r < rows; r += kSide) {
      const std::int64_t row = r + kSide <= rows ? r : rows - kSide;
      square<T>(from + row * from_stride + column * kWidth, from_stride, to + column * to_stride + row * kWidth, to_stride);
    }
  }
}

}  // namespace

void transpose(int width, const std::byte* from, std::int64_t from_stride, std::int64_t rows, std::int64_t columns, std::byte* to,
               std::int64_t to_stride) {
  if (width == 1) return transpose_all<std::uint8_t>(from, from_stride, rows, columns, to, to_stride);
  if (width == 2) return transpose_all<std::uint16_t>(from, from_stride, rows, columns, to, to_stride);
  return transpose_all<std::uint32_t>(from, from_stride, rows, columns, to, to_stride);
}

}  // namespace nibble::cpu
