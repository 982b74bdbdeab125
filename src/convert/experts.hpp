// Experts that are stored together, in tensors [E,…] (checkpoint/stacks.hpp), in the output of a transformation.
//
//   quantized   one by one, in every format, under the names that programs read quantized experts by:
//               experts.e.gate_proj, .up_proj and .down_proj, in models of Mixtral's kind experts.e.w1, .w3 and .w2
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
/// The modules that a module is written as: itself, or where its experts are stored together, what one of them has one by one. With their
/// names and sizes; all else is the module's.
std::vector<Module> written_modules(const Checkpoint::Impl& in, const Module& module);
/// Why the expert cannot be written one by one; OK for every other module. Needs no data.
Status check_one_by_one(const Checkpoint::Impl& in, const Module& module);
/// The weights of written_modules(), of the module's.
Result<std::vector<QuantTensor>> written_weights(const Checkpoint::Impl& in, const Module& module, QuantTensor q);

/// The name of the tensor of all experts with these floats: suffix "weight" or "bias".
std::string stacked_name(const Module& module, std::string_view suffix);
/// An expert's W[N,K] in the order in which the floats of all are stored: itself, or [K,N].
Tensor stacked_weight(const Checkpoint::Impl& in, const Module& module, Tensor weight);

}  // namespace nibble
