// The machine nibble runs on: instruction sets, caches, and its measured roofline.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "nibble/parallel.hpp"

namespace nibble {

enum class Backend : std::uint8_t { reference, cpu, cuda };
std::string_view name(Backend backend);

/// CPU instruction-set levels, in order of preference. `baseline` is whatever the compiler targets by default.
enum class Isa : std::uint8_t { baseline, avx2, avx512 };
std::string_view name(Isa isa);

struct DeviceInfo {
  std::string cpu_name;     // "AMD EPYC 9654"
  int cores = 1;            // cores this process may run on
  Isa isa = Isa::baseline;  // the best level this machine has; NIBBLE_ISA=name lowers it
  std::int64_t l1d_bytes = 32 << 10;
  std::int64_t l2_bytes = 1 << 20;  // per core
  std::int64_t l3_bytes = 0;        // shared; 0 when there is none or it is unknown
  std::int64_t memory_bytes = 0;
};

/// Queried once, then cached.
const DeviceInfo& this_device();

/// What this machine can do at best with `threads` threads, by measurement.
struct Roofline {
  int threads = 1;
  double read_gbytes_per_s = 0;  // streaming reads of a buffer far larger than the last-level cache
  double f32_gflops = 0;         // fused multiply-adds (2 operations each) on registers, best ISA of this_device()
};

/// Takes about half a second.
Roofline measure_roofline(Executor& executor);

}  // namespace nibble
