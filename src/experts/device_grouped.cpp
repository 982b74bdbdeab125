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

/// Rows of a grouped product's operands in device memory, and what gathers them.
struct RowsOf {
  const cuda::GatherRowsTask& like;  // source, and what says which rows there are
  Stream stream;

  /// Rows `source` of the matrix `from`, in `to`.
  Result<ConstTensorView> operator()(const ConstTensorView& from, std::span<std::byte> to) const {
    cuda::GatherRowsTask gather = like;
    gather.from = from.data, gather.from_stride = from.stride(0), gather.type = from.dtype;
    gather.columns = from.dim(1), gather.sources = static_cast<int>(from.dim(0));
    gather.to = to.data(), gather.to_stride = experts::gathered_pitch(gather.columns);
    NIBBLE_RETURN_IF_ERROR(cuda::launch_gather_expert_rows(gather, stream));
    ConstTensorView made = from;
    made.data = to.data(), made.shape[0] = gather.rows, made.strides[0] = gather.to_stride;
    return made;
  }
};

}  // namespace

std::size_t GroupedPlan::Impl::device_workspace_bytes() const {
  const auto rows = static_cast<std::size_t>(spec.m_max);
  return kDeviceAlignment + part(rows, sizeof(std::int32_t)) + part(rows, sizeof(cuda::ExpertTile)) +
         part(1, sizeof(cuda::TileCount)) +
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
  sort.products[0] = {expert_rows(plan, all), arena.take<cuda::ExpertTile>(room).data(), arena.take<cuda::TileCount>(1).data()};
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

// By ids: results are sorted, as operands are before, and a gather by the inverse order puts them where they belong.
//
//   ids ──sort_rows──▶ pair_of, row_of, tiles;   A, gate, residual ──gather by pair_of──▶ sorted ──product──▶ results ──gather by row_of──▶ D
//
// Workspace: pair_of | row_of | expert_of | run_counts | tiles | their count | rows of A | results | gate | residual | of the plan

std::size_t GroupedPlan::Impl::device_ids_workspace_bytes() const {
  const auto rows = static_cast<std::size_t>(spec.m_max);
  const auto matrix = [&](std::int64_t width, DType type) {
    return part(rows, static_cast<std::size_t>(experts::gathered_pitch(width) * bits(type) / 8));
  };
  const EpilogueSpec& e = spec.epilogue;
  return kDeviceAlignment + 3 * part(rows, sizeof(std::int32_t)) + part(cuda::sort_counts(spec.m_max, experts), sizeof(int)) +
         part(rows, sizeof(cuda::ExpertTile)) + part(1, sizeof(cuda::TileCount)) + matrix(k, spec.a_dtype) +
         matrix(columns(), e.out) + static_cast<std::size_t>(e.gate + e.residual) * matrix(columns(), DType::f32) +
         plan.workspace_bytes();
}

Status GroupedPlan::Impl::run_ids_on_device(const PackedExperts& of, const ConstTensorView& a, const ConstTensorView& ids,
                                            const TensorView& d, const Operands& operands, std::span<std::byte> workspace,
                                            Stream stream) const {
  const std::int64_t all = d.dim(0);
  if (all < 1) return error(StatusCode::invalid_argument, "0 rows, the plan takes 1…{}", spec.m_max);
  if (!is_compute_float(d.dtype) || columns() % 8 != 0 || d.stride(0) != columns() ||
      reinterpret_cast<std::uintptr_t>(d.data) % 16 != 0)
    return error(StatusCode::unsupported,
                 "D is {} with {} columns, rows {} elements apart: by ids on a GPU it is f32, f16 or bf16, aligned to 16 bytes, "
                 "with a multiple of 8 columns and nothing between its rows; sort rows by expert, and give offsets",
                 name(d.dtype), columns(), d.stride(0));
  if (spec.epilogue.row_scale && operands.row_scale.dim(0) != 1)
    return error(
        StatusCode::unsupported,
        "by ids on a GPU there is no row_scale for each row: scale the rows of D, or sort rows by expert, and give offsets");
  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, device_ids_workspace_bytes(), kDeviceAlignment));
  const auto room = static_cast<std::size_t>(spec.m_max);
  cuda::SortTask sort{.ids = static_cast<const std::int32_t*>(ids.data),
                      .token_stride = ids.stride(0),
                      .choice_stride = ids.stride(1),
                      .experts = static_cast<int>(experts),
                      .rows = static_cast<int>(all),
                      .top_k = static_cast<int>(ids.dim(1))};
  for (std::int32_t** each : {&sort.pair_of, &sort.row_of, &sort.expert_of}) *each = arena.take<std::int32_t>(room).data();
  sort.run_counts = arena.take<int>(cuda::sort_counts(spec.m_max, experts)).data();
  sort.products[0] = {expert_rows(plan, all), arena.take<cuda::ExpertTile>(room).data(), arena.take<cuda::TileCount>(1).data()};
  const auto matrix = [&](std::int64_t width, DType type) {
    return arena.take<std::byte>(room * static_cast<std::size_t>(experts::gathered_pitch(width) * bits(type) / 8));
  };
  const std::span<std::byte> a_rows = matrix(k, spec.a_dtype), results = matrix(columns(), d.dtype);
  NIBBLE_RETURN_IF_ERROR(cuda::launch_sort_rows(sort, stream));

  // A, which a kernel may fetch from where it lies.
  const int divisor = a.dim(0) == all ? 1 : sort.top_k;
  cuda::ExpertTiles tiles = experts::tiles_of(of, sort, sort.products[0]);
  ConstTensorView from = a;
  if (fetches_rows(plan, all) && experts::are_vectors(a) && !experts::changes_channels(of)) {
    from.shape[0] = all;  // rows, of which the kernel reads those that `source` names
    tiles.source = sort.pair_of;
    tiles.divisor = divisor;
  } else {
    cuda::GatherRowsTask gather = experts::gathering(of, a, all, a_rows.data());
    gather.source = sort.pair_of;
    gather.divisor = divisor;
    gather.expert_of = sort.expert_of;
    NIBBLE_RETURN_IF_ERROR(cuda::launch_gather_expert_rows(gather, stream));
    from = ConstTensorView(a_rows.data(), spec.a_dtype, {all, k});
    from.strides[0] = experts::gathered_pitch(k);
  }
  const RowsOf sorted{{.rows = all, .source = sort.pair_of, .expert_of = sort.expert_of}, stream};
  Operands own = operands;
  for (const auto& [there, view] : {std::pair(spec.epilogue.gate, &own.gate), std::pair(spec.epilogue.residual, &own.residual)})
    if (there) {
      NIBBLE_ASSIGN_OR_RETURN(*view, sorted(*view, matrix(columns(), DType::f32)));
    }
  TensorView to(results.data(), d.dtype, {all, columns()});
  NIBBLE_RETURN_IF_ERROR(run_experts(plan, of.for_plans(), tiles, from, to, own, arena.rest(), stream));
  // By pair: row_of is −1 of none, whose row becomes zeros, and pair_of is negative nowhere.
  const RowsOf in_order{{.rows = all, .source = sort.row_of, .expert_of = sort.pair_of}, stream};
  return in_order(to, {static_cast<std::byte*>(d.data), 0}).status();
}

}  // namespace nibble
