// Unpacking is the inverse of packing, for every width and for sizes that end within words, lines and tiles.
#include <gtest/gtest.h>

#include <random>

#include "checkpoint/io/stored_codes.hpp"

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
        EXPECT_EQ(decode_all({"", CodeOrder::streams, bits, cols, rows, packing}, columns.data()), transposed(codes, rows, cols))
            << bits << " bits, " << rows << "x" << cols;
      }
}

TEST(Bits, AwqWords) {
  for (const auto& [rows, words] : kSizes) {
    const Codes codes = random_codes(4, rows * words * 8);
    EXPECT_EQ(decode_all({"", CodeOrder::awq, 4, words * 8, rows}, pack_awq(codes.data(), rows, words * 8).data()),
              transposed(codes, rows, words * 8))
        << rows << "x" << words * 8;
  }
}

TEST(Bits, RowsOfWordsAreThoseOfPairs) {
  for (const Packing packing : {Packing::dense, Packing::padded})
    for (int bits = 2; bits <= 8; ++bits)
      for (const auto& [rows, cols] : kSizes) {
        const Codes codes = random_codes(bits, rows * cols);
        const auto words = pack_rows(codes.data(), packing, bits, rows, cols);
        EXPECT_EQ(decode_all({"", CodeOrder::rows, bits, rows, cols, packing}, words.data()), codes)
            << bits << " bits, " << rows << "x" << cols;
      }
}

TEST(Bits, TwoRowsOfSignedCodesShareBytes) {
  for (const auto& [pairs, cols] : kSizes) {
    const Codes codes = random_codes(4, 2 * pairs * cols);
    std::vector<std::byte> bytes;
    for (std::int64_t i = 0; i < pairs; ++i)
      for (std::int64_t k = 0; k < cols; ++k) {
        const int low = codes[static_cast<std::size_t>(2 * i * cols + k)],
                  high = codes[static_cast<std::size_t>((2 * i + 1) * cols + k)];
        bytes.push_back(static_cast<std::byte>(((low - 8) & 15) | ((high - 8) & 15) << 4));
      }
    EXPECT_EQ(decode_all({"", CodeOrder::row_pairs, 4, 2 * pairs, cols}, bytes.data()), codes) << 2 * pairs << "x" << cols;
  }
}

}  // namespace
}  // namespace nibble::codec
