// The part of a compressed-tensors config that its formats share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/codec_util.hpp"

namespace nibble::codec {

/// One entry of config_groups.
struct CtGroup {
  std::optional<std::int64_t> bits, group_size;
  std::optional<GroupShape> block;
  bool symmetric = true;
  std::string strategy;  // "tensor", "channel", "group", "block", ...
  ActScheme act;         // codes none: activations are not quantized
};
enum class CtType { integer, floating };
/// The entries whose weights are of this type.
std::vector<CtGroup> ct_groups(const QuantConfig& config, CtType type);

/// The group_size of the first entry, preferring one that splits K as the scale tensor does.
std::optional<std::int64_t> ct_group_size(const std::vector<CtGroup>& entries, std::int64_t k, const ConstTensorView* scale);

/// Claims the entry that describes the module, or the only one. Which module an entry targets is said by class names and
/// patterns that need the model's code, so with several entries none but a matching one is claimed. `codes` gives the code
/// type of an entry, if it can be one of this format.
void claim_ct(Module& module, const QuantConfig& config, const std::vector<CtGroup>& entries,
              std::optional<DType> (*codes)(const CtGroup&));

/// Rotations that are applied while running make the stored weight useless alone.
Status refuse_online_transforms(const ModuleTensors& tensors, const QuantConfig& config);

/// q and its activations are what a config can describe.
Status check_ct_writable(std::string_view format, const QuantTensor& q, const ActScheme& act);
/// weight_scale as it is stored: [1] per tensor, else [rows, groups].
Tensor ct_scale(const Tensor& scales, const GroupShape& group);
/// One config group per scheme and order. A single one targets every Linear; several name their modules.
Json ct_config(std::string_view format, const std::vector<WrittenModule>& modules, const std::vector<std::string>& not_quantized);

}  // namespace nibble::codec
