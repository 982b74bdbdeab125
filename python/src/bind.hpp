// What the parts of the module share that bind things to names.
#pragma once

#include <nanobind/nanobind.h>

namespace nibble::python {

namespace nb = nanobind;

void bind_experts(nb::module_& m);

}  // namespace nibble::python
