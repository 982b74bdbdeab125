// The part of a compressed-tensors config that its integer formats share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/codec_util.hpp"

namespace nibble::codec {

/// One entry of config_groups.
struct CtGroup {
  std::optional<std::int64_t> bits, group_size;
  bool symmetric = true;
  std::string strategy;  // "tensor", "channel", "group", ...
  ActScheme act;         // codes none: activations are not quantized
};
std::vector<CtGroup> ct_groups(const QuantConfig& config);

/// The group_size of the first entry, preferring one that splits K as the scale tensor does.
std::optional<std::int64_t> ct_group_size(const std::vector<CtGroup>& entries, std::int64_t k, const ConstTensorView* scale);

/// Claims the entry that describes the module, or the only one. Which module an entry targets is said by class names and
/// patterns that need the model's code, so with several entries none but a matching one is claimed. `codes` gives the code
/// type of an entry, if it can be one of this format.
void claim_ct(Module& module, const QuantConfig& config, const std::vector<CtGroup>& entries,
              std::optional<DType> (*codes)(const CtGroup&));

/// Rotations that are applied while running make the stored weight useless alone.
Status refuse_online_transforms(const ModuleTensors& tensors, const QuantConfig& config);

}  // namespace nibble::codec
