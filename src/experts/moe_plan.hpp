// What a plan of a layer of experts has decided.
#pragma once

#include "experts/check.hpp"
#include "experts/device_rows.hpp"
#include "experts/shares.hpp"
#include "nibble/experts.hpp"

namespace nibble {

struct MoePlan::Impl {
  MoeSpec spec;
  EpilogueSpec sum;  // of the weighted sum: the residual and the type of D
  Plan gate_up, down;
  DType x_type, hidden_type, result_type;  // results: of `down`
  std::int64_t experts, k, hidden, n;
  std::int64_t gate_up_n;
  Backend memory;          // of the experts
  experts::Shares shares;  // in host memory

  std::size_t pairs() const { return static_cast<std::size_t>(spec.tokens_max * spec.top_k); }
  std::size_t x_row() const { return static_cast<std::size_t>(k * bits(x_type) / 8); }
  std::size_t hidden_row() const { return static_cast<std::size_t>(hidden * bits(hidden_type) / 8); }
  std::size_t result_row() const { return static_cast<std::size_t>(n * bits(result_type) / 8); }
  std::size_t workspace_bytes() const {
    if (memory == Backend::cuda) return device_workspace_bytes();
    return experts::kAlignment + experts::padded(static_cast<std::size_t>(experts) * sizeof(experts::Share)) +
           2 * experts::padded(pairs() * sizeof(std::int32_t)) + experts::padded(pairs() * result_row()) +
           shares.workspace_bytes();
  }
  std::size_t device_workspace_bytes() const;

  /// The checks of a run: all but those of ids, which the GPU does not check.
  Status check(const PackedExperts& gate_up_experts, const PackedExperts& down_experts, const ConstTensorView& x,
               const MoeOperands& operands, const TensorView& d) const;
  Status run_on_device(const PackedExperts& gate_up_experts, const PackedExperts& down_experts, const ConstTensorView& x,
                       const MoeOperands& operands, const TensorView& d, std::span<std::byte> workspace, Stream stream) const;
};

}  // namespace nibble
