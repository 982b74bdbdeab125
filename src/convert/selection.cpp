// See selection.hpp.
#include "convert/selection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <vector>

namespace nibble {
namespace {

using Words = std::vector<std::string>;

Words split(std::string_view text, char separator) {
  Words parts(1);
  for (const char c : text) {
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return parts;
}

bool is_number(std::string_view text) { return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos; }

bool one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, word) != words.end();
}

/// A name's last component that is no number, its words, and the components before it.
struct Place {
  std::string leaf;
  Words words, parents;
};

Place place_of(std::string_view name) {
  Words parts = split(name, '.');
  while (parts.size() > 1 && is_number(parts.back())) parts.pop_back();
  Place place;
  place.leaf = parts.back();
  place.words = split(place.leaf, '_');
  parts.pop_back();
  place.parents = std::move(parts);
  return place;
}

/// "transformer.h.0." of "transformer.h.0.attn.c_proj"; "" of a name without a number.
std::string_view block_of(std::string_view name) {
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t dot = std::min(name.find('.', begin), name.size());
    if (dot < name.size() && is_number(name.substr(begin, dot - begin))) end = dot + 1;
    begin = dot + 1;
  }
  return name.substr(0, end);
}

void collect(const Json& json, const std::string& key, std::set<std::int64_t>& vocabulary, std::set<std::int64_t>& experts,
             std::set<std::int64_t>& sizes) {
  if (json.is_structured()) {
    for (const auto& [name, value] : json.items()) collect(value, json.is_object() ? name : key, vocabulary, experts, sizes);
  } else if (json.is_number_integer() && (!json.is_number_unsigned() || json.get<std::uint64_t>() <= INT64_MAX)) {
    auto& set = key.find("vocab_size") != std::string::npos ? vocabulary
                : key.find("expert") != std::string::npos   ? experts
                                                            : sizes;
    set.insert(json.get<std::int64_t>());
  }
}

/// Whether the weight is an embedding table. Names are reliable only for weights without a bias: with one, embed_state is a linear layer.
bool is_table(const Place& place) {
  if (place.words.back().starts_with("proj") || place.words.back() == "dense") return false;
  const auto names_a_table = [](const std::string& word) {
    return word.starts_with("emb") || word.find("embedder") != std::string::npos ||
           one_of(word, {"wte", "wpe", "table", "token", "tokens", "pe", "codebook"});
  };
  if (std::ranges::find(place.words, "patch") != place.words.end()) return false;  // a patch embedding, which is a linear layer
  const bool queries =
      place.words.size() == 2 && one_of(place.words[0], {"query", "queries"}) && place.words[1].starts_with("feat");
  return queries || one_of(place.leaf, {"shared", "reference_points", "bias_values"}) || place.words.back() == "bias" ||
         std::ranges::any_of(place.words, names_a_table);
}

/// A gate with as many outputs as inputs is an ordinary layer, but inside of a router every layer belongs to it.
bool is_router(const Place& place, const WeightShape& w, bool as_many_as_experts) {
  if (std::ranges::any_of(place.parents, [](const std::string& p) { return p == "gate" || p == "router"; })) return true;
  const bool named = one_of(place.leaf, {"gate", "shared_expert_gate"}) || place.words.back() == "router";
  return named && (w.n < w.k || as_many_as_experts);
}

/// The places whose weights are stored like this one: beside it, and of this name in the same block.
std::array<std::string, 2> neighbours(std::string_view name) {
  const std::size_t dot = name.rfind('.') + 1;  // 0 without one
  return {std::string(name.substr(0, dot)), fmt::format("{}*.{}", block_of(name), name.substr(dot))};
}

bool transposed(const WeightShape& w) { return w.bias && *w.bias != w.n && *w.bias == w.k; }

}  // namespace

Selection::Selection(const Json& config, std::span<const WeightShape> all) {
  collect(config, "", vocabulary_, experts_, sizes_);
  for (const WeightShape& w : all)
    if (!w.conv && transposed(w)) std::ranges::move(neighbours(w.name), std::inserter(transposed_, transposed_.end()));
}

std::optional<LeftWeight> Selection::left(const WeightShape& w) const {
  const Place place = place_of(w.name);
  if (transposed(w))
    return LeftWeight{w.conv ? "its bias has an element per input channel: a transposed convolution, which formats cannot hold"
                             : "stored as [K,N], as its bias of N elements shows (GPT-2's Conv1D); formats hold [N,K]"};
  if (w.bias && *w.bias != w.n)
    return LeftWeight{fmt::format("its bias has {} elements, not N={}, so it is no layer [N,K]", *w.bias, w.n)};
  if (w.conv) {
    const bool upsamples = w.name.find("upsample") != std::string::npos || w.name.find("upscale") != std::string::npos ||
                           w.name.find("deconv") != std::string::npos;
    if (upsamples && w.n == w.k && !w.bias)
      return LeftWeight{"named like a transposed convolution, and its shape does not tell which dimension is N"};
    return std::nullopt;
  }
  if (w.n == w.k && std::ranges::any_of(neighbours(w.name), [&](const std::string& p) { return transposed_.contains(p); }))
    return LeftWeight{"square, beside weights that are stored as [K,N] (GPT-2's Conv1D); formats hold [N,K]"};
  if (vocabulary_.contains(w.n) && !sizes_.contains(w.n))
    return LeftWeight{fmt::format("an embedding or output head: N={} is the size of the vocabulary", w.n), true};
  if (one_of(place.leaf, {"lm_head", "lm_heads", "embed_out"})) return LeftWeight{"an output head", true};
  if (is_router(place, w, experts_.contains(w.n))) return LeftWeight{"a router of experts, which loaders keep in float", true};
  if (!w.bias && is_table(place)) return LeftWeight{"an embedding: rows of it are looked up, not multiplied", true};
  return std::nullopt;
}

}  // namespace nibble
