// The claims of the configs of ModelOpt and Quark about a layer; ct_config.hpp has those of compressed-tensors.
//
// Source: NVIDIA/Model-Optimizer modelopt/torch/export; amd/Quark quark/torch/export and quark/torch/quantization/config.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {

/// ModelOpt's quant_algo for a layer, in lower case; "" where the config is another producer's.
std::string modelopt_algorithm(std::string_view module, const QuantConfig& config);
/// ModelOpt's group_size for a layer; nothing where its config has none or is another producer's.
std::optional<std::int64_t> modelopt_group_size(std::string_view module, const QuantConfig& config);

bool is_quark(const QuantConfig& config);
/// Whether the config is Quark's and a layer's scales belong to groups, which Quark transposes, or to the columns of its weight.
bool is_quark_transposed(std::string_view module, const QuantConfig& config, const ConstTensorView& scale);
/// Quark's claim about a layer whose weights are stored with such zero points and scales; nothing for what nibble does not know.
std::optional<Scheme> quark_scheme(std::string_view module, const QuantConfig& config, ZeroKind zero, DType scale);
/// "output_tensors={...}": the quantization of a layer's results, except for the KV cache; "" where there is none.
std::string quark_outputs(std::string_view module, const QuantConfig& config);
/// "INT4 per group": Quark's name for a layer's weights; "" where it has none, or quantizes them twice.
std::string quark_weights(std::string_view module, const QuantConfig& config);

}  // namespace nibble::codec
