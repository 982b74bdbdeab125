// What pack() decides before it packs.
#pragma once

#include <cstddef>
#include <vector>

#include "core/code_rows.hpp"
#include "nibble/plan.hpp"
#include "plan/choose.hpp"

namespace nibble {

/// The layout and the memory that pack() chooses for the specification on this machine. Errors: those of pack().
Result<Packing> choose_packing(const WeightDesc& weight, const PackedWeight::Spec& spec, const PackOptions& options);

/// pack() for the codes of `codes`, which are those of a valid q whose own are not read: its blocks go into the layout one by one, on all
/// threads. Not for a specification with a glu, whose rows lie in pairs. Errors: those of pack() and of `codes`; throws what threads throw.
Result<PackedWeight> pack_codes(const QuantTensor& q, const CodeSource& codes, const PackedWeight::Spec& spec,
                                const PackOptions& options);

/// The length of PackedWeightHeader::channel_sums of a weight in host memory; 0: it has none.
std::size_t channel_sums_length(const WeightScheme& scheme, std::int64_t n);
/// PackedWeightHeader::channel_sums of a weight in host memory.
std::vector<double> channel_sums(const QuantTensor& q, Executor& executor);

}  // namespace nibble
