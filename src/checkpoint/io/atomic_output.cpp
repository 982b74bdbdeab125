#include "checkpoint/io/atomic_output.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <string>
#include <system_error>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/io/json.hpp"
#include "checkpoint/io/mapped_file.hpp"
#include "core/error.hpp"

namespace nibble::storage {
namespace fs = std::filesystem;
namespace {

/// An absolute path whose last component is a name: "out/" and "./out" become ".../out".
Result<fs::path> normalized(const fs::path& path) {
  std::error_code failure;
  fs::path full = fs::absolute(path, failure).lexically_normal();
  if (!full.has_filename()) full = full.parent_path();
  if (failure || path.empty() || !full.has_filename())
    return error(StatusCode::invalid_argument, "'{}' cannot be the name of an output", path.string());
  return full;
}

std::string_view kind(fs::file_type type) {
  switch (type) {
    case fs::file_type::regular: return "a file";
    case fs::file_type::directory: return "a directory";
    case fs::file_type::symlink: return "a symbolic link";
    case fs::file_type::block:
    case fs::file_type::character: return "a device";
    case fs::file_type::fifo: return "a named pipe";
    case fs::file_type::socket: return "a socket";
    default: return "neither a file nor a directory";
  }
}

/// In every directory that nibble writes: the names of its files, a line each. A directory is replaced while it holds no others.
constexpr std::string_view kManifest = ".nibble";
constexpr std::string_view kManifestTitle =
    "Written by nibble, which overwrites this directory only while it holds no other files:";

/// Adds the paths of everything below `directory` except directories, relative to `top`.
Status add_files_below(const fs::path& directory, const fs::path& top, std::vector<std::string>& files) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> names, names_in(directory));
  std::error_code ignored;
  for (const std::string& name : names) {
    const fs::path path = directory / name;
    if (fs::symlink_status(path, ignored).type() == fs::file_type::directory)
      NIBBLE_RETURN_IF_ERROR(add_files_below(path, top, files));
    else
      files.push_back(path.lexically_relative(top).string());
  }
  return {};
}

Result<std::vector<std::string>> files_below(const fs::path& directory) {
  std::vector<std::string> files;
  NIBBLE_RETURN_IF_ERROR(add_files_below(directory, directory, files));
  return files;
}

Status write_manifest(const fs::path& directory) {
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> files, files_below(directory));
  std::string text(kManifestTitle);
  for (const std::string& file : files)
    if (file.find('\n') == std::string::npos) text += "\n" + file;  // a name of two lines would stand for two files
  NIBBLE_ASSIGN_OR_RETURN(auto manifest, OutputFile::create(directory / kManifest, false));
  NIBBLE_RETURN_IF_ERROR(manifest.write_at(0, std::as_bytes(std::span(text += '\n'))));
  return manifest.commit();
}

/// already_exists unless the directory holds only files that its manifest names.
Status check_own(const fs::path& directory) {
  std::unordered_set<std::string> own{std::string(kManifest)};
  const Result<std::string> manifest = read_file(directory / kManifest);  // without memory a stream would end early
  if (manifest.ok() && manifest->starts_with(kManifestTitle))
    for (std::string_view rest = std::string_view(*manifest).substr(kManifestTitle.size()); !rest.empty();) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      own.emplace(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::string> files, files_below(directory));
  for (const std::string& file : files)
    if (!own.contains(file))
      return error(StatusCode::already_exists, "{} exists and holds {}, which nibble did not write; remove one of them first",
                   directory.string(), printable(file));
  return {};
}

Status check_replaceable(const fs::path& path, bool directory, bool overwrite) {
  std::error_code failure;
  const fs::file_type found = fs::symlink_status(path, failure).type();
  if (found == fs::file_type::not_found) return {};
  if (failure) return error(StatusCode::io_error, "cannot stat {}: {}", path.string(), failure.message());
  if (!overwrite) return error(StatusCode::already_exists, "{} exists; choose another name or overwrite it", path.string());
  const fs::file_type wanted = directory ? fs::file_type::directory : fs::file_type::regular;
  if (found != wanted)
    return error(StatusCode::already_exists, "{} exists and is {}, not {}; choose another name", path.string(), kind(found),
                 kind(wanted));
  return directory ? check_own(path) : Status();
}

/// Calls make(name) with new names until it succeeds; the process id alone is not unique among threads and leftovers of killed processes.
template <class Make>
Result<fs::path> make_temporary(const fs::path& path, std::string_view purpose, Make make) {
  static std::atomic<unsigned> counter{0};
  while (true) {
    fs::path temporary =
        path.parent_path() / fmt::format(".{}.{}-{}-{}", path.filename().string(), purpose, ::getpid(), counter++);
    if (make(temporary)) return temporary;
    if (errno != EEXIST && errno != ENOTEMPTY) return errno_status("create", path);
  }
}

/// Locks an open file or directory, so that sweep() of another process, which may not see this process's id, leaves it alone. File systems
/// without locks have only the id.
void lock(int fd) { ::flock(fd, LOCK_EX | LOCK_NB); }

/// Whether `name` is a partial output of `output` from make_temporary() in a process that no longer exists.
bool is_left_behind(std::string_view name, const std::string& output) {
  const std::string prefix = fmt::format(".{}.partial-", output);
  if (!name.starts_with(prefix)) return false;
  name.remove_prefix(prefix.size());
  ::pid_t process = 0;
  unsigned number = 0;
  const char* const end = name.data() + name.size();
  const auto first = std::from_chars(name.data(), end, process);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '-' || process <= 0) return false;
  const auto second = std::from_chars(first.ptr + 1, end, number);
  return second.ec == std::errc() && second.ptr == end && ::kill(process, 0) != 0 && errno == ESRCH;
}

