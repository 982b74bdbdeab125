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

/// Decodes a matrix of columns band by band, from the bytes of each band alone, into memory of exactly the size that is asked for.
void expect_bands(const StoredCodes& stored, const std::vector<std::byte>& bytes, const Codes& expected, std::int64_t band) {
  ASSERT_TRUE(stored.in_bands());
  ASSERT_EQ(stored.stored_bytes(), static_cast<std::int64_t>(bytes.size()));
  for (std::int64_t begin = 0; begin < stored.k; begin += band) {
    const std::int64_t end = std::min(stored.k, begin + band);
    const std::vector<std::byte> own(bytes.begin() + stored.stored_bytes(begin), bytes.begin() + stored.stored_bytes(end));
    Codes memory(stored.decoded_bytes(end - begin) + 1, 0x5a);
    const CodeRows rows = stored.decode(own.data(), begin, end, memory.data());
    EXPECT_EQ(memory.back(), 0x5a);
    ASSERT_EQ(rows.begin, 0);
    ASSERT_EQ(rows.end, stored.n);
    ASSERT_EQ(rows.k_begin, begin);
    ASSERT_EQ(rows.k_end, end);
    Codes row(static_cast<std::size_t>(end - begin));
    for (std::int64_t n = 0; n < stored.n; ++n) {
      rows.copy_row(n, 1, row.data());
      ASSERT_TRUE(std::equal(row.begin(), row.end(), expected.begin() + n * stored.k + begin))
          << stored.bits << " bits, W[" << stored.n << "," << stored.k << "], row " << n << ", channels [" << begin << "," << end
          << ")";
      for (std::int64_t k = 0; k < end - begin; ++k) ASSERT_EQ(rows.code(rows.row(n), k), row[static_cast<std::size_t>(k)]);
    }
  }
}

TEST(Bits, BandsAreDecodedAlone) {
  for (const auto& [k, n] : kSizes) {
    for (int bits = 2; bits <= 8; ++bits)
      for (const Packing packing : {Packing::dense, Packing::padded}) {
        const Codes codes = random_codes(bits, n * k);
        const StoredCodes stored{"", CodeOrder::streams, bits, n, k, packing};
        EXPECT_EQ(stored.block() % kBandUnit, 0);
        const auto words = pack_columns(transposed(codes, n, k).data(), packing, bits, k, n);
        const std::int64_t unit = packing == Packing::dense ? kBandUnit : kBandUnit * (32 / bits);
        for (const std::int64_t band : {unit, 3 * unit, stored.block()}) expect_bands(stored, words, codes, band);
      }
    const Codes codes = random_codes(4, 8 * n * k);
    const StoredCodes stored{"", CodeOrder::awq, 4, 8 * n, k};
    const auto words = pack_awq(transposed(codes, 8 * n, k).data(), k, 8 * n);
    for (const std::int64_t band : {kBandUnit, 3 * kBandUnit, stored.block()}) expect_bands(stored, words, codes, band);
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
