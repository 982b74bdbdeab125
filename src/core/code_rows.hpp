// The codes of a weight, by rows: those of a QuantTensor, or of a checkpoint that decodes a block of rows at a time.
//
// Packing reads codes through a CodeSource only, so that a weight can go from a file into a layout without an array of all of its codes.
#pragma once

#include <cstdint>
#include <vector>

#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// The codes of rows (output channels) [begin, end), where they lie.
struct CodeRows {
  std::int64_t begin = 0, end = 0;
  const std::uint8_t* data = nullptr;  // of row `begin`
  std::int64_t pitch = 0;              // bytes from a row to the next
  /// Codes of 4 bits, two to a byte, the first one in the low half; else as in QuantTensor::codes. The upper half of a last byte is anything.
  bool pairs = false;

  const std::uint8_t* row(std::int64_t n) const { return data + (n - begin) * pitch; }
  /// Code k of a row, not of a dense weight.
  std::uint8_t code(const std::uint8_t* row, std::int64_t k) const {
    return pairs ? static_cast<std::uint8_t>(row[k / 2] >> (k % 2 * 4) & 15) : row[k];
  }
  /// The first k codes of row n, not of a dense weight, as QuantTensor::codes has them.
  void copy_bytes(std::int64_t n, std::int64_t k, std::uint8_t* to) const;
};

/// Gives the codes of a weight in blocks of rows.
class CodeSource {
 public:
  CodeSource() = default;
  CodeSource(const CodeSource&) = delete;
  CodeSource& operator=(const CodeSource&) = delete;
  virtual ~CodeSource() = default;

  /// The rows of a block that costs the least: a power of two.
  virtual std::int64_t block_rows() const = 0;
  /// The codes of rows [begin, end), valid as long as this and until `memory`, in which they may lie, changes. Several threads may read at
  /// the same time, each with a memory of its own.
  virtual Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>& memory) const = 0;
};

/// The codes of a QuantTensor, which has to live as long.
class CodesOf final : public CodeSource {
 public:
  explicit CodesOf(const QuantTensor& q) : q_(q) {}
  std::int64_t block_rows() const override { return 1; }
  Result<CodeRows> read(std::int64_t begin, std::int64_t end, std::vector<std::uint8_t>&) const override {
    const std::int64_t pitch = q_.k * code_bytes(q_.scheme.codes);
    return CodeRows{begin, end, q_.codes.data() + begin * pitch, pitch};
  }

 private:
  const QuantTensor& q_;
};

}  // namespace nibble
