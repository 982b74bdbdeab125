// Codes of 2 to 8 bits in little-endian 32-bit words: the packings AWQ, GPTQ and compressed-tensors share.
//
//   dense    code i of a stream has bits [b·i, b·i + b): 32 codes fill b words, and for b = 3, 5, 6, 7 some straddle two words
//   padded   each word holds ⌊32/b⌋ codes from bit 0 up, the bits above them are zero (compressed-tensors before June 2026)
//   AWQ      4-bit codes, eight consecutive columns a word, nibbles in the order 0 2 4 6 1 3 5 7
//
// A matrix of codes is packed along its rows (the words of a stream are neighbours) or along its columns (the words of a stream
// lie below each other). Words are read with memcpy, since a mapped file may put them at any address. Everything works on whole
// words or whole rows of words: a layer has 10^8 codes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/buffer.hpp"

namespace nibble::codec {

static_assert(std::endian::native == std::endian::little, "checkpoints are little-endian; words are used as they are");

enum class Packing : std::uint8_t { dense, padded };

/// The nibble of an AWQ word that holds column n, for n % 8 = 0…7.
inline constexpr std::array<unsigned, 8> kAwqNibble{0, 4, 1, 5, 2, 6, 3, 7};

/// Words one stream of `count` codes takes.
constexpr std::int64_t words_of(Packing packing, int bits, std::int64_t count) {
  if (packing == Packing::dense) return (count * bits + 31) / 32;
  const std::int64_t per_word = 32 / bits;
  return (count + per_word - 1) / per_word;
}

/// Nibble i as byte i.
constexpr std::uint64_t nibbles_to_bytes(std::uint64_t word) {
  word = (word | word << 16) & 0x0000ffff0000ffff;
  word = (word | word << 8) & 0x00ff00ff00ff00ff;
  return (word | word << 4) & 0x0f0f0f0f0f0f0f0f;
}
constexpr void store_bytes(std::uint64_t bytes, std::uint8_t* to) {
  if (!std::is_constant_evaluated())
    std::memcpy(to, &bytes, sizeof bytes);
  else
    for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint8_t>(bytes >> (8 * i));
}

/// The smallest run of codes that begins and ends at a word boundary.
template <int Bits, Packing P>
struct Block {
  static constexpr int kWords = P == Packing::dense ? Bits : 1;
  static constexpr int kCodes = P == Packing::dense ? 32 : 32 / Bits;

  static constexpr void unpack(const std::uint32_t* words, std::uint8_t* codes) {
    if constexpr (Bits == 4) {
      for (int w = 0; w < kWords; ++w) store_bytes(nibbles_to_bytes(words[w]), codes + 8 * w);
      return;
    }
    for (int i = 0; i < kCodes; ++i) {
      const int word = i * Bits / 32, shift = i * Bits % 32;
      std::uint32_t field = words[word] >> shift;
      if (shift + Bits > 32) field |= words[word + 1] << (32 - shift);
      codes[i] = static_cast<std::uint8_t>(field & ((1u << Bits) - 1));
    }
  }
  static constexpr void pack(const std::uint8_t* codes, std::uint32_t* words) {
    for (int w = 0; w < kWords; ++w) words[w] = 0;
    for (int i = 0; i < kCodes; ++i) {
      const int word = i * Bits / 32, shift = i * Bits % 32;
      words[word] |= static_cast<std::uint32_t>(codes[i]) << shift;
      if (shift + Bits > 32) words[word + 1] |= static_cast<std::uint32_t>(codes[i]) >> (32 - shift);
    }
  }
};

constexpr std::uint32_t pack_awq_word(const std::uint8_t* codes) {
  std::uint32_t word = 0;
  for (std::size_t n = 0; n < 8; ++n) word |= static_cast<std::uint32_t>(codes[n]) << (4 * kAwqNibble[n]);
  return word;
}

namespace detail {

inline std::uint32_t load_word(const std::byte* p) {
  std::uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}
inline void store_word(std::byte* p, std::uint32_t word) { std::memcpy(p, &word, sizeof word); }
inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

template <class F>
void with_block(Packing packing, int bits, F f) {
  auto width = [&]<int Bits>() {
    if (packing == Packing::dense)
      f(Block<Bits, Packing::dense>{});
    else
      f(Block<Bits, Packing::padded>{});
  };
  switch (bits) {
    case 2: return width.template operator()<2>();
    case 3: return width.template operator()<3>();
    case 4: return width.template operator()<4>();
    case 5: return width.template operator()<5>();
    case 6: return width.template operator()<6>();
    case 7: return width.template operator()<7>();
    default: return width.template operator()<8>();
  }
}

}  // namespace detail

/// words[rows, words_of(cols)] → codes[rows, cols].
inline void unpack_rows(const std::byte* words, Packing packing, int bits, std::int64_t rows, std::int64_t cols,
                        std::uint8_t* codes) {
  const std::int64_t row_words = words_of(packing, bits, cols);
  detail::with_block(packing, bits, [&]<class B>(B) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::byte* in = words + 4 * r * row_words;
      std::uint8_t* out = codes + r * cols;
      std::uint32_t block[B::kWords];
      std::int64_t c = 0;
      for (; c + B::kCodes <= cols; c += B::kCodes, in += sizeof block) {
        std::memcpy(block, in, sizeof block);
        B::unpack(block, out + c);
      }
      if (c == cols) continue;
      std::fill(std::begin(block), std::end(block), 0u);
      std::memcpy(block, in, 4 * detail::index(words_of(packing, bits, cols - c)));
      std::uint8_t tail[B::kCodes];
      B::unpack(block, tail);
      std::copy(tail, tail + (cols - c), out + c);
    }
  });
}
inline std::vector<std::uint8_t> unpack_rows(const std::byte* words, Packing packing, int bits, std::int64_t rows,
                                             std::int64_t cols) {
  std::vector<std::uint8_t> codes(detail::index(rows * cols));
  unpack_rows(words, packing, bits, rows, cols, codes.data());
  return codes;
}

