// Layers of experts among the modules of a checkpoint, by their names, and packing them.
#include "nibble/expert_layer.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "checkpoint/stacks.hpp"
#include "core/error.hpp"
#include "experts/pack_each.hpp"
#include "nibble/join.hpp"
#include "nibble/packed_file.hpp"

namespace nibble {
namespace {

constexpr std::string_view kExperts = "experts";  // at the end of the name of a layer

/// How the matrices of an expert are called.
struct Names {
  std::vector<std::string_view> gate_up;
  std::string_view down;
};
const std::array<Names, 3>& all_names() {
  static const std::array<Names, 3> kNames{Names{{"gate_proj", "up_proj"}, "down_proj"}, Names{{"w1", "w3"}, "w2"},
                                           Names{{"gate_up_proj"}, "down_proj"}};
  return kNames;
}

/// "model.layers.0.mlp.experts.7.w1" in its parts.
struct ExpertName {
  std::string_view layer, matrix;
  std::int64_t expert;
};
std::optional<ExpertName> parse(std::string_view name) {
  const std::size_t last = name.rfind('.');
  if (last == name.npos || last == 0) return std::nullopt;
  const std::size_t before = name.rfind('.', last - 1);
  if (before == name.npos) return std::nullopt;
  ExpertName parsed{name.substr(0, before), name.substr(last + 1), 0};
  const std::string_view number = name.substr(before + 1, last - before - 1);
  const auto [end, failure] = std::from_chars(number.data(), number.data() + number.size(), parsed.expert);
  if (failure != std::errc() || end != number.data() + number.size() || std::to_string(parsed.expert) != number ||
      parsed.expert < 0 || !parsed.layer.ends_with(kExperts))
    return std::nullopt;
  return parsed;
}

/// The experts that have each matrix.
using Matrices = std::map<std::string_view, std::set<std::int64_t>>;

/// The layer of these matrices, or what it lacks.
Result<ExpertLayer> layer_of(const Checkpoint& checkpoint, std::string_view name, const Matrices& matrices) {
  std::int64_t count = 0;
  for (const auto& [matrix, experts] : matrices) count = std::max(count, *experts.rbegin() + 1);
  const auto has = [&](std::string_view matrix) { return matrices.contains(matrix); };
  std::string wanted;
  for (const Names& names : all_names()) {
    if (!has(names.down) || !std::ranges::all_of(names.gate_up, has)) {
      wanted += fmt::format("{}{} and {}", wanted.empty() ? "" : ", or ", fmt::join(names.gate_up, ", "), names.down);
      continue;
    }
    ExpertLayer layer{.name = std::string(name), .count = count, .gate_up = {}, .down = std::string(names.down)};
    for (const std::string_view matrix : names.gate_up) layer.gate_up.emplace_back(matrix);
    for (const auto& [matrix, experts] : matrices) {
      if (matrix != names.down && std::ranges::find(names.gate_up, matrix) == names.gate_up.end()) continue;
      for (std::int64_t e = 0; std::ssize(experts) < count && e < count; ++e)
        if (!experts.contains(e)) return error(StatusCode::not_found, "{}: expert {} of {} has no {}", name, e, count, matrix);
    }
    const Module* const first = checkpoint.find_module(fmt::format("{}.0.{}", name, names.gate_up.front()));
    if (first != nullptr && !first->stack.empty()) {
      NIBBLE_ASSIGN_OR_RETURN(layer.interleaved, takes_turns(checkpoint.impl(), first->stack));
    }
    return layer;
  }
  std::string found;
  for (const auto& [matrix, experts] : matrices) found += fmt::format("{}{}", found.empty() ? "" : ", ", matrix);
  return error(StatusCode::not_found, "{}: its experts have {}; expected {}", name, found, wanted);
}

/// The layers that there are or seem to be, in file order.
std::vector<std::pair<std::string, Result<ExpertLayer>>> all_layers(const Checkpoint& checkpoint) {
  std::vector<std::string_view> order;
  std::unordered_map<std::string_view, Matrices> layers;
  for (const Module& module : checkpoint.modules()) {
    const auto name = parse(module.name);
    if (!name) continue;
    const auto [at, fresh] = layers.try_emplace(name->layer);
    if (fresh) order.push_back(name->layer);
    at->second[name->matrix].insert(name->expert);
  }
  std::vector<std::pair<std::string, Result<ExpertLayer>>> found;
  for (const std::string_view name : order) found.emplace_back(name, layer_of(checkpoint, name, layers[name]));
  return found;
}

Result<const Module*> module_of(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                                std::string_view matrix) {
  const std::string name = fmt::format("{}.{}.{}", layer.name, expert, matrix);
  const Module* module = checkpoint.find_module(name);
  if (module != nullptr && expert < layer.count) return module;
  return error(StatusCode::not_found, "{}: no module {}; the layer has experts 0…{}", checkpoint.path().string(), name,
               layer.count - 1);
}

Result<QuantTensor> read_module_of(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                                   std::string_view matrix, std::vector<Note>* notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Module* module, module_of(checkpoint, layer, expert, matrix));
  return checkpoint.read(*module, notes);
}

/// The field in which the modules differ, with the values; "" where experts of both can be packed together.
std::string difference(const Module& a, const Module& b) {
  if (a.n != b.n || a.k != b.k) return fmt::format("W is [{},{}] and [{},{}]", a.n, a.k, b.n, b.k);
  if (a.format != b.format) return fmt::format("the format is {} and {}", a.format, b.format);
  if (a.scheme != b.scheme) return fmt::format("the scheme is {} and {}", a.scheme.name(), b.scheme.name());
  return {};
}

}  // namespace

