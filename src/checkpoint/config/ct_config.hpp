// The part of a compressed-tensors config that its formats share.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/config/codec_util.hpp"
#include "nibble/pattern.hpp"

namespace nibble::codec {

/// One entry of config_groups.
struct CtGroup {
  std::string name;  // its key
  bool is_float = false, symmetric = true;
  std::optional<std::int64_t> bits, group_size;
  std::optional<GroupShape> block, group;  // `group`: the weights that share a scale
  std::string strategy;                    // "tensor", "channel", "group", "block", ...
  ActScheme act = {};                      // codes none: activations are not quantized, or ...
  std::string other_acts = {};             // ... in a way that no ActScheme expresses, named here

  bool describes(const WeightScheme& weight) const;
};
enum class CtType { integer, floating };
/// The entries whose weights are of this type.
std::vector<CtGroup> ct_groups(const QuantConfig& config, CtType type);

/// The entry of config_groups of each layer, looked up as loaders do: by its name, then by regular expressions, then by class.
class CtTargets {
 public:
  explicit CtTargets(const Json& config);
  /// The key of the entry; "" when it is undecidable.
  std::string_view find(std::string_view module, bool conv) const;

 private:
  std::map<std::string, std::string, std::less<>> names_;  // of layers and classes
  std::vector<std::pair<Pattern, std::string>> patterns_;
};

/// The entry of a layer: the one that targets it, else the only one. An entry that does not describe the weight gives way to one that
/// does, because targets are names of the model's code, which may differ from those of the checkpoint. Null: none.
const CtGroup* ct_entry(const QuantConfig& config, const std::vector<CtGroup>& entries, std::string_view module, bool conv,
                        const WeightScheme* weight);

/// The group_size of the first entry, preferring one that splits K as the scale tensor does.
std::optional<std::int64_t> ct_group_size(const std::vector<CtGroup>& entries, std::int64_t k, const ConstTensorView* scale);

/// Claims the entry that describes the module, or the only one; with several, none but a matching one is claimed. `codes` gives the
/// code type of an entry, if it can be one of this format.
void claim_ct(Module& module, std::string_view name, const QuantConfig& config, const std::vector<CtGroup>& entries,
              std::optional<DType> (*codes)(const CtGroup&));

/// Refuses rotations that are applied while running: the stored weight alone does not define the layer.
Status refuse_online_transforms(const ModuleTensors& tensors, const QuantConfig& config);

/// Ok if a config can describe q and its activations.
Status check_ct_writable(std::string_view format, const QuantTensor& q, const ActScheme& act);
/// weight_scale as it is stored: [1] per tensor, else [rows, groups].
Tensor ct_scale(const Tensor& scales, const GroupShape& group);
/// The config groups of the source as they are, when they describe what was written; else one per scheme, activations, order and format. A
/// single one targets every Linear; several name their modules. `format` is that of modules that do not name their own.
Result<Json> ct_config(std::string_view format, const WrittenCheckpoint& written);
/// The quantization of the KV cache, in the form of compressed-tensors; null when the config has none.
Json kv_cache_scheme(const Json& config);

}  // namespace nibble::codec
