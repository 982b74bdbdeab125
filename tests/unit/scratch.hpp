// Temporary directories and small checkpoints for tests.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nibble/checkpoint.hpp"

namespace nibble::testing {

namespace fs = std::filesystem;

/// A fresh directory, removed with everything in it.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "nibble-test-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { fs::remove_all(root_); }

  fs::path operator/(std::string_view name) const { return root_ / name; }
  const fs::path& path() const { return root_; }

 private:
  fs::path root_;
};

inline void write_text(const fs::path& path, std::string_view text) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Names in a directory, hidden ones included: nothing may be left behind by a failure.
inline std::set<std::string> names_in(const fs::path& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename().string());
  return names;
}

/// A safetensors file with any header, right or wrong.
inline std::string raw_safetensors(std::string_view header, std::size_t data_bytes) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) file += static_cast<char>(header.size() >> shift & 0xff);
  return file.append(header).append(data_bytes, 'x');
}

inline TensorSource source(std::string name, Tensor tensor) {
  TensorSource result{std::move(name), tensor.dtype, tensor.shape, {}};
  result.produce = [bytes = std::move(tensor.bytes)]() -> Result<std::vector<std::byte>> { return bytes; };
  return result;
}

/// Elements 0, 1, 2, ... (mod 7) / 4: exact in every float type.
inline Tensor counting(DType dtype, std::vector<std::int64_t> shape) {
  Tensor tensor(dtype, std::move(shape));
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, static_cast<float>(i % 7) / 4);
  return tensor;
}

/// A tensor of any type with all bytes alike.
inline Tensor filled(DType dtype, std::vector<std::int64_t> shape, unsigned char byte) {
  Tensor tensor(dtype, std::move(shape));
  std::fill(tensor.bytes.begin(), tensor.bytes.end(), std::byte{byte});
  return tensor;
}

/// While alive, writing a file beyond `bytes` fails, as on a full disk.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

/// Fails unless `status` has this code and its one line contains all of `parts`.
inline void expect_error(const Status& status, StatusCode code, const std::vector<std::string>& parts) {
  EXPECT_EQ(name(status.code()), name(code)) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  for (const std::string& part : parts)
    EXPECT_NE(status.message().find(part), std::string::npos) << part << " in: " << status.message();
}

}  // namespace nibble::testing
