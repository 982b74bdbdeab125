// The interface between checkpoints and formats: a format sees only the tensors of one module, by suffix.
//
// Adding a format: one file that fills a Format, one line in table.cpp, one golden file.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/io/stored_codes.hpp"
#include "json/json_values.hpp"
#include "nibble/checkpoint.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble::codec {

/// The tensors whose names are `module.suffix`, keyed by suffix ("qweight", "weight_scale", ...). Bytes are bounds-checked
/// and may be unaligned.
struct ModuleTensors {
  std::string module;
  std::map<std::string, ConstTensorView, std::less<>> by_suffix;
  bool part = false;           // of a layer: what only the whole shows cannot be told
  bool without_codes = false;  // their bytes are not there: Format::read leaves QuantTensor::codes empty

  const ConstTensorView* find(std::string_view suffix) const {
    auto it = by_suffix.find(suffix);
    return it == by_suffix.end() ? nullptr : &it->second;
  }
};

class CtTargets;

/// What a dimension's elements are: of output or input channels (n, k), of two output channels, of 32-bit words of their codes, or of groups
/// of them; the group of every input channel; or the numbers N and K.
enum class Axis : std::uint8_t { n, k, n_pairs, n_words, k_words, n_groups, k_groups, group_of_k, sizes };
/// A tensor that a format owns, and its dimensions; those in front of more are of size 1. None: it is of the whole layer.
struct StoredTensor {
  std::string_view suffix;
  std::span<const Axis> axes = {};
};
namespace axes {
inline constexpr Axis kN[] = {Axis::n}, kK[] = {Axis::k}, kGroupOfK[] = {Axis::group_of_k}, kSizes[] = {Axis::sizes},
                      kCodes[] = {Axis::n, Axis::k}, kGroups[] = {Axis::n_groups, Axis::k_groups};
}  // namespace axes

/// The quantization config of config.json (or quantize_config.json, quant_config.json); an empty object when there is none.
struct QuantConfig {
  Json json = Json::object();
  std::string source;                        // file it came from, for messages
  std::shared_ptr<const CtTargets> targets;  // of json's config_groups, prepared for many look-ups; null: not prepared
};

/// A tensor that a format writes, ready to store.
struct EncodedTensor {
  std::string suffix;
  Tensor tensor;
};

/// A module as it was written, for the config.
struct WrittenModule {
  std::string name;
  WeightScheme scheme;
  bool act_order = false;
  ActScheme act = {};
  bool conv = false;
  std::string_view format = {};  // empty: the format of the config
  std::string other_acts = {};   // Module::other_acts
};

/// The contents of a config to be written.
struct WrittenCheckpoint {
  std::vector<WrittenModule> modules;
  std::vector<std::string> not_quantized;  // the names of other layers
  std::vector<std::string> tied_heads;     // of layers that share the weight of the embedding, so that none is stored for them
  const QuantConfig* source = nullptr;     // of the checkpoint that was converted
};

struct Format {
  std::string_view name;
  std::string_view summary;
  bool can_write;
  /// The quant_method of configs of this format.
  std::span<const std::string_view> methods;
  /// The tensors it owns; others beside them (k_scale of a quantized KV cache, ...) are carried over unchanged.
  std::span<const StoredTensor> tensors;

  /// Recognises a module from suffixes, dtypes and shapes; fills everything of `Module` but name, tensors and bytes.
  /// nullopt: not this format. An error: this format, but broken (message names the tensor and the values).
  /// The config is used only for what shapes do not show (GPTQ v1/v2, sym) and for `claimed`; contradictions become notes.
  std::optional<Result<Module>> (*detect)(const ModuleTensors& tensors, const QuantConfig& config);

  /// Decodes; the module is one that detect() returned.
  Result<QuantTensor> (*read)(const ModuleTensors& tensors, const Module& module, const QuantConfig& config,
                              std::vector<Note>& notes);

  /// How the codes are stored, from which all of read()'s come: their rows can be decoded without it, block by block. nullopt: read() does
  /// more with them. Null: so for every module.
  std::optional<StoredCodes> (*codes)(const ModuleTensors& tensors, const Module& module, const QuantConfig& config);

  /// Encodes without loss. Errors: unsupported with the reason why the format cannot hold `q` with activations quantized like `act`. Null
  /// unless can_write.
  Result<std::vector<EncodedTensor>> (*encode)(const QuantTensor& q, const ActScheme& act);

  /// The `quantization_config` of such a checkpoint, or why the format's config cannot express the source's. Null unless can_write.
  Result<Json> (*write_config)(const WrittenCheckpoint& written);

  /// The same for a convolution, even if its filter has one element. Null where the format has none.
  Result<std::vector<EncodedTensor>> (*encode_conv)(const QuantTensor& q, const ActScheme& act) = nullptr;

  /// Whether a checkpoint has the experts of a layer in one tensor (stacks.hpp), and nothing else, in this format.
  bool experts_together = false;

  Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act = {}) const { return encode(q, act); }
};

/// All formats in the order detection tries them; "dense" last.
std::span<const Format> format_table();
/// The format of that name; null when there is none.
const Format* find_format(std::string_view name);

}  // namespace nibble::codec
