// The JSON files beside the weights: their quantization configs.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/format.hpp"
#include "json/json_values.hpp"
#include "nibble/checkpoint.hpp"
#include "nibble/status.hpp"

namespace nibble::storage {

/// Legacy files that hold a quantization config of their own.
std::span<const std::string_view> legacy_config_names();

struct ModelConfig {
  std::string text;           // of config.json
  Json json;                  // the same, parsed; null when there is none
  std::string model_type;     // of the text model
  DType dtype = DType::none;  // that the model is loaded in
  codec::QuantConfig quant;
  std::vector<Note> notes;
};

/// Reads config.json's quantization_config (at the top or in text_config), else a legacy file. Where both exist and disagree,
/// config.json counts and a note says so. Missing files are fine; a file that is not a JSON object is corrupt_data.
Result<ModelConfig> read_model_config(const std::filesystem::path& directory);

/// The quantization config in a text: inside of a config.json, or the text itself.
Result<codec::QuantConfig> parse_quant_config(std::string_view text);

/// The output layers that models of this type may have without a weight of their own: they share the embedding's.
std::vector<std::string> tied_heads(std::string_view model_type);

/// The text of config.json with its quantization_config replaced, or removed when there is none to put in its place. Everything else
/// stays, in its order. "" (no config.json) becomes a file with only the quantization_config, or stays "".
Result<std::string> edit_model_config(std::string_view text, const std::optional<Json>& quantization_config);

}  // namespace nibble::storage
