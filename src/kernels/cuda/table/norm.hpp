// What prepare rows that normalize activations and quantize them share (steps/norm_rows.hpp).
#pragma once

#include "kernels/kernel.hpp"

namespace nibble::cuda {

/// Whether codes are made of a token in registers.
Status accepts_norm_codes(const Problem& p);
/// Microseconds: activations and the residual stream are read, the stream and codes are written.
double norm_codes_cost_us(const Problem& p);

}  // namespace nibble::cuda