/// The inverse of unpack_rows; unused bits are zero.
inline std::vector<std::byte> pack_rows(const std::uint8_t* codes, Packing packing, int bits, std::int64_t rows,
                                        std::int64_t cols) {
  const std::int64_t row_words = words_of(packing, bits, cols);
  std::vector<std::byte> words(detail::index(4 * rows * row_words));
  detail::with_block(packing, bits, [&]<class B>(B) {
    for (std::int64_t r = 0; r < rows; ++r) {
      std::byte* out = words.data() + 4 * r * row_words;
      for (std::int64_t c = 0; c < cols; c += B::kCodes) {
        const std::int64_t count = std::min<std::int64_t>(B::kCodes, cols - c);
        std::uint8_t padded[B::kCodes] = {};
        std::copy(codes + r * cols + c, codes + r * cols + c + count, padded);
        std::uint32_t block[B::kWords];
        B::pack(padded, block);
        const std::size_t bytes = 4 * detail::index(words_of(packing, bits, count));
        std::memcpy(out, block, bytes);
        out += bytes;
      }
    }
  });
  return words;
}

namespace detail {

/// The first bit of code `r` of a stream.
struct BitPosition {
  std::int64_t word;
  int shift;
};
constexpr BitPosition position(Packing packing, int bits, std::int64_t r) {
  if (packing == Packing::dense) return {r * bits / 32, static_cast<int>(r * bits % 32)};
  const std::int64_t per_word = 32 / bits;
  return {r / per_word, static_cast<int>(r % per_word) * bits};
}

}  // namespace detail

/// words[words_of(rows), cols] → codes[rows, cols].
inline std::vector<std::uint8_t> unpack_columns(const std::byte* words, Packing packing, int bits, std::int64_t rows,
                                                std::int64_t cols) {
  auto codes = zero_bytes<std::uint8_t>(detail::index(rows * cols));
  const std::uint32_t mask = (1u << bits) - 1;
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto [word, shift] = detail::position(packing, bits, r);
    const std::byte* low = words + 4 * word * cols;
    std::uint8_t* out = codes.data() + r * cols;
    if (shift + bits <= 32) {
      for (std::int64_t c = 0; c < cols; ++c)
        out[c] = static_cast<std::uint8_t>((detail::load_word(low + 4 * c) >> shift) & mask);
    } else {
      const std::byte* high = low + 4 * cols;
      for (std::int64_t c = 0; c < cols; ++c)
        out[c] = static_cast<std::uint8_t>(
            ((detail::load_word(low + 4 * c) >> shift) | (detail::load_word(high + 4 * c) << (32 - shift))) & mask);
    }
  }
  return codes;
}

