#include "checkpoint/config/model_config.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/config/ct_config.hpp"
#include "checkpoint/io/json.hpp"
#include "checkpoint/io/mapped_file.hpp"
#include "core/error.hpp"

namespace nibble::storage {
namespace fs = std::filesystem;
namespace {

constexpr std::array<std::string_view, 3> kLegacyNames{"quantize_config.json", "quant_config.json", "hf_quant_config.json"};
constexpr std::array<std::string_view, 3> kLegacyMethods{"gptq", "awq", "modelopt"};
constexpr const char* kKeys[] = {"quantization_config", "compression_config"};  // the second is compressed-tensors' old name

/// The output layers that share the embedding's weight, where they are not called lm_head. Source: _tied_weights_keys of the models of
/// huggingface/transformers.
struct Head {
  std::string_view name;
  std::vector<std::string_view> model_types;
};
const std::vector<Head>& heads() {
  static const std::vector<Head> kHeads{
      {"cls.predictions.decoder",
       {"bert", "big_bird", "deberta", "deberta-v2", "ernie", "fnet", "layoutlm", "lxmert", "mobilebert", "megatron-bert", "mra",
        "nomic_bert", "nystromformer", "roc_bert", "roformer", "squeezebert", "tapas", "visual_bert", "yoso"}},
      {"lm_head.decoder",
       {"bert-generation", "camembert", "data2vec-text", "esm", "gte", "ibert", "jina_embeddings_v3", "longformer", "mpnet",
        "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}},
      {"proj_out", {"canary", "cohere_asr", "moonshine", "moonshine_streaming", "whisper"}},
      {"decoder", {"modernbert", "modernbert-decoder"}},
      {"decoder.output_projection", {"fsmt"}},
      {"embed_out", {"gpt_neox_japanese"}},
      {"generator_lm_head", {"convbert", "electra"}},
      {"head", {"rwkv"}},
      {"lm_head.out_proj", {"t5gemma", "t5gemma2"}},
      {"lm_loss", {"xlnet"}},
      {"mlm_score.decoder", {"bridgetower", "vilt"}},
      {"output", {"git"}},
      {"output_projection", {"biogpt", "trocr"}},
      {"pred_layer.proj", {"flaubert", "xlm"}},
      {"predictions.decoder", {"albert"}},
      {"text_decoder.cls.predictions.decoder", {"blip"}},
      {"text_decoder_postnet.lm_head", {"speecht5"}},
      {"text_model.lm_head", {"kosmos-2", "kosmos_2_text_model"}},
      {"vocab_projector", {"distilbert"}},
  };
  return kHeads;
}

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
    std::string shown;
    std::size_t done = 0;
    for (std::size_t at = 0; (at = text.find(hidden, done)) != std::string::npos; done = at + hidden.size())
      shown.append(text, done, at - done).append(word);
    text = shown.append(text, done);
  }
  return text;
}

template <class Value>
Result<Value> parse_config(std::string_view text, std::string_view source) {
  Result<Value> json = parse_json<Value>(text, source);
  const bool python = text.find("NaN") != text.npos || text.find("Infinity") != text.npos;
  if (!json.ok() && python)  // errors keep the byte positions of the original text
    if (Result<Value> lenient = parse_json<Value>(hide_non_finite(text), source); lenient.ok()) json = std::move(lenient);
  if (json.ok() && !json->is_object())
    return error(StatusCode::corrupt_data, "{}: a {} at byte 0 where an object is expected", source, json->type_name());
  return json;
}

/// The integers of quantization configs and their ranges. Values outside would be read as other numbers, or as absent.
struct IntegerKey {
  std::string_view name;
  std::int64_t least, most;
};
constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
constexpr IntegerKey kIntegers[] = {{"bits", 1, 32},
                                    {"w_bit", 1, 32},
                                    {"num_bits", 1, 32},
                                    {"group_size", -1, kMostInt32},
                                    {"q_group_size", -1, kMostInt32},
                                    {"weight_block_size", 1, kMostInt32},
                                    {"block_structure", 1, kMostInt32}};

Status check_integers(const Json& json, std::string_view source, const std::string& key = "") {
  if (json.is_object()) {
    for (const auto& [name, value] : json.items()) NIBBLE_RETURN_IF_ERROR(check_integers(value, source, name));
    return {};
  }
  if (json.is_array()) {
    for (const auto& value : json) NIBBLE_RETURN_IF_ERROR(check_integers(value, source, key));
    return {};
  }
  const auto* row = std::ranges::find(kIntegers, key, &IntegerKey::name);
  if (row == std::end(kIntegers) || json.is_null()) return {};
  if (json.is_string() && key == "block_structure") return {};       // "128x128" in old files
  const double value = json.is_number() ? json.get<double>() : NAN;  // whole or not: exl2 has 4.25 bits
  const bool in_range = value >= static_cast<double>(row->least) && value <= static_cast<double>(row->most);
  if (in_range) return {};
  return error(StatusCode::corrupt_data, "{}: {} is {}, not a number from {} to {}", source, key,
               json.is_string() ? printable(json.get_ref<const std::string&>()) : dump(json), row->least, row->most);
}

/// Nothing when there is no such file.
Result<std::optional<std::string>> read_text(const fs::path& path) {
  NIBBLE_RETURN_IF_ERROR(check_inside(path.parent_path(), path));
  auto text = read_file(path);
  if (!text.ok() && text.status().code() == StatusCode::not_found) return std::optional<std::string>();
  if (!text.ok()) return text.status();
  return std::optional<std::string>(*std::move(text));
}

/// The objects that may hold a quantization config: the model's own, and that of a multimodal model's text part.
template <class Value>
std::vector<Value*> holders(Value& root) {
  std::vector<Value*> found{&root};
  if (const auto text = root.find("text_config"); text != root.end() && text->is_object()) found.push_back(&*text);
  return found;
}

const Json* first_of(const Json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (const auto it = object.find(key); it != object.end()) return &*it;
  return nullptr;
}

/// Formats look through these lists for every module.
Status check_lists(const codec::QuantConfig& quant) {
  constexpr std::size_t kMost = 256, kMostDynamic = 10'000;
  const Json& transforms = codec::config_child(codec::config_child(quant.json, "transform_config"), "config_groups");
  std::size_t steps = transforms.size();
  for (const Json& transform : transforms) steps += codec::config_child(transform, "apply").size();
  const std::tuple<const char*, std::size_t, std::size_t> sizes[] = {
      {"config_groups", codec::config_child(quant.json, "config_groups").size(), kMost},
      {"steps of transform_config", steps, kMost},
      {"entries of dynamic", codec::config_child(quant.json, "dynamic").size(), kMostDynamic}};
  for (const auto& [what, size, most] : sizes)
    if (size > most) return error(StatusCode::unsupported, "{} has {} {}; nibble reads up to {}", quant.source, size, what, most);
  return {};
}

void note_contradictions(ModelConfig& config, const Json& legacy, std::string_view legacy_name) {
  static const std::initializer_list<const char*> kSame[] = {
      {"bits", "w_bit"}, {"group_size", "q_group_size"}, {"sym"}, {"desc_act"}, {"zero_point"},
      {"version"},       {"checkpoint_format"}};
  for (const auto& keys : kSame) {
    const Json* ours = first_of(config.quant.json, keys);
    const Json* theirs = first_of(legacy, keys);
    if (ours == nullptr || theirs == nullptr || *ours == *theirs) continue;
    const auto show = [](const Json& value) {
      if (value.is_structured()) return fmt::format("an {}", value.type_name());
      return value.is_string() ? printable(value.get_ref<const std::string&>()) : dump(value);
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
    NIBBLE_ASSIGN_OR_RETURN(Json root, parse_config<Json>(config.text, path.string()));
    for (Json* holder : holders(root)) {
      if (const auto type = holder->find("model_type"); type != holder->end() && type->is_string()) config.model_type = *type;
      const std::string dtype = codec::config_text(*holder, {"dtype", "torch_dtype"});
      if (!dtype.empty()) config.dtype = dtype == "bfloat16" ? DType::bf16 : dtype == "float16" ? DType::f16 : DType::f32;
      for (const char* key : kKeys)
        if (const auto it = holder->find(key); it != holder->end() && it->is_object() && config.quant.source.empty())
          config.quant = {*it, "config.json", nullptr};
    }
    NIBBLE_RETURN_IF_ERROR(check_integers(config.quant.json, path.string()));
    config.json = std::move(root);
  }
  for (std::size_t i = 0; i < kLegacyNames.size(); ++i) {
    const fs::path legacy_path = directory / kLegacyNames[i];
    NIBBLE_ASSIGN_OR_RETURN(const std::optional<std::string> text, read_text(legacy_path));
    if (!text) continue;
    NIBBLE_ASSIGN_OR_RETURN(Json legacy, parse_config<Json>(*text, legacy_path.string()));
    NIBBLE_RETURN_IF_ERROR(check_integers(legacy, legacy_path.string()));
    if (!config.quant.source.empty()) {
      note_contradictions(config, legacy, kLegacyNames[i]);
      continue;
    }
    if (!legacy.contains("quant_method") && !legacy.contains("method")) legacy["quant_method"] = kLegacyMethods[i];
    config.quant = {std::move(legacy), std::string(kLegacyNames[i]), nullptr};
  }
  NIBBLE_RETURN_IF_ERROR(check_lists(config.quant).with_context(directory.string()));
  config.quant.targets = std::make_shared<codec::CtTargets>(config.quant.json);
  return config;
}

Result<codec::QuantConfig> parse_quant_config(std::string_view text) {
  NIBBLE_ASSIGN_OR_RETURN(Json root, parse_config<Json>(text, "config"));
  const Json* found = &root;
  for (Json* holder : holders(root))
    for (const char* key : kKeys)
      if (const auto it = holder->find(key); it != holder->end() && it->is_object() && found == &root) found = &*it;
  codec::QuantConfig quant{*found, "config", nullptr};
  NIBBLE_RETURN_IF_ERROR(check_integers(quant.json, "config"));
  NIBBLE_RETURN_IF_ERROR(check_lists(quant));
  return quant;
}

std::vector<std::string> tied_heads(std::string_view model_type) {
  std::vector<std::string> names;
  for (const Head& head : heads())
    if (std::ranges::find(head.model_types, model_type) != head.model_types.end()) names.emplace_back(head.name);
  if (names.empty()) names.emplace_back("lm_head");
  return names;
}

Result<std::string> edit_model_config(std::string_view text, const std::optional<Json>& quantization_config) {
  if (text.empty() && !quantization_config) return std::string();
  NIBBLE_ASSIGN_OR_RETURN(auto root, parse_config<OrderedJson>(text.empty() ? "{}" : text, "config.json"));
  OrderedJson* place = nullptr;  // an existing entry keeps its object and its position
  for (OrderedJson* holder : holders(root))
    if (place == nullptr && holder->contains(kKeys[0])) place = holder;
  for (OrderedJson* holder : holders(root))
    for (const char* key : kKeys)
      if (!quantization_config || holder != place || key != kKeys[0]) holder->erase(key);
  if (quantization_config) (place == nullptr ? root : *place)[kKeys[0]] = *quantization_config;
  return show_non_finite(dump(root, 2)) + "\n";
}

}  // namespace nibble::storage
