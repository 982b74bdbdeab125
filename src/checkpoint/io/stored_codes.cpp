// See stored_codes.hpp. Codes of 4 bits stay two to a byte: they are moved as words, four at a time.
#include "checkpoint/io/stored_codes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

#include "core/buffer.hpp"
#include "nibble/parallel.hpp"

namespace nibble::codec {
namespace {

typedef std::uint32_t Words __attribute__((vector_size(16)));
constexpr int kWords = 4;
constexpr std::int64_t kNibbles = 8;                       // of a word
constexpr std::int64_t kStep = kWords * kNibbles;          // codes of a row that are stored together
constexpr std::int64_t kLine = 64, kBlockBytes = 1 << 18;  // of a cache; of a block, which stays in the second-level cache
constexpr std::int64_t kLongestBand = 1 << 10;             // channels

/// Words [column, column + 4) of a line of words; zeros past its end.
Words load_words(const std::byte* line, std::int64_t column, std::int64_t columns) {
  Words words = {};
  const std::int64_t left = std::min<std::int64_t>(kWords, columns - column);
  if (left == kWords)
    std::memcpy(&words, line + 4 * column, sizeof words);
  else
    std::memcpy(&words, line + 4 * column, static_cast<std::size_t>(4 * left));
  return words;
}

/// Word j of words[i] becomes word i of words[j].
void transpose(Words (&words)[kWords]) {
  const Words ab = __builtin_shufflevector(words[0], words[1], 0, 4, 1, 5),
              cd = __builtin_shufflevector(words[2], words[3], 0, 4, 1, 5),
              ab_high = __builtin_shufflevector(words[0], words[1], 2, 6, 3, 7),
              cd_high = __builtin_shufflevector(words[2], words[3], 2, 6, 3, 7);
  words[0] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
  words[1] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  words[2] = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  words[3] = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/// Nibble j of x[i] becomes nibble i of x[j], in each of the four words.
void transpose_nibbles(Words (&x)[kNibbles]) {
  const auto exchange = [&x](std::size_t i, std::size_t distance, std::uint32_t mask) {
    const auto shift = static_cast<std::uint32_t>(4 * distance);
    const Words t = (x[i] >> shift ^ x[i + distance]) & mask;
    x[i + distance] ^= t;
    x[i] ^= t << shift;
  };
  for (const std::size_t i : {0, 1, 2, 3}) exchange(i, 4, 0x0000ffff);
  for (const std::size_t i : {0, 1, 4, 5}) exchange(i, 2, 0x00ff00ff);
  for (const std::size_t i : {0, 2, 4, 6}) exchange(i, 1, 0x0f0f0f0f);
}

/// Streams of 4-bit codes, [K/8,N]: a word has eight codes of a row, as pairs have them, so that words are transposed.
void transpose_streams(const std::byte* words, std::int64_t k, std::int64_t n, std::int64_t begin, std::int64_t end,
                       std::uint8_t* to, std::int64_t pitch) {
  const std::int64_t lines = (k + kNibbles - 1) / kNibbles;
  for (std::int64_t line = 0; line < lines; line += kWords)
    for (std::int64_t c = begin; c < end; c += kWords) {
      Words tile[kWords] = {};
      for (std::int64_t i = 0; i < std::min<std::int64_t>(kWords, lines - line); ++i)
        tile[i] = load_words(words + 4 * (line + i) * n, c, n);
      transpose(tile);
      for (std::int64_t i = 0; i < std::min<std::int64_t>(kWords, end - c); ++i)
        std::memcpy(to + (c + i - begin) * pitch + line * 4, &tile[i], sizeof tile[i]);
    }
}

/// AWQ's words, [K,N/8]: the nibbles of eight lines are transposed, which makes words of rows; then those of four such octets.
void transpose_awq(const std::byte* words, std::int64_t k, std::int64_t n, std::int64_t begin, std::int64_t end, std::uint8_t* to,
                   std::int64_t pitch) {
  const std::int64_t columns = n / kNibbles;
  for (std::int64_t k0 = 0; k0 < k; k0 += kStep)
    for (std::int64_t c = begin / kNibbles; c < end / kNibbles; c += kWords) {
      Words octets[kNibbles][kWords];  // by row of a word, and octet
      for (int octet = 0; octet < kWords; ++octet) {
        Words x[kNibbles] = {};
        for (std::int64_t i = 0; i < kNibbles; ++i)
          if (const std::int64_t line = k0 + octet * kNibbles + i; line < k)
            x[i] = load_words(words + 4 * line * columns, c, columns);
        transpose_nibbles(x);
        for (std::size_t row = 0; row < kNibbles; ++row) octets[row][octet] = x[kAwqNibble[row]];
      }
      for (std::int64_t row = 0; row < kNibbles; ++row) {
        transpose(octets[row]);
        for (std::int64_t i = 0; i < std::min<std::int64_t>(kWords, end / kNibbles - c); ++i)
          std::memcpy(to + ((c + i) * kNibbles + row - begin) * pitch + k0 / 2, &octets[row][i], sizeof(Words));
      }
    }
}

/// ModelOpt's rows, two to a byte, the first one in the low half, of two's complement: + 8 makes them count from 0.
void split_row_pairs(const std::byte* stored, std::int64_t k, std::int64_t rows, std::uint8_t* to, std::int64_t pitch) {
  for (std::int64_t pair = 0; pair < rows / 2; ++pair) {
    const auto* const in = reinterpret_cast<const std::uint8_t*>(stored) + pair * k;
    std::uint8_t *const low = to + 2 * pair * pitch, *const high = low + pitch;
    for (std::int64_t i = 0; i < k / 2; ++i) {
      const int a = in[2 * i] ^ 0x88, b = in[2 * i + 1] ^ 0x88;
      low[i] = static_cast<std::uint8_t>((a & 15) | b << 4);
      high[i] = static_cast<std::uint8_t>(a >> 4 | (b & 0xf0));
    }
    if (k % 2 == 0) continue;
    const int last = in[k - 1] ^ 0x88;
    low[k / 2] = static_cast<std::uint8_t>(last & 15);
    high[k / 2] = static_cast<std::uint8_t>(last >> 4);
  }
}

}  // namespace

std::int64_t StoredCodes::stored_bytes(std::int64_t end) const {
  switch (order) {
    case CodeOrder::bytes: return end * k * (bits / 8);
    case CodeOrder::rows: return 4 * end * words_of(packing, bits, k);
    case CodeOrder::row_pairs: return end / 2 * k;
    case CodeOrder::streams: return 4 * words_of(packing, bits, end) * n;
    case CodeOrder::awq: return end * n / 2;
  }
  return 0;
}

std::int64_t StoredCodes::block() const {
  if (in_bands()) {
    const std::int64_t unit = packing == Packing::dense ? kBandUnit : std::lcm(kBandUnit, 32 / bits);
    const std::int64_t units =
        std::clamp<std::int64_t>(kBlockBytes / std::max<std::int64_t>(stored_bytes(unit), 1), 1, kLongestBand / unit);
    return unit * static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(units)));
  }
  const std::int64_t two_rows = std::max<std::int64_t>(stored_bytes(2), 1);
  return 2 * static_cast<std::int64_t>(
                 std::bit_floor(static_cast<std::uint64_t>(std::clamp<std::int64_t>(kBlockBytes / two_rows, 8, 1 << 10))));
}

