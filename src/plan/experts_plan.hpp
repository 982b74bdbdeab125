// Plans of grouped products on the GPU: those of linear layers whose rows have different weights.
#pragma once

#include "kernels/cuda/tasks/expert_tiles.hpp"
#include "nibble/plan.hpp"

namespace nibble {

/// A plan for spec.m_max rows of so many experts; `first` is PackedExperts::for_plans().
/// Errors: as Plan::linear; unsupported for activations quantized per tensor, whose scale experts do not share.
Result<Plan> plan_experts(const PackedWeight& first, std::int64_t experts, const LinearSpec& spec, const PlanOptions& options);
/// The rows of a tile for m rows of A: of Kernel::expert_rows.
int expert_rows(const Plan& plan, std::int64_t m);
/// Whether its first step fetches m rows of A from where they lie, and whether that is the product, which sorts few of them:
/// Kernel::fetches_rows.
bool fetches_rows(const Plan& plan, std::int64_t m);
bool sorts_rows(const Plan& plan, std::int64_t m);
/// Runs it. A's rows are aligned to 16 bytes.
Status run_experts(const Plan& plan, const PackedWeight& first, const cuda::ExpertTiles& experts, const ConstTensorView& a,
                   const TensorView& d, const Operands& operands, std::span<std::byte> workspace, Stream stream);

/// Whether one launch runs both for m rows, the second of the first one's results.
bool joins(const Plan& first, const Plan& second, std::int64_t m);
/// A product for run_joined().
struct ExpertProduct {
  const Plan& plan;
  const PackedWeight& weight;
  const cuda::ExpertTiles& experts;
  const ConstTensorView& a;
  const TensorView& d;
};
/// Runs both, where joins() says so. `workspace`: as large as cuda::Meeting (tasks/decode_config.hpp), and of this run alone.
Status run_joined(const ExpertProduct& first, const ExpertProduct& second, std::span<std::byte> workspace, Stream stream);

}  // namespace nibble
