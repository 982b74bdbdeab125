#include "checkpoint/io/mapped_file.hpp"

#include <dirent.h>
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
  if (failure) return {};  // opening it reports the reason
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

Result<std::size_t> MappedFile::open() {
  // O_NONBLOCK: opening a pipe must not hang.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) return errno_status("open", path_);
  struct stat stat {};
  if (::fstat(fd_, &stat) != 0) return errno_status("stat", path_);
  if (!S_ISREG(stat.st_mode)) return error(StatusCode::io_error, "cannot read {}: not a regular file", path_.string());
  return static_cast<std::size_t>(stat.st_size);
}

Result<std::shared_ptr<const MappedFile>> MappedFile::open(const std::filesystem::path& path) {
  const std::shared_ptr<MappedFile> file(new MappedFile(path));
  NIBBLE_ASSIGN_OR_RETURN(const std::size_t size, file->open());
  if (size == 0) return std::shared_ptr<const MappedFile>(file);  // mmap refuses empty files
  void* const data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file->fd_, 0);
  if (data == MAP_FAILED) return errno_status("map", path);
  file->bytes_ = {static_cast<const std::byte*>(data), size};
  return std::shared_ptr<const MappedFile>(file);
}

Status MappedFile::read(std::uint64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = ::pread(fd_, to.data(), to.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_status("read", path_);
    if (got == 0)
      return error(StatusCode::io_error, "cannot read {}: it ends at byte {}, where it did not when it was opened",
                   path_.string(), offset);
    to = to.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return {};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  if (fd_ >= 0) ::close(fd_);
}

Result<std::vector<std::string>> names_in(const std::filesystem::path& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), ::closedir);
  if (entries == nullptr) return errno_status("list", directory);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(entries.get()))
    if (const std::string_view name = entry->d_name; name != "." && name != "..") names.emplace_back(name);
  if (errno != 0) return errno_status("list", directory);
  return names;
}

Result<std::string> read_file(const std::filesystem::path& path) {
  MappedFile file(path);
  NIBBLE_ASSIGN_OR_RETURN(const std::size_t size, file.open());
  std::string text(size, '\0');
  NIBBLE_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

}  // namespace nibble::storage