/// The inverse of unpack_columns; unused bits are zero.
inline std::vector<std::byte> pack_columns(const std::uint8_t* codes, Packing packing, int bits, std::int64_t rows,
                                           std::int64_t cols) {
  std::vector<std::byte> words(detail::index(4 * words_of(packing, bits, rows) * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto [word, shift] = detail::position(packing, bits, r);
    const std::uint8_t* in = codes + r * cols;
    std::byte* low = words.data() + 4 * word * cols;
    for (std::int64_t c = 0; c < cols; ++c) {
      std::byte* p = low + 4 * c;
      detail::store_word(p, detail::load_word(p) | static_cast<std::uint32_t>(in[c]) << shift);
    }
    if (shift + bits <= 32) continue;
    std::byte* high = low + 4 * cols;
    for (std::int64_t c = 0; c < cols; ++c) detail::store_word(high + 4 * c, static_cast<std::uint32_t>(in[c]) >> (32 - shift));
  }
  return words;
}

/// words[words_of(rows), cols] → codes[end − begin, rows]: the streams of columns [begin, end) become rows.
inline void unpack_streams(const std::byte* words, Packing packing, int bits, std::int64_t rows, std::int64_t cols,
                           std::int64_t begin, std::int64_t end, std::uint8_t* codes) {
  constexpr std::int64_t kLine = 64, kStrip = kLine / 4;  // bytes; columns whose words are a line
  detail::with_block(packing, bits, [&]<class B>(B) {
    constexpr std::int64_t kRun = std::max<std::int64_t>(1, kLine / B::kCodes) * B::kCodes;  // codes of a stream, a line or more
    for (std::int64_t strip = begin; strip < end; strip += kStrip)
      for (std::int64_t r0 = 0; r0 < rows; r0 += kRun)
        for (std::int64_t c = strip; c < std::min(end, strip + kStrip); ++c)
          for (std::int64_t r = r0; r < std::min(rows, r0 + kRun); r += B::kCodes) {
            const std::int64_t count = std::min<std::int64_t>(B::kCodes, rows - r);
            const std::byte* in = words + 4 * (r / B::kCodes * B::kWords * cols + c);
            std::uint8_t* out = codes + (c - begin) * rows + r;
            std::uint32_t block[B::kWords] = {};
            for (std::int64_t w = 0; w < words_of(packing, bits, count); ++w) block[w] = detail::load_word(in + 4 * w * cols);
            if (count == B::kCodes) {
              B::unpack(block, out);
            } else {
              std::uint8_t tail[B::kCodes];
              B::unpack(block, tail);
              std::copy(tail, tail + count, out);
            }
          }
  });
}

inline std::vector<std::byte> pack_awq(const std::uint8_t* codes, std::int64_t rows, std::int64_t cols) {
  std::vector<std::byte> words(detail::index(rows * cols / 2));
  for (std::int64_t i = 0; i < rows * cols / 8; ++i) detail::store_word(words.data() + 4 * i, pack_awq_word(codes + 8 * i));
  return words;
}

/// in[rows, cols] → out[cols, rows]; elements of sizeof(T) bytes at any address. Goes through small square tiles, so that every
/// cache line is read and written whole: with a power-of-two row length a plain double loop would thrash one cache set.
template <class T>
void transpose(const std::byte* in, std::int64_t rows, std::int64_t cols, std::byte* out) {
  constexpr std::int64_t kTile = 64;
  T tile[kTile][kTile];
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTile) {
    const std::int64_t height = std::min(kTile, rows - r0);
    for (std::int64_t c0 = 0; c0 < cols; c0 += kTile) {
      const std::int64_t width = std::min(kTile, cols - c0);
      for (std::int64_t r = 0; r < height; ++r) {
        T row[kTile];
        std::memcpy(row, in + sizeof(T) * detail::index((r0 + r) * cols + c0), sizeof(T) * detail::index(width));
        for (std::int64_t c = 0; c < width; ++c) tile[c][r] = row[c];
      }
      for (std::int64_t c = 0; c < width; ++c)
        std::memcpy(out + sizeof(T) * detail::index((c0 + c) * rows + r0), tile[c], sizeof(T) * detail::index(height));
    }
  }
}

inline std::vector<std::uint8_t> transpose(const std::vector<std::uint8_t>& in, std::int64_t rows, std::int64_t cols) {
  std::vector<std::uint8_t> out(in.size());
  transpose<std::uint8_t>(reinterpret_cast<const std::byte*>(in.data()), rows, cols, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

}  // namespace nibble::codec
