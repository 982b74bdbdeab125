// The parts of the module that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace nibble::python {

void bind_experts(nanobind::module_& m);

}  // namespace nibble::python
