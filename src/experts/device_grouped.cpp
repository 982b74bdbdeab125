// A grouped product on the GPU: one plan over the rows of all experts, which the kernels find in tiles.
//
// Workspace: expert_of | tiles | their count | rows of A, where they are gathered | of the plan
#include "core/error.hpp"
#include "experts/device_rows.hpp"
#include "experts/grouped_plan.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/tasks/linear_task.hpp"
#include "plan/experts_plan.hpp"

namespace nibble {
namespace {

using experts::kDeviceAlignment;
using experts::part;

/// The rows of [E,R,C] as those of a matrix.
template <class View>
Result<View> flattened(std::string_view what, const View& v) {
  if (v.rank == 2) return v;
  if (v.stride(0) != v.dim(1) * v.stride(1))
    return error(StatusCode::invalid_argument,
                 "{}: the matrices of experts are {} elements apart, and have {} rows of {}; on the GPU they follow one another",
                 what, v.stride(0), v.dim(1), v.stride(1));
  View matrix = v;
  matrix.rank = 2;
  matrix.shape = {v.dim(0) * v.dim(1), v.dim(2)};
  matrix.strides = {v.stride(1), 1};
  return matrix;
}

}  // namespace

std::size_t GroupedPlan::Impl::device_workspace_bytes() const {
  const auto rows = static_cast<std::size_t>(spec.m_max);
  return kDeviceAlignment + part(rows, sizeof(std::int32_t)) + part(rows, sizeof(cuda::ExpertTile)) + part(1, sizeof(int)) +
         part(rows, static_cast<std::size_t>(experts::gathered_pitch(k) * bits(spec.a_dtype) / 8)) + plan.workspace_bytes();
}

Status GroupedPlan::Impl::run_on_device(const PackedExperts& of, const ConstTensorView& a, const ExpertRows& rows,
                                        const TensorView& d, const Operands& operands, std::span<std::byte> workspace,
                                        Stream stream) const {
  NIBBLE_ASSIGN_OR_RETURN(ConstTensorView from, flattened("A", a));
  NIBBLE_ASSIGN_OR_RETURN(const TensorView to, flattened("D", d));
  const bool padded = !rows.counts.empty();
  const std::int64_t all = to.dim(0);
  if (all < 1 || all > spec.m_max) return error(StatusCode::invalid_argument, "{} rows, the plan takes 1…{}", all, spec.m_max);
  if (rows.rows.empty() && from.dim(0) != all)
    return error(StatusCode::invalid_argument, "A has {} rows and D {}", from.dim(0), all);
  if (!rows.rows.empty()) NIBBLE_RETURN_IF_ERROR(experts::check_indices("rows", rows.rows, {all}));
  NIBBLE_RETURN_IF_ERROR(experts::check_row_operands(spec, operands, to));

  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, device_workspace_bytes(), kDeviceAlignment));
  const auto room = static_cast<std::size_t>(spec.m_max);
  const auto indices = [](const ConstTensorView& v) { return static_cast<const std::int32_t*>(v.data); };
  cuda::SortTask sort{.offsets = padded ? nullptr : indices(rows.offsets),
                      .counts = padded ? indices(rows.counts) : nullptr,
                      .given_stride = padded ? rows.counts.stride(0) : rows.offsets.stride(0),
                      .pitch = padded ? static_cast<int>(d.dim(1)) : 0,
                      .experts = static_cast<int>(experts),
                      .rows = static_cast<int>(all),
                      .expert_of = arena.take<std::int32_t>(room).data()};
  sort.products[0] = {expert_rows(plan, all), arena.take<cuda::ExpertTile>(room).data(), arena.take<int>(1).data()};
  const std::int64_t pitch = experts::gathered_pitch(k);
  auto* const gathered = arena.take<std::byte>(room * static_cast<std::size_t>(pitch * bits(spec.a_dtype) / 8)).data();
  NIBBLE_RETURN_IF_ERROR(cuda::launch_sort_rows(sort, stream));

  const std::int64_t row_bytes = bits(spec.a_dtype) / 8;
  const bool is_float = is_compute_float(spec.a_dtype);
  const bool readable = cuda::readable_rows(from.data, from.stride(0) * row_bytes, all, k * row_bytes);
  if (!is_float && (experts::changes_channels(of) || !readable))
    return error(
        StatusCode::unsupported,
        "A comes as {} codes: then rows begin at multiples of 16 bytes, and experts have neither act-order nor a prescale",
        name(spec.a_dtype));
  if (is_float && (!rows.rows.empty() || experts::changes_channels(of) || !readable)) {
    cuda::GatherRowsTask gather = experts::gathering(of, from, all, gathered);
    gather.expert_of = sort.expert_of;
    if (!rows.rows.empty()) gather.source = indices(rows.rows), gather.source_stride = rows.rows.stride(0);
    NIBBLE_RETURN_IF_ERROR(cuda::launch_gather_expert_rows(gather, stream));
    from = ConstTensorView(gathered, spec.a_dtype, {all, k});
    from.strides[0] = pitch;
  }
  return run_experts(plan, of.for_plans(), experts::tiles_of(of, sort, sort.products[0]), from, to, operands, arena.rest(),
                     stream);
}

}  // namespace nibble
