// How a checkpoint stores the codes of a weight W[N,K], and a block of its rows decoded.
//
//   bytes      [N,K], as QuantTensor::codes has them; of dense weights 2 or 4 bytes each
//   rows       words of each row, one row after the other          compressed-tensors; nibbles of a dense row are decoded as they lie
//   row_pairs  [N/2,K], two rows a byte, signed                    ModelOpt
//   streams    words of a row below each other: [words,N]          GPTQ
//   awq        [K,N/8], a word has eight rows of one column        AutoAWQ
//
// Rows of the first three are pieces of the tensor, which can be read from the file one block after the other; of the others every block
// needs a strip of columns, and so the whole tensor.
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

  /// Whether the rows of a block are a piece of the tensor.
  bool by_rows() const { return order <= CodeOrder::row_pairs; }
  /// The bytes of the tensor that have rows [0, n), of a block's end or the last row; of all rows unless by_rows().
  std::int64_t stored_bytes(std::int64_t rows) const;
  /// The rows of a block: a power of two. Every block begins at a multiple of it.
  std::int64_t block_rows() const;
  /// The bytes that decode() writes for so many rows; 0 of what is used as it is stored.
  std::size_t decoded_bytes(std::int64_t rows) const;
  /// Rows [begin, end). `stored` are the bytes of these rows, or of the whole tensor unless by_rows(); `memory` has decoded_bytes().
  CodeRows decode(const std::byte* stored, std::int64_t begin, std::int64_t end, std::uint8_t* memory) const;

 private:
  bool pairs() const { return bits == 4 && packing == Packing::dense && order != CodeOrder::bytes; }
  bool as_stored() const { return order == CodeOrder::bytes || (order == CodeOrder::rows && (pairs() || bits == 8)); }
  std::int64_t pitch() const;  // of decoded rows
};

/// All codes, as QuantTensor has them, from the bytes of the whole tensor; on all threads.
std::vector<std::uint8_t> decode_all(const StoredCodes& stored, const std::byte* bytes);

}  // namespace nibble::codec
