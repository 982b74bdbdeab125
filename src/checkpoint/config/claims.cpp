// See claims.hpp.
#include "checkpoint/config/claims.hpp"

#include <algorithm>
#include <cctype>

#include "checkpoint/io/json.hpp"
#include "nibble/pattern.hpp"

namespace nibble::codec {
namespace {

/// A file name pattern without [...] as a regular expression.
std::string expression(std::string_view pattern) {
  std::string text;
  for (const char c : pattern) {
    if (c == '*' || c == '?')
      text += c == '*' ? ".*" : ".";
    else if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_')
      text += c;
    else
      text.append("\\").push_back(c);
  }
  return text + "$";
}

/// The first entry whose pattern matches a layer's name; null: none does; nothing: undecidable.
std::optional<const Json*> quark_entry(std::string_view module, const Json& entries) {
  constexpr std::size_t kMaxSteps = 1'000;  // of all patterns, which every layer's name is compared with
  std::size_t steps = 0;
  for (const auto& [text, entry] : entries.items()) {
    const auto pattern = Pattern::compile(expression(text));
    if (text.find('[') != std::string::npos || !pattern.ok() || (steps += pattern->steps()) > kMaxSteps) return std::nullopt;
    if (pattern->match(module)) return &entry;
  }
  return nullptr;
}

/// Quark's config of a layer: by its name, else the one for all; null: undecidable.
const Json& quark_layer(std::string_view module, const Json& config) {
  static const Json kNull;
  const auto own = quark_entry(module, config_child(config, "layer_quant_config"));
  if (!own || !config_child(config, "layer_type_quant_config").empty()) return kNull;
  return *own != nullptr ? **own : config_child(config, "global_quant_config");
}

/// ModelOpt's config of a layer, or of all; null: another producer's.
const Json& modelopt_layer(std::string_view module, const Json& config) {
  static const Json kNull;
  if (config_text(config, {"quant_method", "method"}) != "modelopt") return kNull;
  const Json& inner = config_child(config, "quantization");
  const Json& quantization = inner.is_object() ? inner : config;  // nested in hf_quant_config.json, not in config.json
  if (config_text(quantization, {"quant_algo"}) != "mixed_precision") return quantization;
  return config_child(config_child(quantization, "quantized_layers"), std::string(module).c_str());
}

/// The weights that share a scale in one of Quark's tensors: all, or a channel.
std::optional<GroupShape> quark_group(const Json& tensor) {
  const std::string scheme = config_text(tensor, {"qscheme"});
  if (scheme == "per_tensor") return GroupShape::tensor();
  if (scheme == "per_channel") return GroupShape::channel();
  return std::nullopt;
}

std::optional<DType> quark_codes(const Json& tensor) {
  const std::string type = config_text(tensor, {"dtype"});
  if (type == "fp8_e4m3") return DType::e4m3;
  if (type == "int8") return DType::s8;
  return std::nullopt;
}

}  // namespace

std::string modelopt_algorithm(std::string_view module, const QuantConfig& config) {
  return config_text(modelopt_layer(module, config.json), {"quant_algo"});
}

std::optional<std::int64_t> modelopt_group_size(std::string_view module, const QuantConfig& config) {
  return config_int(modelopt_layer(module, config.json), {"group_size"});
}

bool is_quark(const QuantConfig& config) { return config_text(config.json, {"quant_method"}) == "quark"; }

bool is_quark_transposed(std::string_view module, const QuantConfig& config, const ConstTensorView& scale) {
  if (!is_quark(config)) return false;
  if (scale.rank == 2) return scale.dim(1) != 1;
  const Json& weight = config_child(quark_layer(module, config.json), "weight");
  return scale.rank == 1 && config_int(weight, {"ch_axis"}).value_or(0) != 0;
}

std::optional<Scheme> quark_scheme(std::string_view module, const QuantConfig& config, ZeroKind zero, DType scale) {
  const Json& layer = quark_layer(module, config.json);
  const Json& weight = config_child(layer, "weight");
  const auto codes = quark_codes(weight);
  const auto group = quark_group(weight);
  if (!codes || !group) return std::nullopt;
  Scheme scheme{{*codes, zero, *group, scale}, {}};
  const Json& input = config_child(layer, "input_tensors");
  if (input.is_null()) return scheme;
  const auto act_codes = quark_codes(input);
  const auto act_group = quark_group(input);
  const bool is_dynamic = config_bool(input, {"is_dynamic"}).value_or(false);
  if (!act_codes || !act_group || is_dynamic != (*act_group == GroupShape::channel())) return std::nullopt;
  if (is_dynamic && config_int(input, {"ch_axis"}) != 1) return std::nullopt;  // of [batch, tokens, channels]
  const bool symmetric = *act_codes == DType::e4m3 || config_bool(input, {"symmetric"}).value_or(false);
  scheme.act = {*act_codes, *act_group, symmetric ? ZeroKind::none : ZeroKind::integer};
  return scheme;
}

std::string quark_outputs(std::string_view module, const QuantConfig& config) {
  if (!is_quark(config)) return {};
  const auto cache = quark_entry(module, config_child(config.json, "kv_cache_quant_config"));
  if (cache && *cache != nullptr) return {};
  const Json& output = config_child(quark_layer(module, config.json), "output_tensors");
  return output.is_null() ? std::string() : fmt::format("output_tensors={}", storage::dump(output).substr(0, 60));
}

std::string quark_weights(std::string_view module, const QuantConfig& config) {
  if (!is_quark(config)) return {};
  const Json& weight = config_child(quark_layer(module, config.json), "weight");
  const std::string type = config_text(weight, {"dtype"}), group = config_text(weight, {"qscheme"}),
                    scales = config_text(weight, {"scale_format"});
  if (type.empty() || group.empty()) return {};
  std::string name = fmt::format("{}{} {}", scales == "e8m0" ? "mx" : scales == "e5m3" ? "amd" : "", type, group);
  constexpr std::size_t kMaxName = 40;
  if (name.size() > kMaxName || !std::ranges::all_of(name, [](unsigned char c) { return std::isgraph(c) != 0 || c == ' '; }))
    return {};
  const auto space = static_cast<std::ptrdiff_t>(name.find(' '));
  std::transform(name.begin(), name.begin() + space, name.begin(), [](unsigned char c) { return std::toupper(c); });
  std::replace(name.begin() + space, name.end(), '_', ' ');
  return name;
}

}  // namespace nibble::codec
