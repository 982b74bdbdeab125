// The layer on the GPU: the same steps as in moe.cpp, each a kernel or a plan, over all pairs of tokens and experts at once.
//
//   ids [T,top_k] ──sort_rows──▶ rows of experts, R = T · top_k, and tiles of them for both products
//   x [T,K] ──gather_expert_rows──▶ [R,K] ──gate_up, glu──▶ hidden [R,H] ──down──▶ results [R,N] ──combine_rows──▶ D [T,N]
//
// The host knows R, but not which expert has how many rows. Nothing waits for that. A kernel that fetches rows from where they lie needs no gather
// before it, sorts few rows itself, and where both products are its own runs them in one launch.
//
// Workspace: of the sort (pair_of, row_of, expert_of, run_counts, tiles and their counts) | x of rows | hidden | hidden gathered | results |
//            of two products in one launch | of the plans
#include <algorithm>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "experts/moe_plan.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/tasks/decode_config.hpp"
#include "layouts/layout.hpp"
#include "plan/experts_plan.hpp"

namespace nibble {
using experts::kDeviceAlignment;
using experts::part;

std::size_t MoePlan::Impl::device_workspace_bytes() const {
  const auto x_pitch = static_cast<std::size_t>(experts::gathered_pitch(k) * bits(x_type) / 8);
  const auto hidden_pitch = static_cast<std::size_t>(experts::gathered_pitch(hidden) * bits(hidden_type) / 8);
  return kDeviceAlignment + 3 * part(pairs(), sizeof(std::int32_t)) +
         part(cuda::sort_counts(static_cast<std::int64_t>(pairs()), experts), sizeof(int)) +
         2 * part(pairs(), sizeof(cuda::ExpertTile)) + part(2, sizeof(cuda::TileCount)) + part(pairs(), x_pitch) +
         2 * part(pairs(), hidden_pitch) + part(1, sizeof(cuda::Meeting)) + part(pairs(), result_row()) +
         std::max(gate_up.workspace_bytes(), down.workspace_bytes());
}

Status MoePlan::Impl::run_on_device(const PackedExperts& gate_up_experts, const PackedExperts& down_experts,
                                    const ConstTensorView& x, const MoeOperands& operands, const TensorView& d,
                                    std::span<std::byte> workspace, Stream stream) const {
  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, workspace_bytes(), kDeviceAlignment));
  const std::int64_t tokens = x.dim(0), rows = tokens * spec.top_k;
  const auto bytes = [&](DType type, std::int64_t columns) {
    return arena.take<std::byte>(pairs() * static_cast<std::size_t>(experts::gathered_pitch(columns) * bits(type) / 8)).data();
  };
  cuda::SortTask sort{.ids = static_cast<const std::int32_t*>(operands.ids.data),
                      .token_stride = operands.ids.stride(0),
                      .choice_stride = operands.ids.stride(1),
                      .experts = static_cast<int>(experts),
                      .rows = static_cast<int>(rows),
                      .top_k = static_cast<int>(spec.top_k)};
  for (std::int32_t** each : {&sort.pair_of, &sort.row_of, &sort.expert_of}) *each = arena.take<std::int32_t>(pairs()).data();
  sort.run_counts = arena.take<int>(cuda::sort_counts(static_cast<std::int64_t>(pairs()), experts)).data();
  const Plan* const plans[] = {&gate_up, &down};
  auto* const counts = arena.take<cuda::TileCount>(2).data();
  for (std::size_t i = 0; i < 2; ++i)
    sort.products[i] = {expert_rows(*plans[i], rows), arena.take<cuda::ExpertTile>(pairs()).data(), counts + i};
  std::byte* const x_rows = bytes(x_type, k);
  std::byte* const hidden_rows = bytes(hidden_type, hidden);
  std::byte* const gathered = bytes(hidden_type, hidden);
  std::byte* const results = arena.take<std::byte>(pairs() * result_row()).data();
  const std::span<std::byte> meeting = arena.take<std::byte>(sizeof(cuda::Meeting));
  const bool fetches = fetches_rows(gate_up, rows) && experts::are_vectors(x) && !experts::changes_channels(gate_up_experts);
  const bool sorts = fetches && sorts_rows(gate_up, rows) && rows <= cuda::kFewPairs;
  if (!sorts) NIBBLE_RETURN_IF_ERROR(cuda::launch_sort_rows(sort, stream));

  const auto rows_of = [&](std::byte* data, DType type, std::int64_t columns) {
    TensorView view(data, type, {rows, columns});
    view.strides[0] = experts::gathered_pitch(columns);
    return view;
  };
  const auto run = [&](const PackedExperts& each, const cuda::ExpertTiles& tiles, const ConstTensorView& a, const TensorView& to,
                       std::size_t product) {
    return run_experts(*plans[product], each.for_plans(), tiles, a, to, {}, arena.rest(), stream);
  };

  bool joined = false;  // both products in one launch
  cuda::ExpertTiles tiles = experts::tiles_of(gate_up_experts, sort, sort.products[0]);
  TensorView middle = rows_of(hidden_rows, hidden_type, hidden);
  const TensorView sums(results, result_type, {rows, n});
  const cuda::ExpertTiles down_tiles = experts::tiles_of(down_experts, sort, sort.products[1]);
  if (fetches) {
    ConstTensorView a = x;  // R rows, of which the kernel reads those that `source` names
    a.shape[0] = rows;
    tiles.source = sort.pair_of;
    tiles.divisor = sort.top_k;
    tiles.row_of = sort.row_of;
    if (sorts) tiles.sort = &sort;
    joined = joins(gate_up, down, rows) && !experts::changes_channels(down_experts);
    NIBBLE_RETURN_IF_ERROR(joined ? run_joined({gate_up, gate_up_experts.for_plans(), tiles, a, middle},
                                               {down, down_experts.for_plans(), down_tiles, middle, sums}, meeting, stream)
                                  : run(gate_up_experts, tiles, a, middle, 0));
  } else {
    cuda::GatherRowsTask gather = experts::gathering(gate_up_experts, x, rows, x_rows);
    gather.source = sort.pair_of;
    gather.divisor = sort.top_k;
    gather.expert_of = sort.expert_of;
    NIBBLE_RETURN_IF_ERROR(cuda::launch_gather_expert_rows(gather, stream));
    NIBBLE_RETURN_IF_ERROR(run(gate_up_experts, tiles, rows_of(x_rows, x_type, k), middle, 0));
  }
  if (experts::changes_channels(down_experts)) {
    cuda::GatherRowsTask permute = experts::gathering(down_experts, middle, rows, gathered);
    permute.expert_of = sort.expert_of;
    NIBBLE_RETURN_IF_ERROR(cuda::launch_gather_expert_rows(permute, stream));
    middle = rows_of(gathered, hidden_type, hidden);
  }
  if (!joined) NIBBLE_RETURN_IF_ERROR(run(down_experts, down_tiles, middle, sums, 1));

  const PackedWeightData& last = down_experts[0].data();
  const Operands rest{.residual = operands.residual};
  cuda::CombineTask combine{.results = results,
                            .type = result_type,
                            .row_of = sort.row_of,
                            .expert_of = sort.expert_of,
                            .weights = static_cast<const float*>(operands.weights.data),
                            .token_stride = operands.weights.stride(0),
                            .choice_stride = operands.weights.stride(1),
                            .epilogue = epilogue::element(sum, rest, d, 1.0f),
                            .tokens = static_cast<int>(tokens),
                            .top_k = sort.top_k,
                            .n = static_cast<int>(n)};
  if (!last.bias.empty()) combine.bias = {.data = last.device.bias.data(), .type = last.bias.dtype, .stride = n};
  return cuda::launch_combine_rows(combine, stream);
}

}  // namespace nibble
