// One layer as a checkpoint format stores it: the inverse of read_module().
//
//   auto tensors = nibble::write_module(q, "awq");               // "qweight", "qzeros", "scales", ...
//   auto config = nibble::write_config("awq", layers, {"lm_head"});  // of config.json, for all layers together
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// A tensor of a layer.
struct ModuleTensor {
  std::string suffix;  // what follows the name of the layer: "qweight"
  Tensor tensor;
};

/// The tensors of a layer in `format`, a FormatInfo::name with can_write, without loss; bias included.
/// act: how activations are quantized, for formats that store something of it.
/// Errors: not_found for an unknown format; unsupported with the reason when the format cannot hold `q`.
Result<std::vector<ModuleTensor>> write_module(const QuantTensor& q, std::string_view format, const ActScheme& act = {});

/// A layer that write_module() wrote.
struct WrittenLayer {
  std::string name;        // "model.layers.0.mlp.down_proj"
  std::string format;      // of its tensors
  Scheme scheme;           // of weights and activations
  bool act_order = false;  // its QuantTensor has a g_idx
};

/// The quantization_config of a checkpoint of such layers, as JSON text. not_quantized: the names of other linear layers.
/// Errors: not_found for an unknown format; unsupported when the format's config cannot express the layers.
Result<std::string> write_config(std::string_view format, std::span<const WrittenLayer> layers,
                                 std::span<const std::string> not_quantized);

}  // namespace nibble
