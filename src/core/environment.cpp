#include "core/environment.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace nibble {
namespace fs = std::filesystem;
namespace {

std::string_view variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? std::string_view() : std::string_view(text);
}

/// Whether `word` is an item of a list with commas between them.
bool lists(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == word) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

/// A hierarchy of control groups that limits CPU time.
struct Hierarchy {
  bool unified = false;     // version 2
  std::string mount, root;  // where it is mounted, and which of its groups is visible there
};

/// From a line of /proc/self/mountinfo: "36 35 0:31 /docker/1a /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct".
std::optional<Hierarchy> hierarchy_of(const std::string& line) {
  const std::size_t dash = line.find(" - ");
  if (dash == std::string::npos) return {};
  std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
  std::string skipped, root, mount, type, source, options;
  before >> skipped >> skipped >> skipped >> root >> mount;
  after >> type >> source >> options;
  if (type != "cgroup2" && !(type == "cgroup" && lists(options, "cpu"))) return {};
  return Hierarchy{type == "cgroup2", mount, root};
}

/// The group of this process, from /proc/self/cgroup: "0::/user.slice" of version 2, "4:cpu,cpuacct:/docker/1a" of version 1.
std::optional<std::string> group_in(const Hierarchy& hierarchy, const fs::path& root) {
  std::ifstream in(root / "proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (hierarchy.unified ? controllers.empty() : lists(controllers, "cpu")) return line.substr(second + 1);
  }
  return {};
}

/// The quota in one group's own files.
std::optional<double> quota_of(const std::string& group, bool unified) {
  double quota = 0, period = 0;
  if (unified) {
    std::ifstream(group + "/cpu.max") >> quota >> period;  // "max 100000" leaves zeros
  } else {
    std::ifstream(group + "/cpu.cfs_quota_us") >> quota;  // -1: none
    std::ifstream(group + "/cpu.cfs_period_us") >> period;
  }
  if (!(quota > 0 && period > 0)) return {};
  return quota / period;
}

/// CPUs in the affinity mask, which Linux copies only into a buffer large enough for all CPUs the machine could have.
int allowed_cpus() {
  for (std::size_t words = 16; words <= 4096; words *= 2) {
    std::vector<unsigned long> mask(words);
    if (sched_getaffinity(0, words * sizeof mask[0], reinterpret_cast<cpu_set_t*>(mask.data())) == 0)
      return std::accumulate(mask.begin(), mask.end(), 0, [](int sum, unsigned long word) { return sum + std::popcount(word); });
  }
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace

Result<std::optional<int>> threads_of_environment() {
  const std::string_view text = variable("NIBBLE_NUM_THREADS");
  if (text.empty()) return std::optional<int>();
  int threads = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (failure == std::errc() && end == text.data() + text.size() && threads >= 1 && threads <= kMaxThreads)
    return std::optional<int>(threads);
  return error(StatusCode::invalid_argument, "NIBBLE_NUM_THREADS={} is not a whole number from 1 to {}", text, kMaxThreads);
}

Result<std::optional<Isa>> isa_of_environment() {
  const std::string_view text = variable("NIBBLE_ISA");
  if (text.empty()) return std::optional<Isa>();
  std::string known;
  for (const Isa isa : kAllIsas) {
    if (backend(isa) != Backend::cpu) continue;
    if (name(isa) == text) return std::optional<Isa>(isa);
    known += known.empty() ? name(isa) : fmt::format(", {}", name(isa));
  }
  return error(StatusCode::invalid_argument, "NIBBLE_ISA={} is no level of CPUs; those are {}", text, known);
}

std::optional<double> cpu_quota(const fs::path& root) {
  std::optional<double> least;
  std::ifstream in(root / "proc/self/mountinfo");
  for (std::string line; std::getline(in, line);) {
    const auto hierarchy = hierarchy_of(line);
    const auto group = hierarchy ? group_in(*hierarchy, root) : std::nullopt;
    if (!group) continue;
    // A container sees its own group, which /proc may name as the host does.
    std::string below = *group;
    if (hierarchy->root != "/") below = below.starts_with(hierarchy->root) ? below.substr(hierarchy->root.size()) : "";
    const std::string top = root.string() + hierarchy->mount;
    for (std::string at = top + below; at.size() >= top.size(); at.resize(at.rfind('/')))
      if (const auto quota = quota_of(at, hierarchy->unified); quota && (!least || *quota < *least)) least = quota;
  }
  return least;
}

int usable_cores(const fs::path& root) {
  const double most = std::ceil(cpu_quota(root).value_or(kMaxThreads));  // rounded up: a thread can use a fraction of a CPU
  return std::max(1, std::min(allowed_cpus(), static_cast<int>(std::min<double>(most, kMaxThreads))));
}

}  // namespace nibble
