// Runs the nibble binary and returns its output, exit code and files.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace nibble::test {

struct Finished {
  int exit_code = -1;
  std::string out, err;
};

struct RunOptions {
  std::string stdout_to = {};  // a path instead of a captured file
  bool closed_pipe = false;    // stdout is a pipe without a reader
  int interrupt_after_ms = 0;  // send `signal` then, `signals` times, 2 ms apart
  int signal = SIGINT, signals = 1;
  std::vector<std::string> environment = {};  // "NAME=value", added
};

/// Runs `nibble arguments...` to its end, without a shell.
Finished nibble(const std::vector<std::string>& arguments, const RunOptions& options = {});

/// The parsed standard output of a run that must succeed with valid JSON of schema 1.
nlohmann::json nibble_json(const std::vector<std::string>& arguments);

std::string slurp(const std::filesystem::path& path);
void spit(const std::filesystem::path& path, const std::string& contents);
/// Names of everything in a directory, sorted.
std::vector<std::string> listing(const std::filesystem::path& directory);

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The formats of the shared checkpoints that are quantized.
inline const std::vector<std::string> kFormats = {"awq", "gptq", "compressed-tensors"};

/// A directory of its own for each test, and checkpoints that all tests share (made once per process).
class Cli : public ::testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// A name in the test's own directory.
  std::string at(const std::string& name) const { return (directory_ / name).string(); }
  /// A shared checkpoint: "float", "awq", "gptq" or "compressed-tensors", all of the tiny sample with groups of 16.
  static std::string checkpoint(const std::string& name);
  /// A copy of it that a test may damage.
  std::string copy_of(const std::string& name) const;

  std::filesystem::path directory_;
};

}  // namespace nibble::test
