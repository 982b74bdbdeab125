// The parts of the module that have a file of their own, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "arrays.hpp"
#include "nibble/nibble.hpp"

namespace nibble::python {

void bind_experts(nb::module_& m);
void bind_packed_files(nb::module_& m);
void bind_weights(nb::module_& m);

/// "s8r"; "" of none.
std::string name_of(const ActScheme& act);

/// "Module(name='…', n=…)": every field, read back from Python.
template <class... Fields>
auto repr(const char* type, Fields... fields) {
  return [=](nb::handle self) {
    std::string out = std::string(type) + "(";
    const char* separator = "";
    for (const char* field : {fields...}) {
      out += std::string(separator) + field + "=" + nb::cast<std::string>(nb::repr(self.attr(field)));
      separator = ", ";
    }
    return out + ")";
  };
}

}  // namespace nibble::python
