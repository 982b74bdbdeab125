#include "cli/cli.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <thread>

extern char** environ;

namespace nibble::test {
namespace fs = std::filesystem;
namespace {

// Removed when the process ends.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "nibble-cli-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Scratch() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

const fs::path& scratch() {
  static const Scratch made;
  return made.path();
}

// The path of the tool, also for a build that was copied to another machine.
std::string program() {
  const char* moved = std::getenv("NIBBLE_CLI");
  return moved != nullptr ? moved : NIBBLE_CLI;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (std::string& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Finished nibble(const std::vector<std::string>& arguments, const RunOptions& options) {
  const fs::path out = scratch() / "stdout", err = scratch() / "stderr";
  std::vector<std::string> command = {program()};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<std::string> environment = options.environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  int ends[2] = {-1, -1};
  if (options.closed_pipe) {
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    close(ends[0]);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  } else {
    const std::string target = options.stdout_to.empty() ? out.string() : options.stdout_to;
    posix_spawn_file_actions_addopen(&actions, 1, target.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  }
  posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  pid_t child = -1;
  EXPECT_EQ(posix_spawn(&child, command[0].c_str(), &actions, nullptr, pointers(command).data(), pointers(environment).data()),
            0);
  posix_spawn_file_actions_destroy(&actions);
  if (ends[1] >= 0) close(ends[1]);
  if (options.interrupt_after_ms > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.interrupt_after_ms));
    for (int i = 0; i < options.signals; ++i) {
      kill(child, options.signal);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  Finished finished;
  finished.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  finished.out = options.stdout_to.empty() && !options.closed_pipe ? slurp(out) : "";
  finished.err = slurp(err);
  return finished;
}

nlohmann::json nibble_json(const std::vector<std::string>& arguments) {
  const Finished finished = nibble(arguments);
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  nlohmann::json json = nlohmann::json::parse(finished.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << finished.out;
  EXPECT_EQ(json.value("schema", 0), 1);
  return json;
}

std::string slurp(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

void spit(const fs::path& path, const std::string& contents) {
  std::ofstream stream(path, std::ios::binary);
  stream << contents;
  ASSERT_TRUE(stream.flush().good()) << path;
}

std::vector<std::string> listing(const fs::path& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

void Cli::SetUp() {
  directory_ = scratch() / ::testing::UnitTest::GetInstance()->current_test_info()->name();
  fs::create_directory(directory_);
}

void Cli::TearDown() { fs::remove_all(directory_); }

std::string Cli::checkpoint(const std::string& name) {
  const std::string path = (scratch() / name).string();
  if (fs::exists(path)) return path;
  const Finished made = name == "float" ? nibble({"sample", path, "--shapes", "tiny", "--vocab", "64"})
                                        : nibble({"quantize", checkpoint("float"), path, "--format", name, "--scheme",
                                                  std::string_view(name) == "awq" ? "u4zg16" : "u4b8g16"});
  EXPECT_EQ(made.exit_code, 0) << made.err;
  return path;
}

std::string Cli::copy_of(const std::string& name) const {
  const fs::path copy = directory_ / name;
  fs::copy(checkpoint(name), copy, fs::copy_options::recursive);
  return copy.string();
}

}  // namespace nibble::test
