// Checks of specifications and options, before anything is chosen.
#pragma once

#include "nibble/plan.hpp"

namespace nibble {

/// The checks of every plan's options.
Status check_options(const PlanOptions& options);
/// The machine that costs are computed for: of the options, or as assumed of this CPU, or of one of that level.
Roofline machine_for(const PlanOptions& options, std::optional<Isa> cpu = {});

/// Checks a specification, alone and against the weight: shapes, the activation scheme, the epilogue.
Status check_spec(const WeightDesc& weight, const LinearSpec& spec);
Status check_spec(const WeightDesc& weight, const ConvSpec& spec);

}  // namespace nibble
