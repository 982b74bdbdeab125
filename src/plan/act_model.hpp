// The model of a kernel's arithmetic, by which verify and the conformance tests bound its error.
#pragma once

#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"

namespace nibble {

/// From the kernel's row; `act` is the type of A, of a linear layer or a convolution.
reference::ActModel act_model(const Kernel& kernel, DType act, const ActScheme& quantize, const WeightScheme& scheme,
                              Accumulation accumulation = Accumulation::fast);

}  // namespace nibble
