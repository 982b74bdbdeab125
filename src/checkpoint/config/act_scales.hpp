// The tensors in which 8-bit checkpoints store scales of a layer's activations, in addition to their config.
//
//   input_scale       f32  []    one static scale, x ≈ (q − z)·s; activation_scale in some Hugging Face files; or [1], f16, bf16
//   input_zero_point  s8   []    z; absent when symmetric, and 0 where codes are e4m3
//   pre_quant_scale   f16  [K]   multiplies activations before they are quantized (ModelOpt); of a convolution [Ci]
//
// Source: vllm-project/compressed-tensors src/compressed_tensors/quantization; NVIDIA/Model-Optimizer modelopt/torch/export;
// huggingface/transformers src/transformers/integrations/finegrained_fp8.py.
#pragma once

#include <vector>

#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {

/// The tensors of layers with a byte a weight, int8 or FP8, these included.
inline constexpr StoredTensor kByteTensors[] = {{"weight", axes::kCodes},
                                                {"weight_scale", axes::kGroups},
                                                {"weight_zero_point", axes::kGroups},
                                                {"input_scale"},
                                                {"input_zero_point"},
                                                {"pre_quant_scale", axes::kK},
                                                {"bias", axes::kN}};

/// Checks types and shapes, and notes where they contradict m.claimed, which is set.
Status analyse_activations(const ModuleTensors& tensors, Module& m, const QuantConfig& config);

/// Fills m.other_acts, with a warning, where the config quantizes activations in a way that the format did not claim.
void find_other_activations(const ModuleTensors& tensors, Module& m, const QuantConfig& config);

/// Fills q.static_acts and q.prescale. An invalid scale or zero point is noted and ignored.
void read_activations(const ModuleTensors& tensors, const Module& m, QuantTensor& q, std::vector<Note>& notes);

/// Appends input_scale and input_zero_point [1].
void encode_activations(const QuantTensor& q, const ActScheme& act, std::vector<EncodedTensor>& out);

}  // namespace nibble::codec