/// Removes a file, or a directory with its contents, without allocating: lack of memory may be the reason for the removal.
bool remove_all(int at, const char* path) noexcept {
  if (::unlinkat(at, path, 0) == 0) return true;
  const int fd = ::openat(at, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return false;
  alignas(dirent64) char entries[4096];
  for (ssize_t bytes; (bytes = ::getdents64(fd, entries, sizeof entries)) > 0;)
    for (ssize_t i = 0; i < bytes;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries + i);
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") remove_all(fd, entry->d_name);
      i += entry->d_reclen;
    }
  ::close(fd);
  return ::unlinkat(at, path, AT_REMOVEDIR) == 0;
}

/// Makes a rename durable. Not every file system supports it, and the data is safe already: failure is no error.
void sync_directory(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

std::vector<std::string> sweep(const fs::path& path) {
  std::vector<std::string> gone;
  const Result<fs::path> full = normalized(path);
  if (!full.ok()) return gone;
  const auto names = names_in(full->parent_path());
  if (!names.ok()) return gone;
  for (const std::string& name : *names) {
    if (!is_left_behind(name, full->filename().string())) continue;
    const fs::path partial = full->parent_path() / name;
    const int fd = ::open(partial.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) continue;
    struct stat stat {};
    if (::fstat(fd, &stat) == 0 && stat.st_uid == ::geteuid() && (S_ISREG(stat.st_mode) || S_ISDIR(stat.st_mode)) &&
        ::flock(fd, LOCK_EX | LOCK_NB) == 0 && remove_all(AT_FDCWD, partial.c_str()))
      gone.push_back(name);
    ::close(fd);
  }
  return gone;
}

Result<OutputFile> OutputFile::create(const fs::path& path, bool overwrite) {
  OutputFile file;
  NIBBLE_ASSIGN_OR_RETURN(file.path_, normalized(path));
  NIBBLE_RETURN_IF_ERROR(check_replaceable(file.path_, false, overwrite));
  file.overwrite_ = overwrite;
  NIBBLE_ASSIGN_OR_RETURN(file.temporary_, make_temporary(file.path_, "partial", [&file](const fs::path& name) {
                            file.fd_ = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
                            return file.fd_ >= 0;
                          }));
  lock(file.fd_);
  return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      overwrite_(other.overwrite_),
      fd_(std::exchange(other.fd_, -1)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

Status OutputFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno_status(fmt::format("write {} bytes at byte {} of", bytes.size(), offset), path_);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
  return {};
}

Status OutputFile::commit() {
  const fs::path parent = path_.parent_path();  // nothing that could fail comes after the rename
  if (::fsync(fd_) != 0) return errno_status("write", path_);
  if (::close(std::exchange(fd_, -1)) != 0) return errno_status("close", path_);
  NIBBLE_RETURN_IF_ERROR(check_replaceable(path_, false, overwrite_));  // it may have appeared meanwhile
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) return errno_status("rename the finished file to", path_);
  temporary_.clear();
  sync_directory(parent);
  return {};
}

Result<OutputDirectory> OutputDirectory::create(const fs::path& path, bool overwrite) {
  OutputDirectory directory;
  NIBBLE_ASSIGN_OR_RETURN(directory.path_, normalized(path));
  NIBBLE_RETURN_IF_ERROR(check_replaceable(directory.path_, true, overwrite));
  directory.overwrite_ = overwrite;
  NIBBLE_ASSIGN_OR_RETURN(directory.temporary_, make_temporary(directory.path_, "partial", [](const fs::path& name) {
                            return ::mkdir(name.c_str(), 0777) == 0;
                          }));
  directory.lock_ = ::open(directory.temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory.lock_ >= 0) lock(directory.lock_);
  return directory;
}

OutputDirectory::OutputDirectory(OutputDirectory&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      overwrite_(other.overwrite_),
      lock_(std::exchange(other.lock_, -1)) {}

OutputDirectory::~OutputDirectory() {
  if (lock_ >= 0) ::close(lock_);
  if (!temporary_.empty()) remove_all(AT_FDCWD, temporary_.c_str());
}

Status OutputDirectory::commit() {
  const fs::path parent = path_.parent_path();  // nothing that could fail comes after the renames
  NIBBLE_RETURN_IF_ERROR(check_replaceable(path_, true, overwrite_));
  NIBBLE_RETURN_IF_ERROR(write_manifest(temporary_));
  sync_directory(temporary_);
  // A directory cannot replace a non-empty one by renaming: the old one is renamed first, and restored if the second renaming fails.
  std::error_code failure;
  fs::path old;
  if (fs::exists(fs::symlink_status(path_, failure))) {
    NIBBLE_ASSIGN_OR_RETURN(
        old, make_temporary(path_, "old", [this](const fs::path& name) { return ::rename(path_.c_str(), name.c_str()) == 0; }));
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const Status status = errno_status("rename the finished directory to", path_);
    if (!old.empty()) ::rename(old.c_str(), path_.c_str());
    return status;
  }
  temporary_.clear();
  sync_directory(parent);
  if (!old.empty()) remove_all(AT_FDCWD, old.c_str());
  return {};
}

}  // namespace nibble::storage
