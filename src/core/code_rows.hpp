// The codes of a weight, by rows: those of a QuantTensor, or of a checkpoint that decodes a block at a time.
//
// Packing reads codes through a CodeSource only, so that a weight can go from a file into a layout without an array of all of its codes.
#pragma once

#include <cstdint>
#include <vector>

#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// The codes of rows (output channels) [begin, end) and input channels [k_begin, k_end), where they lie.
struct CodeRows {
  std::int64_t begin = 0, end = 0;
  std::int64_t k_begin = 0, k_end = 0;
  const std::uint8_t* data = nullptr;  // of row `begin`, channel `k_begin`
  std::int64_t pitch = 0;              // bytes from a row to the next
  /// Codes of 4 bits, two to a byte, the first one in the low half; else as in QuantTensor::codes. The upper half of a last byte is anything.
  bool pairs = false;

  /// The codes that are there of each row.
  std::int64_t channels() const { return k_end - k_begin; }
  const std::uint8_t* row(std::int64_t n) const { return data + (n - begin) * pitch; }
  /// Code k of a row, counted from k_begin; not of a dense weight.
  std::uint8_t code(const std::uint8_t* row, std::int64_t k) const {
    return pairs ? static_cast<std::uint8_t>(row[k / 2] >> (k % 2 * 4) & 15) : row[k];
  }
  /// The codes of row n, whose elements have so many bytes, as QuantTensor::codes has them.
  void copy_row(std::int64_t n, int element_bytes, std::uint8_t* to) const;
};

/// Gives the codes of a weight in blocks: some rows, of all channels, or some channels, a band, of all rows. A block has the codes that
/// are neighbours where they are stored.
class CodeSource {
 public:
  CodeSource() = default;
  CodeSource(const CodeSource&) = delete;
  CodeSource& operator=(const CodeSource&) = delete;
  virtual ~CodeSource() = default;

  /// Whether blocks are bands.
  virtual bool in_bands() const { return false; }
  /// The rows of a block that costs the least, a power of two; or the channels of a band, a multiple of kBandUnit.
  virtual std::int64_t block() const = 0;
  /// The codes of rows, or of channels, [begin, end), valid as long as this and until `memory`, in which they may lie, changes. `begin` is a
  /// multiple of block(). Several threads may read at the same time, each with a memory of its own.
  virtual Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const = 0;
};

/// The channels of every band are a multiple of it: 32 codes of any width end where a word of 32 bits does.
constexpr std::int64_t kBandUnit = 32;

/// The channels of a band from which rows of a byte a code are put together, where those of the cheapest block are `channels`: a row's part
/// consists of whole lines of a cache then, which no other thread writes to.
constexpr std::int64_t whole_lines(std::int64_t channels) {
  constexpr std::int64_t kLines = 128;
  return (kLines + channels - 1) / channels * channels;
}

/// The codes of a QuantTensor, which has to live as long.
class CodesOf final : public CodeSource {
 public:
  explicit CodesOf(const QuantTensor& q) : CodesOf(q, q.codes.data()) {}
  /// Codes that lie elsewhere.
  CodesOf(const QuantTensor& q, const std::uint8_t* codes) : codes_(codes), k_(q.k), pitch_(q.k * code_bytes(q.scheme.codes)) {}
  std::int64_t block() const override { return 1; }
  Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>&) const override {
    return CodeRows{begin, end, 0, k_, codes_ + begin * pitch_, pitch_};
  }

 private:
  const std::uint8_t* codes_;
  std::int64_t k_, pitch_;
};

}  // namespace nibble
