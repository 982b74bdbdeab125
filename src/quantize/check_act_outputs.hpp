// Checks of the arguments of quantize_activations, on the CPU and on the GPU.
#pragma once

#include "nibble/quantize.hpp"

namespace nibble {

/// Ok, or invalid_argument or unsupported with the values.
Status check_act_outputs(const ConstTensorView& a, const ActScheme& scheme, const ActOutputs& out, const ActOptions& options);

}  // namespace nibble