std::int64_t StoredCodes::pitch(std::int64_t channels) const {
  if (!pairs()) return channels;
  if (in_bands() && channels < k) return (channels + kStep - 1) / kStep * (kStep / 2);
  const std::int64_t lines = ((channels + 1) / 2 + kLine - 1) / kLine;
  return (lines | 1) * kLine;  // an odd number: neighbouring rows are in different sets of a cache
}

std::size_t StoredCodes::decoded_bytes(std::int64_t count) const {
  if (as_stored()) return 0;
  return static_cast<std::size_t>(in_bands() ? n * pitch(count) : count * pitch(k));
}

CodeRows StoredCodes::decode(const std::byte* stored, std::int64_t begin, std::int64_t end, std::uint8_t* memory) const {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(stored);
  if (as_stored()) return {begin, end, 0, k, bytes, stored_bytes(1), pairs()};
  const std::int64_t count = end - begin;
  if (!in_bands()) {
    if (order == CodeOrder::row_pairs)
      split_row_pairs(stored, k, count, memory, pitch(k));
    else
      unpack_rows(stored, packing, bits, count, k, memory);
    return {begin, end, 0, k, memory, pitch(k), pairs()};
  }
  return decode_columns(stored, begin, end, 0, n, memory);
}

CodeRows StoredCodes::decode_columns(const std::byte* stored, std::int64_t k_begin, std::int64_t k_end, std::int64_t n_begin,
                                     std::int64_t n_end, std::uint8_t* memory) const {
  const std::int64_t channels = k_end - k_begin;
  const CodeRows rows{n_begin, n_end, k_begin, k_end, memory, pitch(channels), pairs()};
  if (order == CodeOrder::awq)
    transpose_awq(stored, channels, n, n_begin, n_end, memory, rows.pitch);
  else if (pairs())
    transpose_streams(stored, channels, n, n_begin, n_end, memory, rows.pitch);
  else
    unpack_streams(stored, packing, bits, channels, n, n_begin, n_end, memory);
  return rows;
}

std::vector<std::uint8_t> decode_all(const StoredCodes& stored, const std::byte* bytes) {
  const int element_bytes = stored.order == CodeOrder::bytes ? stored.bits / 8 : 1;
  auto codes = zero_bytes<std::uint8_t>(static_cast<std::size_t>(stored.n * stored.k * element_bytes));
  const std::int64_t block = stored.in_bands() ? StoredCodes::kStrip : stored.block();
  default_executor().parallel_for((stored.n + block - 1) / block, [&](std::int64_t i) {
    const std::int64_t begin = i * block, end = std::min(stored.n, begin + block);
    std::vector<std::uint8_t> memory;
    CodeRows decoded;
    if (stored.in_bands()) {
      memory.resize(stored.strip_bytes(end - begin));
      decoded = stored.decode_columns(bytes, 0, stored.k, begin, end, memory.data());
    } else {
      memory.resize(stored.decoded_bytes(end - begin));
      decoded = stored.decode(bytes + stored.stored_bytes(begin), begin, end, memory.data());
    }
    for (std::int64_t n = begin; n < end; ++n) decoded.copy_row(n, element_bytes, codes.data() + n * stored.k * element_bytes);
  });
  return codes;
}

}  // namespace nibble::codec
