// Unpacking is the inverse of packing, for every width and for sizes that end within words, lines and tiles.
#include <gtest/gtest.h>

#include <random>

#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

using Codes = std::vector<std::uint8_t>;

Codes random_codes(int bits, std::int64_t count) {
  std::mt19937 random(static_cast<unsigned>(bits));
  Codes codes(static_cast<std::size_t>(count));
  for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random() & ((1u << bits) - 1));
  return codes;
}
/// [rows, cols] → [cols, rows].
Codes transposed(const Codes& codes, std::int64_t rows, std::int64_t cols) {
  Codes out(codes.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c)
      out[static_cast<std::size_t>(c * rows + r)] = codes[static_cast<std::size_t>(r * cols + c)];
  return out;
}

/// Small ones with every tail, and one whose work is divided among threads.
constexpr std::int64_t kSizes[][2] = {{1, 1}, {7, 3}, {31, 16}, {32, 17}, {33, 40}, {64, 5}, {65, 70}, {200, 33}, {1030, 515}};

TEST(Bits, RowsAndColumnsOfWords) {
  for (const Packing packing : {Packing::dense, Packing::padded})
    for (int bits = 2; bits <= 8; ++bits)
      for (const auto& [rows, cols] : kSizes) {
        const Codes codes = random_codes(bits, rows * cols);
        EXPECT_EQ(unpack_rows(pack_rows(codes.data(), packing, bits, rows, cols).data(), packing, bits, rows, cols), codes)
            << bits << " bits, " << rows << "x" << cols;
        const auto columns = pack_columns(codes.data(), packing, bits, rows, cols);
        EXPECT_EQ(unpack_columns(columns.data(), packing, bits, rows, cols), codes) << bits << " bits, " << rows << "x" << cols;
        EXPECT_EQ(unpack_streams(columns.data(), packing, bits, rows, cols), transposed(codes, rows, cols))
            << bits << " bits, " << rows << "x" << cols;
      }
}

TEST(Bits, AwqWords) {
  for (const auto& [rows, words] : kSizes) {
    const Codes codes = random_codes(4, rows * words * 8);
    EXPECT_EQ(unpack_awq(pack_awq(codes.data(), rows, words * 8).data(), rows, words * 8), transposed(codes, rows, words * 8))
        << rows << "x" << words * 8;
  }
}

TEST(Bits, BytesOfEightWordsAreTransposed) {
  std::uint64_t x[8];
  for (std::uint64_t i = 0; i < 8; ++i) {
    x[i] = 0;
    for (std::uint64_t j = 0; j < 8; ++j) x[i] |= (8 * i + j) << (8 * j);
  }
  transpose_bytes(x);
  for (std::uint64_t i = 0; i < 8; ++i)
    for (std::uint64_t j = 0; j < 8; ++j) EXPECT_EQ(x[i] >> (8 * j) & 255, 8 * j + i);
}

}  // namespace
}  // namespace nibble::codec
