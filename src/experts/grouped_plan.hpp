// What a plan of a grouped product has decided.
#pragma once

#include "experts/check.hpp"
#include "experts/shares.hpp"
#include "nibble/experts.hpp"

namespace nibble {

struct GroupedPlan::Impl {
  Plan plan;
  LinearSpec spec;
  std::int64_t experts, n, k;
  Backend memory;          // of the experts
  experts::Shares shares;  // in host memory
  experts::Shares shares_of_ids = {};

  std::size_t row_bytes() const { return static_cast<std::size_t>(k * bits(spec.a_dtype) / 8); }
  std::int64_t columns() const { return spec.epilogue.columns(n); }  // of D
  std::size_t shares_bytes() const { return experts::padded(static_cast<std::size_t>(experts) * sizeof(experts::Share)); }
  std::size_t pairs_bytes() const { return experts::padded(static_cast<std::size_t>(spec.m_max) * sizeof(std::int32_t)); }
  std::size_t device_workspace_bytes() const;
  std::size_t device_ids_workspace_bytes() const;

  Status run_on_device(const PackedExperts& of, const ConstTensorView& a, const ExpertRows& rows, const TensorView& d,
                       const Operands& operands, std::span<std::byte> workspace, Stream stream) const;
  /// Of ids, after their shape and the operands' have been checked.
  Status run_ids(const PackedExperts& of, const ConstTensorView& a, const ConstTensorView& ids, const TensorView& d,
                 const Operands& operands, std::span<std::byte> workspace, Executor& threads) const;
  Status run_ids_on_device(const PackedExperts& of, const ConstTensorView& a, const ConstTensorView& ids, const TensorView& d,
                           const Operands& operands, std::span<std::byte> workspace, Stream stream) const;
};

namespace experts {

/// Ok when A and D have the ranks, types and columns of the plan, and ExpertRows says what belongs together. The values of offsets, counts,
/// rows and ids, which a GPU does not check, are left out.
Status check_shapes(const ExpertRows& rows, std::int64_t experts, const ConstTensorView& a, const TensorView& d,
                    const GroupedPlan::Impl& impl);
/// Whatever a run of one expert would refuse is refused before any has run: operands have as many rows as D [R,N] or [E,R,N].
Status check_row_operands(const LinearSpec& spec, const Operands& operands, const TensorView& d);

}  // namespace experts
}  // namespace nibble
