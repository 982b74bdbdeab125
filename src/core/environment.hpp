// The environment of the process: variables, and the CPU time that its control groups allow.
#pragma once

#include <filesystem>
#include <optional>

#include "nibble/device.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// The largest number of threads.
inline constexpr int kMaxThreads = 4096;

/// NIBBLE_NUM_THREADS; nothing when it is unset or empty. invalid_argument with what is allowed.
Result<std::optional<int>> threads_of_environment();
/// NIBBLE_ISA, likewise.
Result<std::optional<Isa>> isa_of_environment();

/// The CPU time, in CPUs, that the quotas of this process's control groups (version 1 or 2) and of their parents allow; nothing: no limit.
/// `root` contains /proc and /sys.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

/// The number of threads that this process can keep busy: the smaller of the calling thread's affinity mask and the quota.
int usable_cores(const std::filesystem::path& root = "/");

}  // namespace nibble
