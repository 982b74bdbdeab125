// Standard output, error lines and small files.
#include "terminal/output.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "nibble/cuda.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

int g_output_errno = 0;

Status io_error(std::string_view what, const std::filesystem::path& path, int number) {
  return {StatusCode::io_error, fmt::format("{} {}: {}", what, path.string(), std::strerror(number))};
}

}  // namespace

void print(std::string_view text) {
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() && g_output_errno == 0) g_output_errno = errno;
}

std::string to_text(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

Status print_result(const std::string& json, const std::function<std::string()>& text, const std::function<Json()>& document) {
  if (json != "-") print(fitted(text()));
  if (json.empty()) return {};
  if (json != "-") return write_file(json, to_text(document()));
  print(to_text(document()));
  return {};
}

Status finish_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 && g_output_errno == 0) g_output_errno = errno;
  if (g_output_errno == 0 || g_output_errno == EPIPE) return {};
  return io_error("cannot write to", "standard output", g_output_errno);
}

Json gpu_description(const GpuInfo& gpu) {
  return {{"gpu", gpu.name},
          {"compute_capability", fmt::format("{}.{}", gpu.compute_capability / 10, gpu.compute_capability % 10)},
          {"sms", gpu.sms},
          {"l2_bytes", gpu.l2_bytes},
          {"memory_bytes", gpu.memory_bytes},
          {"estimated_gbytes_per_s", gpu.read_gbytes_per_s}};
}

void complain(std::string_view text) { fmt::print(stderr, "nibble: {}\n", printable(text)); }

Status write_file(const std::filesystem::path& path, std::string_view contents) {
  std::error_code missing;
  const std::filesystem::path file = std::filesystem::canonical(path, missing);  // a link stays one
  const auto type = std::filesystem::status(path, missing).type();
  const bool through = type == std::filesystem::file_type::character || type == std::filesystem::file_type::fifo;
  if (!through && type != std::filesystem::file_type::regular && type != std::filesystem::file_type::not_found)
    return {StatusCode::io_error, fmt::format("cannot write {}: it exists and is not a file", path.string())};
  std::string temporary = (file.empty() ? path : file).string() + ".XXXXXX";
  const int fd = through ? open(path.c_str(), O_WRONLY | O_CLOEXEC) : mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return io_error("cannot write", path, errno);
  int failure = !through && fchmod(fd, 0644) != 0 ? errno : 0;
  while (failure == 0 && !contents.empty()) {
    const ssize_t written = ::write(fd, contents.data(), contents.size());
    if (written > 0) contents.remove_prefix(static_cast<std::size_t>(written));
    if (written < 0 && errno != EINTR) failure = errno;
  }
  if (close(fd) != 0 && failure == 0) failure = errno;
  if (failure == 0 && !through && std::rename(temporary.c_str(), (file.empty() ? path : file).c_str()) != 0) failure = errno;
  if (failure == 0) return {};
  if (!through) unlink(temporary.c_str());
  return io_error("cannot write", path, failure);
}

Status read_file(const std::filesystem::path& path, std::string& contents) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) return io_error("cannot open", path, errno);
  contents.clear();
  char part[4096];
  while (const std::size_t bytes = std::fread(part, 1, sizeof part, file.get())) contents.append(part, bytes);
  if (std::ferror(file.get()) != 0) return io_error("cannot read", path, errno);
  return {};
}

std::string human_bytes(double bytes) {
  if (bytes < 1e3) return fmt::format("{:.0f} B", bytes);
  if (bytes < 1e6) return fmt::format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return fmt::format("{:.1f} MB", bytes / 1e6);
  return fmt::format("{:.2f} GB", bytes / 1e9);
}

std::string human_binary(std::int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (value < 0x1p20) return fmt::format("{:.4g} KiB", value * 0x1p-10);
  if (value < 0x1p30) return fmt::format("{:.4g} MiB", value * 0x1p-20);
  return fmt::format("{:.3g} GiB", value * 0x1p-30);
}

std::string counted(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

std::string without_numbers(std::string_view name) {
  std::string text;
  for (;;) {
    const std::string_view part = name.substr(0, name.find('.'));
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    text += number ? "*" : part;
    if (part.size() == name.size()) return text;
    text += '.';
    name.remove_prefix(part.size() + 1);
  }
}

std::optional<ExpertName> expert_in(std::string_view name) {
  constexpr std::string_view kExperts = "experts.";
  constexpr std::size_t kMostDigits = 9;
  const std::size_t found = name.rfind(kExperts);
  if (found == std::string_view::npos) return std::nullopt;
  const std::size_t begin = found + kExperts.size(), end = std::min(name.find('.', begin), name.size());
  const std::string digits(name.substr(begin, end - begin));
  if (digits.empty() || digits.size() > kMostDigits || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return ExpertName{std::string(name.substr(0, begin)), std::string(name.substr(end)), std::stoll(digits)};
}

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

}  // namespace nibble::cli
