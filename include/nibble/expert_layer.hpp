// Experts of checkpoints, whatever form they are stored in, packed for the plans of nibble/experts.hpp.
//
//   auto checkpoint = nibble::Checkpoint::open("Qwen3-30B-A3B-AWQ");
//   for (const nibble::ExpertLayer& layer : nibble::expert_layers(*checkpoint))
//     auto packed = nibble::pack_experts(*checkpoint, layer, gate_up_spec, down_spec);  // packed->gate_up, packed->down for MoePlan::make
//
// A matrix of an expert is a module of the checkpoint, of any format:
//
//   experts.E.gate_proj, .up_proj, .down_proj    Qwen, DeepSeek and most others
//   experts.E.w1, .w3, .w2                       Mixtral
//   experts.E.gate_up_proj, .down_proj           gate and up in one; so are experts that are stored together, as those of gpt-oss, of Llama 4 and
//                                                of models that transformers 5 has fused
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/checkpoint.hpp"
#include "nibble/experts.hpp"

namespace nibble {

/// The experts of a layer in a checkpoint.
struct ExpertLayer {
  std::string name;                  // "model.layers.0.mlp.experts"; expert e has the modules name.e.gate_up[i] and name.e.down
  std::int64_t count = 0;            // experts 0 … count − 1
  std::vector<std::string> gate_up;  // the gate and up, or the one matrix of both
  std::string down;
  bool interleaved = false;  // rows of gate and up take turns in the one matrix, the gate's first: gpt-oss
};

/// All layers of experts, in file order. A layer whose experts lack a matrix or a number is none; of what it lacks there is a line in `notes`.
std::vector<ExpertLayer> expert_layers(const Checkpoint& checkpoint, std::vector<ModuleNote>* notes = nullptr);
/// The layer of that name. Errors: not_found, with those that there are, or what the layer lacks.
Result<ExpertLayer> expert_layer(const Checkpoint& checkpoint, std::string_view name);

/// gate_up of an expert as one weight, all rows of the gate first, as EpilogueSpec::glu takes it; and down. Errors: those of Checkpoint::read and
/// join(); not_found for an expert that there is not.
Result<QuantTensor> read_gate_up(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                                 std::vector<Note>* notes = nullptr);
Result<QuantTensor> read_down(const Checkpoint& checkpoint, const ExpertLayer& layer, std::int64_t expert,
                              std::vector<Note>* notes = nullptr);

/// The packed experts of a layer.
struct PackedExpertLayer {
  PackedExperts gate_up, down;
};
/// Packs them for these specifications of an expert, one after the other, so that no more than one is in memory unpacked. Findings of reading
/// are appended to `notes`. Errors: those of read_gate_up(), read_down() and pack_experts().
Result<PackedExpertLayer> pack_experts(const Checkpoint& checkpoint, const ExpertLayer& layer, const LinearSpec& gate_up,
                                       const LinearSpec& down, const PackOptions& options = {},
                                       std::vector<ModuleNote>* notes = nullptr);

}  // namespace nibble
