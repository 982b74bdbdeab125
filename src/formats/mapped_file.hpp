// A file's bytes as read-only memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "nibble/status.hpp"

namespace nibble::storage {

/// "cannot DOING PATH: No space left on device", from errno. ENOENT is not_found, EEXIST already_exists, the rest io_error.
Status errno_status(std::string_view doing, const std::filesystem::path& path);

/// io_error for a file of a checkpoint's `directory` that links lead out of it: to convert it would publish a file of the user's
/// that is no part of the checkpoint. Hugging Face's cache is made of links to models--NAME/blobs, which count as inside.
Status check_inside(const std::filesystem::path& directory, const std::filesystem::path& file);

/// Mapped, not read: only the pages that are touched take memory, and several views share them. The file must not shrink
/// meanwhile; touching a page that is gone raises SIGBUS, as with every mapped file.
class MappedFile {
 public:
  static Result<std::shared_ptr<const MappedFile>> open(const std::filesystem::path& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace nibble::storage
