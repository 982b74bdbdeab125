// A file's bytes as read-only memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"

namespace nibble::storage {

/// "cannot DOING PATH: No space left on device", from errno. ENOENT is not_found, EEXIST already_exists, the rest io_error.
Status errno_status(std::string_view doing, const std::filesystem::path& path);

/// io_error for a file of a checkpoint's `directory` that links lead out of it: to convert it would publish a file of the user's
/// that is no part of the checkpoint. Hugging Face's cache is made of links to models--NAME/blobs, which count as inside.
Status check_inside(const std::filesystem::path& directory, const std::filesystem::path& file);

/// The names in a directory, without "." and "..". Not std::filesystem's iterator, whose steps that report errors cannot run out of
/// memory without ending the process.
Result<std::vector<std::string>> names_in(const std::filesystem::path& directory);

/// All of a regular file.
Result<std::string> read_file(const std::filesystem::path& path);

/// Mapped for whoever wants to look at its bytes: only the pages that are touched take memory, and several views share them. A page
/// that is gone, because the file was cut off or its disk fails, raises SIGBUS; what nibble itself wants to know it reads.
class MappedFile {
 public:
  static Result<std::shared_ptr<const MappedFile>> open(const std::filesystem::path& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  /// Fills `to` with what is in the file from byte `offset` on. io_error where that ends before.
  Status read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  friend Result<std::string> read_file(const std::filesystem::path& path);
  explicit MappedFile(std::filesystem::path path) : path_(std::move(path)) {}
  /// Opens it, and says how long it is now.
  Result<std::size_t> open();

  std::filesystem::path path_;
  int fd_ = -1;
  std::span<const std::byte> bytes_;
};

}  // namespace nibble::storage
