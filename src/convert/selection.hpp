// Selects the float weights that are linear layers which loaders run quantized. Checkpoints do not say, so names, shapes, biases and the
// sizes in config.json decide; tests/unit/convert/selection_test.cpp holds the rules against the models of transformers.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "json/json_values.hpp"

namespace nibble {

/// A tensor NAME.weight of 2 dimensions [n,k], or a convolution's [n, k, Kh, Kw], and the elements of NAME.bias.
struct WeightShape {
  std::string name;
  std::int64_t n = 0, k = 0;
  std::optional<std::int64_t> bias = {};
  bool conv = false;
};

/// Why a weight stays as it is.
struct LeftWeight {
  std::string why;
  bool possible = false;  // it could be quantized, but loaders expect it in float
};

class Selection {
 public:
  /// `config` is config.json, or null; `all` are the weights of the model, because weights of a block are stored alike.
  Selection(const Json& config, std::span<const WeightShape> all);
  /// Nothing for a linear layer or a convolution.
  std::optional<LeftWeight> left(const WeightShape& weight) const;

 private:
  std::set<std::int64_t> vocabulary_, experts_, sizes_;  // numbers of config.json by their keys; sizes_ are all others
  std::set<std::string> transposed_;  // "h.0.attn." and "h.0.*.c_proj", where a bias shows that a weight is [K,N]
};

}  // namespace nibble
