#include "nibble/device.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace nibble {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

/// "32K" or "16M" as Linux writes cache sizes.
std::int64_t parse_size(const std::string& text) {
  if (text.empty()) return 0;
  const std::int64_t value = std::atoll(text.c_str());
  return text.back() == 'K' ? value << 10 : text.back() == 'M' ? value << 20 : value;
}

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name") || line.starts_with("Model"))
      if (const std::size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "unknown CPU";
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

Isa best_isa() {
  Isa best = Isa::baseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
  if (best == Isa::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = Isa::avx512;
#endif
  if (const char* wanted = std::getenv("NIBBLE_ISA"))
    for (Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512})
      if (name(isa) == wanted) best = std::min(best, isa);
  return best;
}

DeviceInfo query() {
  DeviceInfo device;
  device.cpu_name = cpu_model();
  device.cores = usable_cores();
  device.isa = best_isa();
  for (int index = 0; index < 8; ++index) {
    const std::string cache = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string level = first_line(cache + "level");
    const std::int64_t size = parse_size(first_line(cache + "size"));
    if (level.empty() || size <= 0 || first_line(cache + "type") == "Instruction") continue;
    if (level == "1") device.l1d_bytes = size;
    if (level == "2") device.l2_bytes = size;
    if (level == "3") device.l3_bytes = size;
  }
  const long pages = sysconf(_SC_PHYS_PAGES);
  if (pages > 0) device.memory_bytes = static_cast<std::int64_t>(pages) * sysconf(_SC_PAGESIZE);
  return device;
}

}  // namespace

std::string_view name(Backend backend) {
  switch (backend) {
    case Backend::reference: return "ref";
    case Backend::cpu: return "cpu";
    case Backend::cuda: return "cuda";
  }
  return "unknown";
}

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::baseline: return "baseline";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
  }
  return "unknown";
}

const DeviceInfo& this_device() {
  static const DeviceInfo device = query();
  return device;
}

}  // namespace nibble
