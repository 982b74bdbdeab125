#include "formats/model_config.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.hpp"
#include "formats/json.hpp"
#include "formats/mapped_file.hpp"

namespace nibble::storage {
namespace fs = std::filesystem;
namespace {

constexpr std::array<std::string_view, 3> kLegacyNames{"quantize_config.json", "quant_config.json", "hf_quant_config.json"};
constexpr std::array<std::string_view, 3> kLegacyMethods{"gptq", "awq", "modelopt"};
constexpr const char* kKeys[] = {"quantization_config", "compression_config"};  // the second is compressed-tensors' old name

// Python writes these bare words, which are not JSON, and configs of some state-space models contain them.
constexpr std::string_view kNonFinite[] = {"-Infinity", "Infinity", "NaN"};
constexpr std::string_view kMark = "nibble:";

/// Bare NaN → "nibble:NaN", so that the rest can be parsed...
std::string hide_non_finite(std::string_view text) {
  std::string out;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto* word =
        std::ranges::find_if(kNonFinite, [&](std::string_view w) { return !in_string && text.substr(i).starts_with(w); });
    if (word != std::end(kNonFinite)) {
      out += fmt::format("\"{}{}\"", kMark, *word);
      i += word->size() - 1;
      continue;
    }
    out += text[i];
    if (text[i] == '"') in_string = !in_string;
    if (text[i] == '\\' && in_string && i + 1 < text.size()) out += text[++i];
  }
  return out;
}

/// ... and back.
std::string show_non_finite(std::string text) {
  for (const std::string_view word : kNonFinite) {
    const std::string hidden = fmt::format("\"{}{}\"", kMark, word);
    for (std::size_t at = 0; (at = text.find(hidden, at)) != std::string::npos;) text.replace(at, hidden.size(), word);
  }
  return text;
}

template <class Json>
Result<Json> parse_config(std::string_view text, std::string_view source) {
  Result<Json> json = parse_json<Json>(text, source);
  if (!json.ok())  // errors keep the byte positions of the original text
    if (Result<Json> lenient = parse_json<Json>(hide_non_finite(text), source); lenient.ok()) json = std::move(lenient);
  if (json.ok() && !json->is_object())
    return error(StatusCode::corrupt_data, "{}: a {} at byte 0 where an object is expected", source, json->type_name());
  return json;
}

/// Nothing when there is no such file.
Result<std::optional<std::string>> read_text(const fs::path& path) {
  auto text = read_file(path);
  if (!text.ok() && text.status().code() == StatusCode::not_found) return std::optional<std::string>();
  if (!text.ok()) return text.status();
  return std::optional<std::string>(*std::move(text));
}

/// The objects that may hold a quantization config: the model's own, and that of a multimodal model's text part.
template <class Json>
std::vector<Json*> holders(Json& root) {
  std::vector<Json*> found{&root};
  if (const auto text = root.find("text_config"); text != root.end() && text->is_object()) found.push_back(&*text);
  return found;
}

const nlohmann::json* first_of(const nlohmann::json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const auto it = object.find(key); it != object.end()) return &*it;
  return nullptr;
}

void note_contradictions(ModelConfig& config, const nlohmann::json& legacy, std::string_view legacy_name) {
  static const std::initializer_list<const char*> kSame[] = {
      {"bits", "w_bit"}, {"group_size", "q_group_size"}, {"sym"}, {"desc_act"}, {"zero_point"},
      {"version"},       {"checkpoint_format"}};
  for (const auto& keys : kSame) {
    const nlohmann::json* ours = first_of(config.quant.json, keys);
    const nlohmann::json* theirs = first_of(legacy, keys);
    if (ours == nullptr || theirs == nullptr || *ours == *theirs) continue;
    const auto show = [](const nlohmann::json& value) {
      if (value.is_structured()) return fmt::format("an {}", value.type_name());
      return value.is_string() ? printable(value.get_ref<const std::string&>()) : value.dump();
    };
    config.notes.push_back(
        {Note::Severity::warning, fmt::format("{} says {}={}, {} says {}; {} counts", config.quant.source, *keys.begin(),
                                              show(*ours), legacy_name, show(*theirs), config.quant.source)});
  }
}

}  // namespace

std::span<const std::string_view> legacy_config_names() { return kLegacyNames; }

Result<ModelConfig> read_model_config(const fs::path& directory) {
  ModelConfig config;
  const fs::path path = directory / "config.json";
  NIBBLE_ASSIGN_OR_RETURN(std::optional<std::string> main_text, read_text(path));
  if (main_text) {
    config.text = std::move(*main_text);
    NIBBLE_ASSIGN_OR_RETURN(nlohmann::json root, parse_config<nlohmann::json>(config.text, path.string()));
    for (nlohmann::json* holder : holders(root)) {
      if (const auto type = holder->find("model_type"); type != holder->end() && type->is_string()) config.model_type = *type;
      for (const char* key : kKeys)
        if (const auto it = holder->find(key); it != holder->end() && it->is_object() && config.quant.source.empty())
          config.quant = {*it, "config.json"};
    }
  }
  for (std::size_t i = 0; i < kLegacyNames.size(); ++i) {
    const fs::path legacy_path = directory / kLegacyNames[i];
    NIBBLE_ASSIGN_OR_RETURN(const std::optional<std::string> text, read_text(legacy_path));
    if (!text) continue;
    NIBBLE_ASSIGN_OR_RETURN(nlohmann::json legacy, parse_config<nlohmann::json>(*text, legacy_path.string()));
    if (!config.quant.source.empty()) {
      note_contradictions(config, legacy, kLegacyNames[i]);
      continue;
    }
    if (!legacy.contains("quant_method") && !legacy.contains("method")) legacy["quant_method"] = kLegacyMethods[i];
    config.quant = {std::move(legacy), std::string(kLegacyNames[i])};
  }
  return config;
}

Result<codec::QuantConfig> parse_quant_config(std::string_view text) {
  NIBBLE_ASSIGN_OR_RETURN(nlohmann::json root, parse_config<nlohmann::json>(text, "config"));
  for (nlohmann::json* holder : holders(root))
    for (const char* key : kKeys)
      if (const auto it = holder->find(key); it != holder->end() && it->is_object()) return codec::QuantConfig{*it, "config"};
  return codec::QuantConfig{std::move(root), "config"};
}

Result<std::string> edit_model_config(std::string_view text, const std::optional<nlohmann::json>& quantization_config) {
  if (text.empty() && !quantization_config) return std::string();
  NIBBLE_ASSIGN_OR_RETURN(auto root, parse_config<nlohmann::ordered_json>(text.empty() ? "{}" : text, "config.json"));
  nlohmann::ordered_json* place = nullptr;  // keeps its place, and its position there, when there was one
  for (nlohmann::ordered_json* holder : holders(root))
    if (place == nullptr && holder->contains(kKeys[0])) place = holder;
  for (nlohmann::ordered_json* holder : holders(root))
    for (const char* key : kKeys)
      if (!quantization_config || holder != place || key != kKeys[0]) holder->erase(key);
  if (quantization_config) (place == nullptr ? root : *place)[kKeys[0]] = *quantization_config;
  return show_non_finite(root.dump(2)) + "\n";
}

}  // namespace nibble::storage
