// The safetensors container: 8 bytes little-endian header length, a JSON header, row-major data without holes.
//
//   {"__metadata__": {"format": "pt"}, "a.weight": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}, ...}
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/io/atomic_output.hpp"
#include "nibble/checkpoint.hpp"
#include "nibble/status.hpp"

namespace nibble::storage {

using Metadata = std::vector<std::pair<std::string, std::string>>;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by file offset; `file` is left empty
  Metadata metadata;
};

/// Reads and checks a whole header; `file` is the file's bytes, or the header's and `size` the file's, `source` its name for messages. After success every tensor
/// lies inside the file, its size agrees with its shape, and products of its dimensions (zeros left out) fit in 63 bits.
/// Errors: corrupt_data, with the tensor, the byte offset in the file and the values.
Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> file, std::string_view source, std::uint64_t size = 0);

/// The number of bytes that parse_safetensors reads, from the first eight of a file.
std::uint64_t safetensors_header_bytes(std::span<const std::byte> beginning);

/// "F16" for DType::f16; "" for the types safetensors cannot hold (u4b8, ...).
std::string_view safetensors_dtype(DType dtype);

/// Names of up to 1024 bytes without control characters, so that messages and tables stay one line.
Status check_tensor_name(std::string_view tensor_name);

/// Stored size. invalid_argument when a dimension is negative, the product overflows, or sub-byte elements end inside a byte.
Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape);

/// Readers map files and expect aligned elements, and the format has no padding. With tensors in descending order of this
/// number (any order among equals) every tensor is aligned: first those of a multiple of 8 bytes, then by element size.
int alignment_class(DType dtype, std::uint64_t bytes);

/// Writes a file tensor by tensor, for when shapes are known only as tensors are made: the header comes first in the file,
/// so room for it is reserved and filled at the end.
class SafetensorsWriter {
 public:
  /// An upper bound of what a tensor adds to the header.
  static std::size_t header_bytes(std::string_view tensor_name, std::size_t rank);

  /// `header_room`: bytes reserved for the tensors of the header, and for the metadata of finish(); this metadata is added to it. The first
  /// tensor begins at a multiple of `alignment` bytes.
  static Result<SafetensorsWriter> create(const std::filesystem::path& path, const Metadata& metadata, std::size_t header_room,
                                          bool overwrite, std::size_t alignment = 8);

  /// The tensor is `bytes`, followed by `padding` zeros. invalid_argument: a bad or repeated name, a type safetensors does not have, bytes
  /// that do not fit the shape.
  Status append(std::string_view name, DType dtype, std::span<const std::int64_t> shape, std::span<const std::byte> bytes,
                std::size_t padding = 0);
  /// Completes the file under its final name. Without it, nothing is left behind. `metadata`: of a writer that create() gave none, for when
  /// it is known only as tensors are made.
  Status finish(const Metadata& metadata = {});
  std::uint64_t data_bytes() const { return data_bytes_; }

 private:
  explicit SafetensorsWriter(OutputFile file) : file_(std::move(file)) {}

  OutputFile file_;
  std::string header_;  // each entry ends in a comma; finish() turns the last one into the closing brace
  std::unordered_set<std::string> names_;
  std::uint64_t data_begin_ = 0;
  std::uint64_t data_bytes_ = 0;
};

}  // namespace nibble::storage
