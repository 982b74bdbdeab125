// See ct_config.hpp.
#include "formats/ct_config.hpp"

#include <algorithm>

namespace nibble::codec {
namespace {

ActScheme activations(const Json& args) {
  if (!args.is_object()) return {};
  ActScheme act;
  const bool is_float = config_text(args, {"type"}) == "float";
  if (config_int(args, {"num_bits"}) != 8) return {};
  act.codes = is_float ? DType::e4m3 : DType::s8;
  if (!is_float && !config_bool(args, {"symmetric"}).value_or(true)) act.zero = ZeroKind::integer;
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
  if (entry.strategy == "block") return entry.block;
  return std::nullopt;
}

/// What weights and activations have in common.
Json args(DType codes, bool symmetric, std::string_view strategy, const Json& group_size) {
  const bool is_float = info(codes).kind == DTypeKind::floating;
  return {{"num_bits", bits(codes)},  {"type", is_float ? "float" : "int"}, {"symmetric", symmetric}, {"strategy", strategy},
          {"group_size", group_size}, {"block_structure", Json()},          {"actorder", Json()},     {"dynamic", false},
          {"observer", "minmax"},     {"observer_kwargs", Json::object()}};
}

Json weight_args(const WeightScheme& scheme, bool act_order) {
  const GroupShape& group = scheme.group;
  const bool block = group.n > 1, grouped = !block && group.k != 0;
  Json json = args(scheme.codes, scheme.zero == ZeroKind::none,
                   block          ? "block"
                   : grouped      ? "group"
                   : group.n == 0 ? "tensor"
                                  : "channel",
                   grouped ? Json(group.k) : Json());
  if (block) json["block_structure"] = {group.n, group.k};
  if (act_order) json["actorder"] = "group";
  return json;
}

Json act_args(const ActScheme& act) {
  if (act.codes == DType::none) return {};
  const bool grouped = act.group.k != 0, is_static = act.group == GroupShape::tensor();
  Json json = args(act.codes, act.zero == ZeroKind::none,
                   grouped     ? "group"
                   : is_static ? "tensor"
                               : "token",
                   grouped ? Json(act.group.k) : Json());
  if (is_static) return json;
  json["dynamic"] = true;
  json["observer"] = Json();
  return json;
}

}  // namespace

std::vector<CtGroup> ct_groups(const QuantConfig& config, CtType type) {
  std::vector<CtGroup> entries;
  for (const auto& [name, entry] : config_child(config.json, "config_groups").items()) {
    const Json& weights = config_child(entry, "weights");
    if (!weights.is_object() || (config_text(weights, {"type"}) == "float") != (type == CtType::floating)) continue;
    entries.push_back({config_int(weights, {"num_bits"}), config_int(weights, {"group_size"}),
                       config_block(weights, {"block_structure"}), config_bool(weights, {"symmetric"}).value_or(true),
                       config_text(weights, {"strategy"}), activations(config_child(entry, "input_activations"))});
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

Status check_ct_writable(std::string_view format, const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_writable(format, q));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "{} cannot hold {} [{},{}]: {}", format, Scheme{q.scheme, act}.name(), q.n, q.k, why);
  };
  const GroupShape& group = q.scheme.group;
  if (group.k != 0 && q.k % group.k != 0) return refuse("K must be a multiple of the group size");
  if (act.codes == DType::none) return q.static_acts ? refuse("activations have a scale, but are not quantized") : Status();
  if (act.codes != DType::s8 && act.codes != DType::e4m3) return refuse("activations are s8 or e4m3");
  if (act.group == GroupShape::tensor() && !q.static_acts) return refuse("the static scale of its activations is missing");
  if (q.static_acts && q.static_acts->zero != 0 && act.zero == ZeroKind::none)
    return refuse("the static zero point of symmetric activations must be 0");
  return {};
}

Tensor ct_scale(const Tensor& scales, const GroupShape& group) {
  Tensor scale = scales;
  if (group == GroupShape::tensor()) scale.shape = {1};
  return scale;
}

Json ct_config(std::string_view format, const std::vector<WrittenModule>& modules,
               const std::vector<std::string>& not_quantized) {
  struct Kind {
    const WrittenModule* first;
    std::vector<std::string> names;
  };
  std::vector<Kind> kinds;
  bool linears = false, convs = false;
  for (const WrittenModule& module : modules) {
    auto kind = std::ranges::find_if(kinds, [&](const Kind& k) {
      return k.first->scheme.name() == module.scheme.name() && k.first->act_order == module.act_order &&
             k.first->act == module.act;
    });
    if (kind == kinds.end()) kind = kinds.insert(kind, {&module, {}});
    kind->names.push_back(module.name);
    (module.conv ? convs : linears) = true;
  }
  Json types = Json::array();
  if (linears || !convs) types.push_back("Linear");
  if (convs) types.push_back("Conv2d");
  Json groups = Json::object();
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const WrittenModule& first = *kinds[i].first;
    groups[fmt::format("group_{}", i)] = {{"targets", kinds.size() == 1 ? types : Json(kinds[i].names)},
                                          {"weights", weight_args(first.scheme, first.act_order)},
                                          {"input_activations", act_args(first.act)},
                                          {"output_activations", Json()}};
  }
  return Json{{"quant_method", "compressed-tensors"}, {"format", format},        {"quantization_status", "compressed"},
              {"config_groups", std::move(groups)},   {"ignore", not_quantized}, {"kv_cache_scheme", Json()},
              {"global_compression_ratio", Json()}};
}

}  // namespace nibble::codec
