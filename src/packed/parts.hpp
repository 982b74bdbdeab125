// What a packed weight has beside its bytes: a description and small tensors. Files and headers have both, and are hostile until checked.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "layouts/layout.hpp"
#include "nibble/checkpoint.hpp"
#include "packed/description.hpp"

namespace nibble::packed {

/// The small tensors of a weight. Null: it has no such tensor.
struct SmallTensors {
  const TensorInfo *perm = nullptr, *prescale = nullptr, *bias = nullptr, *channel_sums = nullptr;
};

/// The members of SmallTensors by name.
inline constexpr std::pair<std::string_view, const TensorInfo * SmallTensors::*> kSmallTensors[] = {
    {"perm", &SmallTensors::perm},
    {"prescale", &SmallTensors::prescale},
    {"bias", &SmallTensors::bias},
    {"channel_sums", &SmallTensors::channel_sums}};

/// Those that the weight has, by name.
std::vector<std::pair<std::string_view, Tensor>> small_tensors(const PackedWeightHeader& weight);

WeightDesc desc_of(const PackedWeightHeader& header, const SmallTensors& small);

/// Whether a weight of that scheme is packed in pairs of rows for the specification.
bool packed_in_pairs(const PackedWeight::Spec& spec, const WeightScheme& scheme);

/// Ok for a tensor of that type and shape. Errors: corrupt_data.
Status check_tensor(const TensorInfo& tensor, DType dtype, std::int64_t length);
/// Whether a description fits together, and with the types and shapes of the small tensors. Errors: corrupt_data.
Status check(const Description& description, const SmallTensors& small);

/// A weight without its bytes, of a description and small tensors that check() found sound. `read` gives the elements of a small tensor.
/// Errors: those of `read`; corrupt_data for a permutation that is none, and for sums that no weight has.
Result<std::shared_ptr<PackedWeightData>> without_bytes(const PackedWeightHeader& header, const SmallTensors& small,
                                                        const std::function<Result<Tensor>(const TensorInfo&)>& read);

/// The weight, whose bytes are in host memory, with the channel_sums that it has there; they are computed if they are missing.
Result<PackedWeight> with_sums(const std::shared_ptr<PackedWeightData>& weight, const PackedWeight::Spec& spec);

}  // namespace nibble::packed