std::vector<ExpertLayer> expert_layers(const Checkpoint& checkpoint, std::vector<ModuleNote>* notes) {
  std::vector<ExpertLayer> found;
  for (auto& [name, layer] : all_layers(checkpoint)) {
    if (layer.ok())
      found.push_back(*std::move(layer));
    else if (notes != nullptr)
      notes->push_back({name, {Note::Severity::warning, layer.status().message()}});
  }
  return found;
}

Result<ExpertLayer> expert_layer(const Checkpoint& checkpoint, std::string_view name) {
  std::string there;
  for (auto& [other, layer] : all_layers(checkpoint)) {
    if (other == name) return std::move(layer);
    there += (there.empty() ? "" : ", ") + other;
  }
  constexpr std::size_t kShown = 200;
  if (there.size() > kShown) there = there.substr(0, there.rfind(',', kShown)) + ", ...";
  return error(StatusCode::not_found, "{} has no layer of experts {}; it has {}", checkpoint.path().string(), name,
               there.empty() ? "none" : there);
}

Result<QuantTensor> read_gate_up(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                                 std::vector<Note>* notes) try {
  std::vector<QuantTensor> parts;
  for (const std::string& matrix : layer.gate_up) {
    NIBBLE_ASSIGN_OR_RETURN(QuantTensor part, read_module_of(checkpoint, layer, expert, matrix, notes));
    parts.push_back(std::move(part));
  }
  if (parts.size() > 1) {
    Result<QuantTensor> joined = join(parts);
    if (joined.ok()) return joined;
    const std::string remedy = parts[0].prescale == parts[1].prescale
                                   ? ""
                                   : "; dequantize the checkpoint, which multiplies them into the weights, and quantize it again";
    return error(joined.status().code(), "{}.{}: {}{}", layer.name, expert, joined.status().message(), remedy);
  }
  if (!layer.interleaved) return std::move(parts.front());
  return deinterleaved(std::move(parts.front()));
} catch (...) {
  return caught();
}

Result<QuantTensor> read_down(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                              std::vector<Note>* notes) {
  return read_module_of(checkpoint, layer, expert, layer.down, notes);
}

Result<PackedExpertLayer> pack_experts(const Checkpoint& checkpoint, const ExpertLayer& layer, const LinearSpec& gate_up,
                                       const LinearSpec& down, const PackOptions& options, std::vector<ModuleNote>* notes) try {
  const auto collect = [&](std::int64_t expert, std::vector<Note>& found) {
    if (notes == nullptr) return;
    for (Note& note : found) notes->push_back({fmt::format("{}.{}", layer.name, expert), std::move(note)});
  };
  const auto context = [&](std::int64_t expert) { return fmt::format("{}.{}", layer.name, expert); };
  const auto pack_gate_up = [&](std::int64_t expert, const PackOptions& same) -> Result<PackedWeight> {
    std::vector<Note> found;
    NIBBLE_ASSIGN_OR_RETURN(const QuantTensor q, read_gate_up(checkpoint, layer, expert, notes == nullptr ? nullptr : &found));
    collect(expert, found);
    Result<PackedWeight> weight = pack(q, gate_up, same);
    return weight.ok() ? std::move(weight) : weight.status().with_context(context(expert));
  };
  const auto pack_down = [&](std::int64_t expert, const PackOptions& same) -> Result<PackedWeight> {
    std::vector<Note> found;
    NIBBLE_ASSIGN_OR_RETURN(const Module* module, module_of(checkpoint, layer, expert, layer.down));
    Result<PackedWeight> weight = pack(checkpoint, *module, down, same, notes == nullptr ? nullptr : &found);
    collect(expert, found);
    return weight.ok() ? std::move(weight) : weight.status().with_context(context(expert));
  };
  // Before hours of reading: experts that cannot be packed together.
  for (std::int64_t e = 1; e < layer.count; ++e) {
    std::vector<std::string_view> matrices(layer.gate_up.begin(), layer.gate_up.end());
    matrices.emplace_back(layer.down);
    for (const std::string_view matrix : matrices) {
      NIBBLE_ASSIGN_OR_RETURN(const Module* first, module_of(checkpoint, layer, 0, matrix));
      NIBBLE_ASSIGN_OR_RETURN(const Module* other, module_of(checkpoint, layer, e, matrix));
      if (const std::string what = difference(*first, *other); !what.empty())
        return error(StatusCode::invalid_argument, "{}: {} of experts 0 and {} differ: {}", layer.name, matrix, e, what);
    }
  }
  NIBBLE_ASSIGN_OR_RETURN(PackedExperts up, pack_each(layer.count, pack_gate_up, gate_up, options));
  NIBBLE_ASSIGN_OR_RETURN(PackedExperts packed_down, pack_each(layer.count, pack_down, down, options));
  return PackedExpertLayer{std::move(up), std::move(packed_down)};
} catch (...) {
  return caught();
}

}  // namespace nibble
