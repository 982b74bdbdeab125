// Which rows of the kernel table have conformance tests in this build.
#pragma once

#include "kernels/kernel.hpp"

namespace nibble {

/// A row of the GPU is tested where it is compiled: elsewhere each of a thousand tests would be a process that only reports a skip.
inline bool is_built(const Kernel& kernel) { return NIBBLE_WITH_CUDA || backend(kernel.isa) == Backend::cpu; }

}  // namespace nibble
