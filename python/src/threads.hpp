// On which threads a call computes.
#pragma once

#include <nanobind/nanobind.h>

#include "nibble/nibble.hpp"

namespace nibble::python {

namespace nb = nanobind;

/// PyTorch's threads where share_openmp() was called, else nullptr, which is nibble's own pool.
Executor* shared_threads();

void bind_threads(nb::module_& m);

}  // namespace nibble::python
