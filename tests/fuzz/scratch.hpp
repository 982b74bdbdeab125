// A directory for the files of a fuzz target, in memory where there is such a file system; removed at exit.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace nibble::fuzz {
namespace fs = std::filesystem;

struct Scratch {
  fs::path root = (fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path()) /
                  ("nibble-fuzz-" + std::to_string(::getpid()));
  Scratch() { fs::create_directories(root); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { fs::remove_all(root); }
  void write(const fs::path& name, std::string_view text) const {
    std::ofstream(root / name, std::ios::binary).write(text.data(), static_cast<std::streamsize>(text.size()));
  }
};

}  // namespace nibble::fuzz
