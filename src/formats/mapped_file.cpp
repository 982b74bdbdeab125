#include "formats/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <system_error>

#include "core/error.hpp"

namespace nibble::storage {

Status errno_status(std::string_view doing, const std::filesystem::path& path) {
  const int code = errno;
  const StatusCode status = code == ENOENT   ? StatusCode::not_found
                            : code == EEXIST ? StatusCode::already_exists
                                             : StatusCode::io_error;
  return error(status, "cannot {} {}: {}", doing, path.string(), std::generic_category().message(code));
}

Status check_inside(const std::filesystem::path& directory, const std::filesystem::path& file) {
  std::error_code failure, ignored;
  const std::filesystem::path real = std::filesystem::canonical(file, failure);
  if (failure) return {};  // whoever opens it says why
  const std::filesystem::path own = std::filesystem::canonical(directory.empty() ? "." : directory, ignored);
  std::filesystem::path root;
  for (auto part = own.begin(); part != own.end(); ++part) {
    root /= *part;
    if (const auto next = std::next(part); next != own.end() && *next == "snapshots" && part->string().starts_with("models--"))
      break;
  }
  if (*real.lexically_relative(root).begin() != "..") return {};
  return error(StatusCode::io_error, "{} is a link to {}, which is outside the checkpoint; put a copy in its place",
               file.string(), real.string());
}

Result<std::shared_ptr<const MappedFile>> MappedFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a pipe by mistake must not hang.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno_status("open", path);
  struct stat stat {};
  Status status;
  void* data = nullptr;
  std::size_t size = 0;
  if (::fstat(fd, &stat) != 0) {
    status = errno_status("stat", path);
  } else if (!S_ISREG(stat.st_mode)) {
    status = error(StatusCode::io_error, "cannot read {}: not a regular file", path.string());
  } else if (stat.st_size > 0) {  // mmap refuses empty files
    size = static_cast<std::size_t>(stat.st_size);
    data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) status = errno_status("map", path);
  }
  ::close(fd);
  if (!status.ok()) return status;
  return std::shared_ptr<const MappedFile>(new MappedFile({static_cast<const std::byte*>(data), size}));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace nibble::storage
