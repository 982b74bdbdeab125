// Layers that read the same activations, as one layer: q, k and v of attention, gate and up of a gated linear unit.
#pragma once

#include <span>

#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// The weights one below the other: D of the joined layer is the D of the parts side by side. The gate goes first where a glu
/// (EpilogueSpec::glu) follows. Scales per tensor become scales per output channel, which say the same; parts without a bias have zeros in
/// the joined one, if another part has a bias.
/// Errors: invalid_argument without parts, or where they differ, with the field and the values: in K, in scheme or in types, or in what
/// they do to activations (g_idx, prescale, static_acts, act_limit; quantize or calibrate them together); where a part ends inside a block
/// of rows that share a scale; for convolutions.
Result<QuantTensor> join(std::span<const QuantTensor> parts);

}  // namespace nibble
