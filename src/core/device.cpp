#include "nibble/device.hpp"

#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "core/environment.hpp"
#include "core/error.hpp"

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

std::uint32_t bit(Isa isa) { return 1u << static_cast<int>(isa); }

#if defined(__x86_64__)
/// Whether this process may use AMX tiles: they have 8 KiB of state per thread, and Linux grants permission once for all threads.
bool may_use_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (~edx & (kBf16 | kTile | kInt8)) != 0) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

/// The levels that the CPU reports, regardless of their parents.
std::uint32_t reported_isas() {
  std::uint32_t set = bit(Isa::baseline);
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) set |= bit(Isa::avx2);
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0) set |= bit(Isa::avx2vnni);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    set |= bit(Isa::avx512);
  if (__builtin_cpu_supports("avx512vnni")) set |= bit(Isa::avx512vnni);
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) set |= bit(Isa::avx512bf16);
  if (may_use_tiles()) set |= bit(Isa::amx);
#elif defined(__aarch64__) && defined(__linux__)
  if ((getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0) set |= bit(Isa::dotprod);
  if ((getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0) set |= bit(Isa::i8mm);
  if ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0) set |= bit(Isa::neonbf16);
#endif
  return set;
}

/// The level's own bit and those of all below it.
std::uint32_t with_parents(Isa isa) { return isa == parent(isa) ? bit(isa) : bit(isa) | with_parents(parent(isa)); }

/// Only levels whose parents are present too and that NIBBLE_ISA allows.
std::uint32_t usable_isas() {
  const std::uint32_t reported = reported_isas();
  std::uint32_t allowed = ~0u;
  if (const auto highest = isa_of_environment(); highest.ok() && *highest) allowed = with_parents(**highest);
  std::uint32_t usable = 0;
  for (Isa isa : kAllIsas) {
    const std::uint32_t needed = with_parents(isa);
    if ((reported & needed) == needed) usable |= bit(isa);
  }
  return usable & allowed;
}

DeviceInfo query() {
  DeviceInfo device;
  device.cpu_name = cpu_model();
  device.cores = usable_cores();
  device.isas = usable_isas();
  for (Isa isa : kAllIsas)
    if (device.has(isa)) device.isa = isa;
  for (int index = 0; index < 8; ++index) {
    const std::string cache = fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/", index);
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
    case Isa::avx2vnni: return "avx2vnni";
    case Isa::avx512: return "avx512";
    case Isa::avx512vnni: return "avx512vnni";
    case Isa::avx512bf16: return "avx512bf16";
    case Isa::amx: return "amx";
    case Isa::dotprod: return "dotprod";
    case Isa::i8mm: return "i8mm";
    case Isa::neonbf16: return "neonbf16";
    case Isa::simt: return "simt";
    case Isa::sm80: return "sm80";
    case Isa::sm90: return "sm90";
  }
  return "unknown";
}

Isa parent(Isa isa) {
  switch (isa) {
    case Isa::avx2vnni:
    case Isa::avx512: return Isa::avx2;
    case Isa::avx512vnni: return Isa::avx512;
    case Isa::avx512bf16: return Isa::avx512vnni;
    case Isa::amx: return Isa::avx512bf16;
    case Isa::i8mm: return Isa::dotprod;
    case Isa::neonbf16: return Isa::i8mm;
    case Isa::sm90: return Isa::sm80;
    case Isa::sm80:
    case Isa::simt: return Isa::simt;
    case Isa::baseline:
    case Isa::avx2:
    case Isa::dotprod: return Isa::baseline;
  }
  return Isa::baseline;
}

const DeviceInfo& this_device() {
  static const DeviceInfo device = query();
  return device;
}

}  // namespace nibble
