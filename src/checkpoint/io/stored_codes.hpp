// How a checkpoint stores the codes of a weight W[N,K], and a block of them decoded.
//
//   bytes      [N,K], as QuantTensor::codes has them; of dense weights 2 or 4 bytes each
//   rows       words of each row, one row after the other          compressed-tensors; nibbles of a dense row are decoded as they lie
//   row_pairs  [N/2,K], two rows a byte, signed                    ModelOpt
//   streams    words of a row below each other: [words,N]          GPTQ
//   awq        [K,N/8], a word has eight rows of one column        AutoAWQ
//
// A block is a piece of the tensor: some rows of the first three, some input channels of the others, a band, with all rows. So it can be
// read from the file one block after the other, each into memory that stays in a cache while it is decoded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/io/bits.hpp"
#include "core/code_rows.hpp"

namespace nibble::codec {

enum class CodeOrder : std::uint8_t { bytes, rows, row_pairs, streams, awq };

struct StoredCodes {
  std::string_view suffix;  // of the tensor
  CodeOrder order = CodeOrder::bytes;
  int bits = 8;  // of a code: 2 … 8; of `bytes` 8, 16 or 32
  std::int64_t n = 0, k = 0;
  Packing packing = Packing::dense;  // of words

  bool in_bands() const { return order >= CodeOrder::streams; }
  /// What blocks divide: rows, or the channels of bands.
  std::int64_t length() const { return in_bands() ? k : n; }
  /// The rows of a block, a power of two, or the channels of a band, a multiple of kBandUnit. Every block begins at a multiple of it.
  std::int64_t block() const;
  /// The bytes of the tensor before row, or channel, `end`, where a block ends.
  std::int64_t stored_bytes(std::int64_t end) const;
  std::int64_t stored_bytes() const { return stored_bytes(length()); }
  /// The bytes that decode() writes for so many rows or channels; 0 of what is used as it is stored.
  std::size_t decoded_bytes(std::int64_t count) const;
  /// The block [begin, end), whose bytes are `stored`; `memory` has decoded_bytes(end - begin).
  CodeRows decode(const std::byte* stored, std::int64_t begin, std::int64_t end, std::uint8_t* memory) const;

  /// Of a tensor in bands: rows [n_begin, n_end), from a multiple of kStrip on, of the band [k_begin, k_end), whose bytes are `stored`. Of
  /// the whole tensor they take strip_bytes(n_end - n_begin): where rows of a byte a code are wanted, each is written at once.
  CodeRows decode_columns(const std::byte* stored, std::int64_t k_begin, std::int64_t k_end, std::int64_t n_begin,
                          std::int64_t n_end, std::uint8_t* memory) const;
  static constexpr std::int64_t kStrip = 128;  // rows, whose words of AWQ are a line of a cache
  std::size_t strip_bytes(std::int64_t rows) const { return static_cast<std::size_t>(rows * pitch(k)); }

 private:
  bool pairs() const { return bits == 4 && packing == Packing::dense && order != CodeOrder::bytes; }
  bool as_stored() const { return order == CodeOrder::bytes || (order == CodeOrder::rows && (pairs() || bits == 8)); }
  std::int64_t pitch(std::int64_t channels) const;  // of decoded rows of so many channels
};

/// All codes, as QuantTensor has them, from the bytes of the whole tensor; on all threads.
std::vector<std::uint8_t> decode_all(const StoredCodes& stored, const std::byte* bytes);

}  // namespace nibble::codec
