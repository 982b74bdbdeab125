// What the process is told from outside: environment variables, and the CPU time that its control groups leave it.
#pragma once

#include <filesystem>
#include <optional>

#include "nibble/device.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// The most threads that can be asked for.
inline constexpr int kMaxThreads = 4096;

/// NIBBLE_NUM_THREADS; nothing when it is unset or empty. invalid_argument with what is allowed.
Result<std::optional<int>> threads_of_environment();
/// NIBBLE_ISA, likewise.
Result<std::optional<Isa>> isa_of_environment();

/// How many CPUs' time the quotas of this process's control groups (version 1 or 2) and of all above them leave it; nothing: any
/// number's. `root` is where /proc and /sys are.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

/// How many threads this process keeps busy: by the calling thread's affinity mask and the quota.
int usable_cores(const std::filesystem::path& root = "/");

}  // namespace nibble
