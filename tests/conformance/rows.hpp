// Which rows of the kernel table have conformance tests in this program.
#pragma once

#include "kernels/kernel.hpp"

namespace nibble {

extern const bool kGpuRowsAreBuilt;

/// A row of the GPU is tested where it is compiled: elsewhere each of a thousand tests would be a process that only reports a skip.
inline bool is_built(const Kernel& kernel) { return kGpuRowsAreBuilt || backend(kernel.isa) == Backend::cpu; }

/// A row for rows of experts alone has no linear layers to be tested on: experts_test.cpp tests it.
inline bool takes_one_weight(const Kernel& kernel) { return kernel.variant != "experts"; }

}  // namespace nibble
