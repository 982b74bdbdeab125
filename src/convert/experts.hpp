// Experts that are stored together, in tensors [E,…] (checkpoint/stacks.hpp), in the output of a transformation.
//
//   quantized   one by one, in every format but MXFP4, under the names that programs read quantized experts by:
//               experts.e.gate_proj, .up_proj and .down_proj, in models of Mixtral's kind experts.e.w1, .w3 and .w2
//   MXFP4       together, of gpt-oss, which alone has them so: experts.gate_up_proj_blocks, _scales and _bias, rows in turns
//   floats      together, as they were: experts.gate_up_proj and .down_proj, each with its bias beside it
//
// Rows of gate and up that take turns (gpt-oss) are told apart, each with its bias.
// Source: vllm-project/llm-compressor src/llmcompressor/modeling/moe/{linear_experts,conversion_mappings}.py; huggingface/transformers
// src/transformers/conversion_mapping.py and integrations/{compressed_tensors,mxfp4}.py.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint_impl.hpp"

namespace nibble {

/// Whether the module is an expert whose tensors have all experts of a layer.
bool is_stacked(const Checkpoint::Impl& in, const Module& module);
/// Whether experts that are stored together are written so; a format of null is floats.
bool stays_together(const codec::Format* format);
/// The modules that a module is written as: itself, or where its experts are stored together and the format has them one by one, what one of
/// them has. With their names and sizes; all else is the module's.
std::vector<Module> written_modules(const Checkpoint::Impl& in, const Module& module, const codec::Format* format);
/// Why the format cannot have the module: an expert that cannot be written one by one, or one of a layer that it has not. Needs no data.
Status check_form(const Checkpoint::Impl& in, const Module& module, const codec::Format& format);
/// The weights of written_modules(), of the module's.
Result<std::vector<QuantTensor>> written_weights(const Checkpoint::Impl& in, const Module& module, QuantTensor q,
                                                 const codec::Format* format);

/// The name of the tensor of all experts with what one of them has by this suffix: "weight", "bias", "blocks".
std::string stacked_name(const Module& module, std::string_view suffix);
/// An expert's W[N,K] in the order in which the floats of all are stored: itself, or [K,N].
Tensor stacked_weight(const Checkpoint::Impl& in, const Module& module, Tensor weight);

}  // namespace nibble
