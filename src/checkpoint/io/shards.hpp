// The files of a checkpoint, mapped, with the tensors of all of them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/io/mapped_file.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "nibble/checkpoint.hpp"

namespace nibble::storage {

inline constexpr std::string_view kIndexName = "model.safetensors.index.json";

struct Shards {
  std::vector<std::shared_ptr<const MappedFile>> files;
  std::vector<TensorInfo> tensors;                  // by file name, then offset
  std::vector<const MappedFile*> file;              // of each tensor
  std::vector<const std::byte*> data;               // of each tensor: mapped, or read if detection needs it
  std::vector<std::vector<std::byte>> read_before;  // those that were read
  Metadata metadata;                                // of all files; the first one to set a key wins
  std::vector<Note> notes;

  /// Reads a tensor's bytes.
  Result<Tensor> load(std::size_t tensor) const;
  /// Reads `count` elements from number `first` on, to where `to` says.
  Status load(std::size_t tensor, std::int64_t first, std::span<std::byte> to) const;
};

/// Reads and checks the header of a safetensors file, and none of its data. Errors: those of parse_safetensors.
Result<SafetensorsHeader> read_header(const MappedFile& file, const std::filesystem::path& path);

/// `path` is one file, or a directory: the files its index names, else every *.safetensors in it.
/// Errors: not_found (no such path, no safetensors, a shard the index names), corrupt_data (a bad header, an index that leaves
/// the directory or contradicts the shards, a tensor in two shards).
Result<Shards> open_shards(const std::filesystem::path& path);

}  // namespace nibble::storage
