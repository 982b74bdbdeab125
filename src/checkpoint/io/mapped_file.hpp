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

/// io_error for a file of a checkpoint's `directory` that is a link to a place outside: converting it could publish a file that is no part
/// of the checkpoint. Links of Hugging Face's cache to models--NAME/blobs count as inside.
Status check_inside(const std::filesystem::path& directory, const std::filesystem::path& file);

/// The names in a directory, without "." and "..". std::filesystem's iterator is not used: even its functions with error codes end the
/// process without memory.
Result<std::vector<std::string>> names_in(const std::filesystem::path& directory);

/// The bytes of a regular file.
Result<std::string> read_file(const std::filesystem::path& path);

/// A mapping for views: only touched pages take memory, and views share them. A page that no longer exists, because the file was truncated
/// or its disk fails, raises SIGBUS; nibble itself reads the file instead.
class MappedFile {
 public:
  static Result<std::shared_ptr<const MappedFile>> open(const std::filesystem::path& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  /// Reads the file from byte `offset` on into `to`. io_error when the file ends before.
  Status read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  friend Result<std::string> read_file(const std::filesystem::path& path);
  explicit MappedFile(std::filesystem::path path) : path_(std::move(path)) {}
  /// Opens the file and returns its current length.
  Result<std::size_t> open();

  std::filesystem::path path_;
  int fd_ = -1;
  std::span<const std::byte> bytes_;
};

}  // namespace nibble::storage
