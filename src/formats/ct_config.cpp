// See ct_config.hpp.
#include "formats/ct_config.hpp"

namespace nibble::codec {
namespace {

ActScheme activations(const Json& args) {
  if (!args.is_object()) return {};
  ActScheme act;
  const bool is_float = config_text(args, {"type"}) == "float";
  if (config_int(args, {"num_bits"}) != 8) return {};
  act.codes = is_float ? DType::e4m3 : DType::s8;
  const std::string strategy = config_text(args, {"strategy"});
  const std::int64_t size = config_int(args, {"group_size"}).value_or(0);
  if (!config_bool(args, {"dynamic"}).value_or(false) && strategy != "group")
    act.group = GroupShape::tensor();
  else
    act.group = strategy == "group" && size > 0 ? configured_group(size) : GroupShape::channel();
  return act;
}

std::optional<GroupShape> weight_group(const CtGroup& entry) {
  if (entry.strategy == "tensor") return GroupShape::tensor();
  if (entry.strategy == "channel") return GroupShape::channel();
  if (entry.strategy == "group" && entry.group_size) return configured_group(*entry.group_size);
  return std::nullopt;
}

}  // namespace

std::vector<CtGroup> ct_groups(const QuantConfig& config) {
  std::vector<CtGroup> entries;
  for (const auto& [name, entry] : config_child(config.json, "config_groups").items()) {
    const Json& weights = config_child(entry, "weights");
    if (!weights.is_object() || config_text(weights, {"type"}) == "float") continue;
    entries.push_back({config_int(weights, {"num_bits"}), config_int(weights, {"group_size"}),
                       config_bool(weights, {"symmetric"}).value_or(true), config_text(weights, {"strategy"}),
                       activations(config_child(entry, "input_activations"))});
  }
  return entries;
}

std::optional<std::int64_t> ct_group_size(const std::vector<CtGroup>& entries, std::int64_t k, const ConstTensorView* scale) {
  std::optional<std::int64_t> first;
  for (const CtGroup& entry : entries) {
    if (!entry.group_size) continue;
    if (!first) first = entry.group_size;
    const GroupShape group = configured_group(*entry.group_size);
    if (scale != nullptr && scale->rank == 2 && group.cols(k) == scale->dim(1)) return entry.group_size;
  }
  return first;
}

void claim_ct(Module& module, const QuantConfig& config, const std::vector<CtGroup>& entries,
              std::optional<DType> (*codes)(const CtGroup&)) {
  for (const CtGroup& entry : entries) {
    const auto type = codes(entry);
    const auto group = weight_group(entry);
    if (!type || !group) continue;
    const WeightScheme weight{*type, entry.symmetric ? ZeroKind::none : ZeroKind::integer, *group, module.scheme.scale};
    if (weight == module.scheme || entries.size() == 1) return claim(module, config, weight, entry.act);
  }
  if (entries.size() > 1)
    note(module.notes, kWarning, "none of the {} config_groups in {} describes {}", entries.size(), config_name(config),
         module.scheme.name());
}

Status refuse_online_transforms(const ModuleTensors& tensors, const QuantConfig& config) {
  for (const auto& [name, scheme] : config_child(config_child(config.json, "transform_config"), "config_groups").items())
    for (const auto& [index, step] : config_child(scheme, "apply").items())
      if (const std::string where = config_text(step, {"location"}); !where.starts_with("weight_"))
        return error(StatusCode::unsupported,
                     "{}: {} has a transform_config with location \"{}\": rotating activations is not supported", tensors.module,
                     config_name(config), where);
  return {};
}

}  // namespace nibble::codec
