// Experts whose weights are stored together, in tensors [E,…]: a module for each.
//
//   experts.gate_up_proj         floats [E,N,K], or [E,K,N]    one W of N = 2·intermediate rows, gate and up; experts.down_proj beside it
//   experts.gate_up_proj_bias    floats [E,N]                  optional
//   experts.gate_up_proj_blocks, experts.gate_up_proj_scales   MXFP4 [E,N,K/32,16], [E,N,K/32]
//
// Element e of them is the module experts.e.gate_up_proj, whose tensors have the suffixes that codecs know: weight, or weight.transposed for [K,N]; blocks,
// scales; bias. The order of dimensions follows from both matrices: what gate_up writes is twice what down reads.
// Source: huggingface/transformers src/transformers/models/{gpt_oss,llama4,qwen3_moe,mixtral}/modeling_*.py.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/checkpoint_impl.hpp"

namespace nibble {

/// The modules of the experts in a group of tensors, expert by expert; none where it has no such experts. Why tensors that are called so are
/// none is added to `notes`.
std::vector<Checkpoint::Impl::Group> stacked_experts(const Checkpoint::Impl::Group& group, const storage::Shards& shards,
                                                     std::vector<Note>& notes);

}  // namespace nibble
