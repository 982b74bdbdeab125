// The description of a packed weight in a file or a header: JSON ⇄ everything but its bytes and small tensors. docs/howto/pack.md has the format.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "json/json_values.hpp"
#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"

namespace nibble::packed {

/// What the JSON of a weight says.
struct Description {
  PackedWeightHeader header;  // without perm, prescale, bias and channel_sums
  PackedWeight::Spec spec;
  std::uint64_t bytes = 0;  // packed
  std::string source;       // Checkpoint::digest() of the module; "": not recorded
};

/// Members that have their default are left out.
Json to_json(const Description& description);
/// The inverse. Errors: corrupt_data for a member that is missing, unknown, or of another type or range; unsupported for a layout that this
/// library does not have in that version.
Result<Description> parse_description(const Json& json);

}  // namespace nibble::packed
