// Experts that are packed one by one, by any function.
#pragma once

#include <cstdint>
#include <functional>

#include "nibble/experts.hpp"

namespace nibble {

/// Experts 0 … count − 1, each packed by `pack_one` for the specification, and copied into one allocation of host memory or of the GPU's. The
/// options that it gets are those given, with the layout of the first. Errors: those of pack_one; invalid_argument where experts differ.
Result<PackedExperts> pack_each(
    std::int64_t count, const std::function<Result<PackedWeight>(std::int64_t expert, const PackOptions& options)>& pack_one,
    const LinearSpec& spec, const PackOptions& options);

}  // namespace nibble
