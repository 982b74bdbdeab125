// What specifications and options are asked before anything is chosen.
#pragma once

#include "nibble/plan.hpp"

namespace nibble {

/// What every plan is asked before anything else.
Status check_options(const PlanOptions& options);
/// The machine that costs are worked out for.
Roofline machine_for(const PlanOptions& options);

/// A specification by itself, and against the weight: shapes, ways of quantizing activations, the epilogue.
Status check_spec(const WeightDesc& weight, const LinearSpec& spec);
Status check_spec(const WeightDesc& weight, const ConvSpec& spec);

}  // namespace nibble
