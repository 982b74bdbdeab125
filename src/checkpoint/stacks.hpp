// Experts whose weights are stored together, in tensors [E,…]: a module for each.
//
//   experts.gate_up_proj         floats [E,N,K], or [E,K,N]    one W of N = 2·intermediate rows, gate and up; experts.down_proj beside it
//   experts.gate_up_proj_bias    floats [E,N]                  optional
//   experts.gate_up_proj         e4m3 [E,N,K]                  Hugging Face "fp8", and
//   experts.gate_up_proj_scale_inv      f32 [E,⌈N/bn⌉,⌈K/bk⌉], or [E,1,1]; experts.gate_up_proj_activation_scale [E] with static activations
//   experts.gate_up_proj         e4m3 [E,K,N]                  FBGEMM's of Llama 4, and experts.gate_up_proj_scale f32 [E,1,N], of down_proj [E,N,1]
//   experts.gate_up_proj_blocks, experts.gate_up_proj_scales   MXFP4 [E,N,K/32,16], [E,N,K/32]
//   experts.gate_up_proj_packed  s32 [E,N,K·b/32]              pack-quantized of compressed-tensors, which packs slice by slice: each is a
//   experts.gate_up_proj_scale   f16 [E,N,G]                   layer's as its format has them
//   experts.gate_up_proj_zero_point     s32 [E,N·b/32,G]       optional
//   experts.gate_up_proj_shape   s64 [3]                       E, N, K
//
// Element e of them is the module experts.e.gate_up_proj, whose tensors have the suffixes that codecs know: weight, or weight.transposed for [K,N]; weight_scale_inv,
// weight_scale, activation_scale; blocks, scales; weight_packed, weight_zero_point, weight_shape; bias. The order of dimensions follows from both matrices: what gate_up writes is twice what down reads.
// Source: huggingface/transformers src/transformers/models/{gpt_oss,llama4,qwen3_moe,mixtral}/modeling_*.py, and
// src/transformers/integrations/{finegrained_fp8,fbgemm_fp8}.py; vllm-project/compressed-tensors
// src/compressed_tensors/compressors/pack_quantized/helpers.py.
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
/// What codecs call a tensor of a stack.
std::string_view stacked_suffix(const Checkpoint::Impl::Group::Stack& stack, std::string_view tensor);
/// What an expert has of a tensor: its bytes, and their shape. Of scales [E,1,N] of columns [N]; of the sizes E, N, K the last two.
struct StackedElement {
  std::uint64_t first_byte, bytes;
  std::vector<std::int64_t> shape;
};
StackedElement stacked_element(const Checkpoint::Impl::Group::Stack& stack, const TensorInfo& tensor);

/// Whether rows of gate and up take turns in the one matrix of a stack, the gate's first, which no tensor says: in gpt-oss they do. Experts
/// with biases, or of MXFP4, are gpt-oss's where no model_type says otherwise. Errors: unsupported for those of a model that is not known.
Result<bool> takes_turns(const Checkpoint::Impl& in, std::string_view stack);

/// Rows 0, 2, 4, … and then rows 1, 3, 5, …: gate and up one below the other, of gpt-oss, whose rows of both take turns.
Result<QuantTensor> deinterleaved(QuantTensor q);

}  // namespace nibble
