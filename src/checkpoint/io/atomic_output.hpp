// Outputs that appear whole or not at all: written under a temporary name beside the final one, renamed when complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "nibble/status.hpp"

namespace nibble::storage {

/// Removes partial outputs of `path` that killed processes left beside it; returns their names.
std::vector<std::string> sweep(const std::filesystem::path& path);

/// A file that appears with commit(); without it, nothing is left behind.
class OutputFile {
 public:
  /// already_exists when `path` does, unless `overwrite` and it is a regular file, no link to one.
  static Result<OutputFile> create(const std::filesystem::path& path, bool overwrite);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  Status write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Flushes to the disk and renames.
  Status commit();

 private:
  OutputFile() = default;
  std::filesystem::path path_, temporary_;
  bool overwrite_ = false;
  int fd_ = -1;
};

/// The same for a directory: fill path(), then commit().
class OutputDirectory {
 public:
  /// already_exists when `path` does, unless `overwrite` and it is a directory whose every file was written by commit(): a mistyped
  /// path must not cost the user anything else.
  static Result<OutputDirectory> create(const std::filesystem::path& path, bool overwrite);
  OutputDirectory(OutputDirectory&& other) noexcept;
  OutputDirectory& operator=(OutputDirectory&&) = delete;
  ~OutputDirectory();

  /// The directory to write to until commit(), which adds ".nibble", the list of its files.
  const std::filesystem::path& path() const { return temporary_; }
  Status commit();

 private:
  OutputDirectory() = default;
  std::filesystem::path path_, temporary_;
  bool overwrite_ = false;
  int lock_ = -1;  // on the directory: sweep() leaves it alone
};

}  // namespace nibble::storage
