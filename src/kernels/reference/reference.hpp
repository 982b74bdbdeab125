// The oracle as rows of the kernel table: always accepted, always last.
#pragma once

#include <span>

#include "kernels/kernel.hpp"

namespace nibble::reference {
std::span<const Kernel> kernels();
}  // namespace nibble::reference
