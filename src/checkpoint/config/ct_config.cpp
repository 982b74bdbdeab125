// See ct_config.hpp.
#include "checkpoint/config/ct_config.hpp"

#include <algorithm>
#include <set>

#include "checkpoint/io/json.hpp"

namespace nibble::codec {
namespace {

/// nullopt: quantized in a way that no ActScheme expresses.
std::optional<ActScheme> activations(const Json& args) {
  if (!args.is_object()) return ActScheme{};
  const std::string type = config_text(args, {"type"});
  const std::int64_t size = config_int(args, {"group_size"}).value_or(0);
  const bool dynamic = config_bool(args, {"dynamic"}).value_or(false);
  std::string strategy = config_text(args, {"strategy"});
  if (strategy.empty()) strategy = size > 0 ? "group" : size < 0 ? "channel" : "tensor";
  if (config_int(args, {"num_bits"}).value_or(8) != 8 || (type != "float" && type != "int" && !type.empty())) return std::nullopt;
  ActScheme act;
  act.codes = type == "float" ? DType::e4m3 : DType::s8;
  if (type != "float" && !config_bool(args, {"symmetric"}).value_or(true)) act.zero = ZeroKind::integer;
  if (strategy == "tensor" && !dynamic)
    act.group = GroupShape::tensor();
  else if (strategy == "token")
    act.group = GroupShape::channel();
  else if (strategy == "group" && dynamic && size > 0)
    act.group = configured_group(size);
  else
    return std::nullopt;
  return act;
}

/// "input_activations of 4 bits, strategy token": for activations that no ActScheme expresses.
std::string activations_text(std::string_view what, const Json& args) {
  std::string text(what);
  for (const char* key : {"num_bits", "type", "strategy", "group_size", "dynamic"})
    if (const Json& value = config_child(args, key); !value.is_null())
      text += fmt::format(" {}={}", key, storage::dump(value).substr(0, 60));
  return text;
}

std::optional<GroupShape> weight_group(const CtGroup& entry) {
  if (entry.strategy == "tensor") return GroupShape::tensor();
  if (entry.strategy == "channel") return GroupShape::channel();
  if (entry.strategy == "group" && entry.group_size) return configured_group(*entry.group_size);
  if (entry.strategy == "block") return entry.block;
  return std::nullopt;
}

std::vector<CtGroup> all_groups(const QuantConfig& config) {
  std::vector<CtGroup> entries;
  for (const auto& [name, entry] : config_child(config.json, "config_groups").items()) {
    const Json& weights = config_child(entry, "weights");
    if (!weights.is_object()) continue;
    CtGroup group{.name = name,
                  .is_float = config_text(weights, {"type"}) == "float",
                  .symmetric = config_bool(weights, {"symmetric"}).value_or(true),
                  .bits = config_int(weights, {"num_bits"}),
                  .group_size = config_int(weights, {"group_size"}),
                  .block = config_block(weights, {"block_structure"}),
                  .strategy = config_text(weights, {"strategy"})};
    group.group = weight_group(group);
    const Json &in = config_child(entry, "input_activations"), &out = config_child(entry, "output_activations");
    const auto act = activations(in);
    group.act = act.value_or(ActScheme{});
    if (!act)
      group.other_acts = activations_text("input_activations", in);
    else if (out.is_object())
      group.other_acts = activations_text("output_activations", out);
    entries.push_back(std::move(group));
  }
  return entries;
}

std::string_view ct_name(std::string_view format) { return format == "compressed-tensors" ? "pack-quantized" : format; }

/// The common parameters of weights and activations.
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

bool CtGroup::describes(const WeightScheme& weight) const {
  return is_float == (info(weight.codes).kind == DTypeKind::floating) && bits == nibble::bits(weight.codes) &&
         symmetric == (weight.zero == ZeroKind::none) && group == weight.group;
}

std::vector<CtGroup> ct_groups(const QuantConfig& config, CtType type) {
  std::vector<CtGroup> entries = all_groups(config);
  std::erase_if(entries, [&](const CtGroup& entry) { return entry.is_float != (type == CtType::floating); });
  return entries;
}

CtTargets::CtTargets(const Json& config) {
  constexpr std::size_t kMaxSteps = 10'000;  // of all expressions, which every layer's name is compared with
  std::map<std::string, std::string, std::less<>> expressions;
  for (const auto& [name, entry] : config_child(config, "config_groups").items())
    for (const Json& target : config_child(entry, "targets"))
      if (target.is_string()) {
        const auto& text = target.get_ref<const std::string&>();
        (text.starts_with("re:") ? expressions : names_).insert_or_assign(text, name);
      }
  std::size_t steps = 0;
  for (const auto& [text, name] : expressions)
    if (auto pattern = Pattern::compile(std::string_view(text).substr(3));
        pattern.ok() && (steps += pattern->steps()) <= kMaxSteps)
      patterns_.emplace_back(*std::move(pattern), name);
}

std::string_view CtTargets::find(std::string_view module, bool conv) const {
  if (const auto named = names_.find(module); named != names_.end()) return named->second;
  for (const auto& [pattern, name] : patterns_)
    if (pattern.match(module)) return name;
  const auto of_class = names_.find(conv ? "Conv2d" : "Linear");
  return of_class == names_.end() ? std::string_view() : of_class->second;
}

const CtGroup* ct_entry(const QuantConfig& config, const std::vector<CtGroup>& entries, std::string_view module, bool conv,
                        const WeightScheme* weight) {
  const std::string name(config.targets != nullptr ? config.targets->find(module, conv)
                                                   : CtTargets(config.json).find(module, conv));
  const auto targeting = std::ranges::find(entries, name, &CtGroup::name);
  const CtGroup* entry = targeting != entries.end() ? &*targeting : entries.size() == 1 ? &entries.front() : nullptr;
  if (weight == nullptr || (entry != nullptr && entry->describes(*weight))) return entry;
  const auto fitting = std::ranges::find_if(entries, [&](const CtGroup& e) { return e.describes(*weight); });
  return fitting != entries.end() ? &*fitting : entries.size() == 1 ? entry : nullptr;
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

void claim_ct(Module& module, std::string_view name, const QuantConfig& config, const std::vector<CtGroup>& entries,
              std::optional<DType> (*codes)(const CtGroup&)) {
  const CtGroup* entry = ct_entry(config, entries, name, module.filter.has_value(), &module.scheme);
  if (const auto type = entry == nullptr ? std::nullopt : codes(*entry); type && entry->group) {
    module.other_acts = entry->other_acts;
    return claim(module, config,
                 {*type, entry->symmetric ? ZeroKind::none : ZeroKind::integer, *entry->group, module.scheme.scale}, entry->act);
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
  if (group.n == 1 && group.k != 0 && q.k % group.k != 0) return refuse("K must be a multiple of the group size");
  if (!q.g_idx.empty() && format != "compressed-tensors")
    return refuse("it has no act-order (g_idx), which compressed-tensors has");
  if (act.codes == DType::none) return q.static_acts ? refuse("activations have a scale, but are not quantized") : Status();
  if (act.codes != DType::s8 && act.codes != DType::e4m3) return refuse("activations are s8 or e4m3");
  if (act.zero == ZeroKind::offset) return refuse("activations have integer zero points, no float offsets");
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

namespace {

/// The source's config, where its groups describe what was written: with their targets and every key that nibble does not know.
std::optional<Json> kept_config(std::string_view format, const WrittenCheckpoint& written) {
  const Json& source = written.source == nullptr ? Json() : written.source->json;
  if (!config_child(source, "config_groups").is_object()) return std::nullopt;
  if (const std::string method = config_text(source, {"quant_method"}); !method.empty() && method != "compressed-tensors")
    return std::nullopt;
  const std::vector<CtGroup> entries = all_groups(*written.source);
  std::map<std::string, std::string_view> formats;  // of the groups
  for (const WrittenModule& module : written.modules) {
    const CtGroup* entry = ct_entry(*written.source, entries, module.name, module.conv, &module.scheme);
    if (entry == nullptr || !entry->describes(module.scheme) || entry->act != module.act ||
        entry->other_acts != module.other_acts)
      return std::nullopt;
    const std::string_view own = ct_name(module.format.empty() ? format : module.format);
    if (formats.emplace(entry->name, own).first->second != own) return std::nullopt;
  }
  Json json = source;
  for (const auto& [name, own] : formats) json["config_groups"][name]["format"] = own;
  return json;
}

/// One group per kind of layer.
Result<Json> grouped_config(std::string_view format, const WrittenCheckpoint& written) {
  struct Kind {
    const WrittenModule* first;
    std::vector<std::string> names;
  };
  std::vector<Kind> kinds;
  bool linears = false, convs = false;
  for (const WrittenModule& module : written.modules) {
    if (!module.other_acts.empty())
      return error(StatusCode::unsupported,
                   "{}: {} says {}, which nibble only keeps where the config groups of compressed-tensors stay as they are; "
                   "dequantize the checkpoint to do without",
                   module.name, config_name(*written.source), module.other_acts);
    auto kind = std::ranges::find_if(kinds, [&](const Kind& k) {
      return k.first->scheme.name() == module.scheme.name() && k.first->act_order == module.act_order &&
             k.first->act == module.act && k.first->format == module.format;
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
                                          {"output_activations", Json()},
                                          {"format", ct_name(first.format.empty() ? format : first.format)}};
  }
  const Json source = written.source == nullptr ? Json() : written.source->json;
  Json ignore = config_child(source, "ignore").is_array() ? config_child(source, "ignore") : Json::array();
  for (const std::string& name : written.not_quantized) ignore.push_back(name);
  return Json{{"quant_method", "compressed-tensors"},       {"quantization_status", "compressed"},
              {"config_groups", std::move(groups)},         {"ignore", std::move(ignore)},
              {"kv_cache_scheme", kv_cache_scheme(source)}, {"global_compression_ratio", Json()}};
}

/// Whether an entry of `ignore` is the name, or an expression that matches it.
bool lists(const Json& ignore, const std::string& name) {
  return std::ranges::any_of(ignore, [&](const Json& entry) {
    if (!entry.is_string()) return false;
    const auto& text = entry.get_ref<const std::string&>();
    if (!text.starts_with("re:")) return text == name;
    const auto pattern = Pattern::compile(std::string_view(text).substr(3));
    return pattern.ok() && pattern->match(name);
  });
}

}  // namespace

Json kv_cache_scheme(const Json& config) {
  if (const Json& scheme = config_child(config, "kv_cache_scheme"); scheme.is_object()) return scheme;
  const Json& inner = config_child(config, "quantization");            // of ModelOpt
  const Json& layers = config_child(config, "kv_cache_quant_config");  // of Quark, whose output_scale loaders know by that name
  const bool quark = layers.is_object() && !layers.empty() && std::ranges::all_of(layers, [](const Json& layer) {
                       const Json& output = config_child(layer, "output_tensors");
                       return config_text(output, {"dtype"}) == "fp8_e4m3" && config_text(output, {"qscheme"}) == "per_tensor" &&
                              config_bool(output, {"is_dynamic"}) == false;
                     });
  if (!quark && config_text(inner.is_object() ? inner : config, {"kv_cache_quant_algo"}) != "fp8") return {};
  return args(DType::e4m3, true, "tensor", Json());
}

Result<Json> ct_config(std::string_view format, const WrittenCheckpoint& written) {
  std::optional<Json> json = kept_config(format, written);
  if (!json) {
    NIBBLE_ASSIGN_OR_RETURN(json, grouped_config(format, written));
  }
  std::set<std::string> formats;
  for (const WrittenModule& module : written.modules) formats.emplace(ct_name(module.format.empty() ? format : module.format));
  (*json)["format"] = formats.size() > 1 ? "mixed-precision" : formats.empty() ? std::string(ct_name(format)) : *formats.begin();
  Json& ignore = (*json)["ignore"];
  if (!ignore.is_array()) ignore = Json::array();
  for (const std::string& head : written.tied_heads)
    if (!lists(ignore, head)) ignore.push_back(head);
  return *std::move(json);
}

}  // namespace nibble::codec
