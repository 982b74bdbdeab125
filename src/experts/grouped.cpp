// One product of rows that are sorted by expert: the linear plan of an expert's rows, run for each expert that has any.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "epilogue/epilogue.hpp"
#include "experts/device_rows.hpp"
#include "experts/grouped_plan.hpp"
#include "plan/experts_plan.hpp"

namespace nibble {

using experts::rows_of;
using experts::Share;

namespace {

/// Operands that hold for all experts alike would need an axis of experts.
Status check_operands(const LinearSpec& spec) {
  const EpilogueSpec& e = spec.epilogue;
  const std::pair<bool, std::string_view> parts[] = {{e.col_scale, "col_scale"},
                                                     {e.sum_bias, "sum_bias"},
                                                     {e.out_scales, "out_scales"},
                                                     {spec.norm.kind != Norm::none, "a norm"}};
  for (const auto& [there, what] : parts)
    if (there) return error(StatusCode::unsupported, "grouped products take no {}: it would be the same for all experts", what);
  return {};
}

}  // namespace

Status experts::check_shapes(const ExpertRows& rows, std::int64_t experts, const ConstTensorView& a, const TensorView& d,
                             const GroupedPlan::Impl& impl) {
  const bool padded = !rows.counts.empty(), by_ids = !rows.ids.empty();
  if (padded + by_ids + !rows.offsets.empty() != 1 || (rows.offsets.empty() && !rows.rows.empty()))
    return error(StatusCode::invalid_argument, "ExpertRows takes offsets, with rows or without, counts alone, or ids alone");
  if (by_ids) {
    if (rows.ids.rank != 2) return error(StatusCode::invalid_argument, "ids must be s32 [T,top_k], got {}", described(rows.ids));
    NIBBLE_RETURN_IF_ERROR(experts::check_indices("ids", rows.ids, {rows.ids.dim(0), rows.ids.dim(1)}));
  } else {
    NIBBLE_RETURN_IF_ERROR(padded ? experts::check_indices("counts", rows.counts, {experts})
                                  : experts::check_indices("offsets", rows.offsets, {experts + 1}));
  }
  const int rank = padded ? 3 : 2;
  if (a.empty() || d.empty() || a.rank != rank || d.rank != rank || a.stride(rank - 1) != 1 || d.stride(rank - 1) != 1)
    return error(StatusCode::invalid_argument, "A and D have {} dimensions here and a last stride of 1, got {} and {}", rank,
                 a.rank, d.rank);
  const std::int64_t columns = impl.spec.epilogue.columns(impl.n);
  if (a.dtype != impl.spec.a_dtype || d.dtype != impl.spec.epilogue.out || a.dim(rank - 1) != impl.k ||
      d.dim(rank - 1) != columns)
    return error(StatusCode::invalid_argument,
                 "A is {} with {} columns and D {} with {}, the plan takes {} with {} and writes {} with {}", name(a.dtype),
                 a.dim(rank - 1), name(d.dtype), d.dim(rank - 1), name(impl.spec.a_dtype), impl.k, name(impl.spec.epilogue.out),
                 columns);
  if (padded && (a.dim(0) != experts || d.dim(0) != experts || a.dim(1) != d.dim(1)))
    return error(StatusCode::invalid_argument, "A is [{},{},K] and D [{},{},N], with {} experts", a.dim(0), a.dim(1), d.dim(0),
                 d.dim(1), experts);
  if ((by_ids || !rows.rows.empty()) && !is_compute_float(impl.spec.a_dtype))
    return error(StatusCode::unsupported, "{} are for an A of floats, not of {}", by_ids ? "ids" : "rows",
                 name(impl.spec.a_dtype));
  if (!by_ids) return {};
  const std::int64_t tokens = rows.ids.dim(0), pairs = tokens * rows.ids.dim(1);
  if (d.dim(0) != pairs || (a.dim(0) != tokens && a.dim(0) != pairs))
    return error(StatusCode::invalid_argument,
                 "ids are [{},{}]: A has a row for each token or each pair, D for each pair, got {} and {} rows", tokens,
                 rows.ids.dim(1), a.dim(0), d.dim(0));
  if (pairs > impl.spec.m_max)
    return error(StatusCode::invalid_argument, "{} rows, the plan takes up to {}", pairs, impl.spec.m_max);
  return {};
}

Status experts::check_row_operands(const LinearSpec& spec, const Operands& operands, const TensorView& d) {
  EpilogueSpec epilogue = spec.epilogue;
  if (epilogue.bias && !operands.bias.empty())
    return error(StatusCode::invalid_argument,
                 "bias is the same for all experts: leave it absent, and pack experts with their own");
  epilogue.bias = false;
  TensorView matrix = d;
  if (d.rank == 3) {
    matrix.rank = 2;
    matrix.shape = {d.dim(0) * d.dim(1), d.dim(2)};
    matrix.strides = {d.stride(1), 1};
  }
  const std::int64_t rows = matrix.dim(0);
  if (rows > 0) NIBBLE_RETURN_IF_ERROR(epilogue::check_args(epilogue, operands, matrix));
  if (is_compute_float(spec.a_dtype)) return {};
  const std::pair<std::string_view, const ConstTensorView*> parts[] = {{"a_scale", &operands.a_scale},
                                                                       {"a_zero", &operands.a_zero}};
  for (const auto& [what, view] : parts)
    if (!view->empty() && !(view->rank == 1 && view->dim(0) == 1) && view->dim(0) != rows)
      return error(StatusCode::invalid_argument, "{} has {} rows, A has {}", what, view->dim(0), rows);
  return {};
}

namespace {

/// The number of rows that A and D have, after a check of what offsets, counts and rows say about them.
Result<std::int64_t> check_rows(const ExpertRows& rows, std::int64_t experts, const ConstTensorView& a, const TensorView& d,
                                const GroupedPlan::Impl& impl) {
  const bool padded = !rows.counts.empty();
  const std::int64_t d_rows = d.dim(d.rank - 2);
  std::int64_t all = 0;
  if (padded) {
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int64_t count = experts::index_at(rows.counts, e);
      if (count < 0 || count > d_rows)
        return error(StatusCode::invalid_argument, "counts[{}]={} is outside [0, {}]", e, count, d_rows);
      all += count;
    }
  } else {
    for (std::int64_t e = 0; e <= experts; ++e) {
      const std::int64_t at = experts::index_at(rows.offsets, e);
      if (e == 0 ? at != 0 : at < all)
        return error(StatusCode::invalid_argument, "offsets[{}]={}: they rise from 0, and the one before is {}", e, at, all);
      all = at;
    }
    if (all != d_rows || (rows.rows.empty() && all != a.dim(0)))
      return error(StatusCode::invalid_argument, "offsets end at {}, A has {} rows and D {}", all, a.dim(0), d_rows);
  }
  if (all > impl.spec.m_max) return error(StatusCode::invalid_argument, "{} rows, the plan takes up to {}", all, impl.spec.m_max);
  if (rows.rows.empty()) return all;
  NIBBLE_RETURN_IF_ERROR(experts::check_indices("rows", rows.rows, {all}));
  for (std::int64_t i = 0; i < all; ++i)
    if (const std::int64_t row = experts::index_at(rows.rows, i); row < 0 || row >= a.dim(0))
      return error(StatusCode::invalid_argument, "rows[{}]={} is outside [0, {}]", i, row, a.dim(0) - 1);
  return all;
}

Status check_ids(const ConstTensorView& ids, std::int64_t experts) {
  for (std::int64_t t = 0; t < ids.dim(0); ++t)
    for (std::int64_t j = 0; j < ids.dim(1); ++j)
      if (const std::int64_t id = experts::index_at(ids, t, j); id < -1 || id >= experts)
        return error(StatusCode::invalid_argument, "ids[{},{}]={} is outside [-1, {}]", t, j, id, experts - 1);
  return {};
}

}  // namespace

Result<GroupedPlan> GroupedPlan::make(const PackedExperts& experts, const LinearSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_operands(spec));
  const bool on_gpu = experts.backend() == Backend::cuda;
  if (on_gpu) NIBBLE_RETURN_IF_ERROR(experts::check_device_experts(experts.count()));
  Result<Plan> plan =
      on_gpu ? plan_experts(experts.for_plans(), experts.count(), spec, options) : Plan::linear(experts[0], spec, options);
  if (!plan.ok()) return plan.status();
  const Plan* const plans[] = {&*plan};
  auto impl = std::make_shared<Impl>(Impl{*plan, spec, experts.count(), experts.n(), experts.k(), experts.backend(), {}});
  if (!on_gpu) {
    experts::Shares::Sizes sizes{.experts = experts.count(),
                                 .rows = spec.m_max,
                                 .expert_rows = spec.m_max,
                                 .row_bytes = experts::padded(impl->row_bytes())};
    impl->shares = experts::Shares(sizes, experts::threads_of(options), plans);
    const auto columns = static_cast<std::size_t>(impl->columns());
    sizes.row_bytes += experts::padded(columns * static_cast<std::size_t>(bits(spec.epilogue.out)) / 8);
    for (const bool operand : {spec.epilogue.gate, spec.epilogue.residual})
      if (operand) sizes.row_bytes += experts::padded(columns * sizeof(float));
    if (spec.epilogue.row_scale) sizes.row_bytes += experts::padded(sizeof(float));
    impl->shares_of_ids = experts::Shares(sizes, experts::threads_of(options), plans);
  }
  return GroupedPlan(std::move(impl));
} catch (...) {
  return caught();
}

std::size_t GroupedPlan::workspace_bytes() const {
  if (impl_->memory == Backend::cuda) return impl_->device_workspace_bytes();
  return experts::kAlignment + impl_->shares_bytes() + impl_->shares.workspace_bytes();
}

std::size_t GroupedPlan::ids_workspace_bytes() const {
  if (impl_->memory == Backend::cuda) return impl_->device_ids_workspace_bytes();
  return experts::kAlignment + impl_->shares_bytes() + impl_->pairs_bytes() + impl_->shares_of_ids.workspace_bytes();
}

const Plan& GroupedPlan::expert_plan() const { return impl_->plan; }

Status GroupedPlan::run(const PackedExperts& experts, const ConstTensorView& a, const ExpertRows& rows, const TensorView& d,
                        const Operands& operands, std::span<std::byte> workspace, Executor* executor) const try {
  const Impl& impl = *impl_;
  if (impl.memory == Backend::cuda)
    return error(StatusCode::invalid_argument,
                 "the experts are in device memory: pass a nibble::Stream to run(), not an executor");
  NIBBLE_RETURN_IF_ERROR(experts::check_experts(experts, impl.experts, impl.n, impl.k));
  NIBBLE_RETURN_IF_ERROR(experts::check_shapes(rows, impl.experts, a, d, impl));
  if (!rows.ids.empty()) {
    NIBBLE_RETURN_IF_ERROR(check_ids(rows.ids, impl.experts));
    NIBBLE_RETURN_IF_ERROR(experts::check_row_operands(impl.spec, operands, d));
    return impl.run_ids(experts, a, rows.ids, d, operands, workspace, executor != nullptr ? *executor : default_executor());
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::int64_t all, check_rows(rows, impl.experts, a, d, impl));
  const bool padded = !rows.counts.empty();
  NIBBLE_RETURN_IF_ERROR(experts::check_row_operands(impl.spec, operands, d));
  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, workspace_bytes()));
  const std::span<Share> shares = arena.take<Share>(static_cast<std::size_t>(impl.experts));
  const std::int64_t operand_rows = padded ? d.dim(0) * d.dim(1) : all;

  std::size_t count = 0;
  for (std::int64_t e = 0, first = 0; e < impl.experts; ++e) {
    const std::int64_t own = padded ? experts::index_at(rows.counts, e) : experts::index_at(rows.offsets, e + 1) - first;
    if (own != 0) shares[count++] = {e, first, own};
    first += own;
  }
  return impl.shares.run(
      shares.first(count), arena.rest(), executor != nullptr ? *executor : default_executor(),
      [&](const Share& share, Executor& threads, std::span<std::byte> scratch) {
        ConstTensorView from;
        TensorView to;
        Operands own = operands;
        const std::int64_t begin = padded ? share.expert * d.dim(1) : share.first;  // of operands
        for (ConstTensorView* each : {&own.row_scale, &own.gate, &own.residual, &own.a_scale, &own.a_zero})
          if (!each->empty() && each->dim(0) == operand_rows) *each = rows_of(*each, begin, share.rows);
        if (padded) {
          from = experts::matrix_of(a, share.expert, share.rows);
          to = experts::matrix_of(d, share.expert, share.rows);
        } else {
          to = rows_of(d, share.first, share.rows);
          if (rows.rows.empty()) {
            from = rows_of(a, share.first, share.rows);
          } else {
            std::byte* const at = scratch.data();
            scratch = scratch.subspan(static_cast<std::size_t>(share.rows) * experts::padded(impl.row_bytes()));
            threads.parallel_for(share.rows, [&](std::int64_t i) {
              const std::int64_t row = experts::index_at(rows.rows, share.first + i);
              std::memcpy(at + static_cast<std::size_t>(i) * impl.row_bytes(), rows_of(a, row, 1).data, impl.row_bytes());
            });
            from = ConstTensorView(at, a.dtype, {share.rows, impl.k});
          }
        }
        return impl.plan.run(experts[share.expert], from, to, own, scratch, &threads);
      });
} catch (...) {
  return caught();
}

Status GroupedPlan::run(const PackedExperts& experts, const ConstTensorView& a, const ExpertRows& rows, const TensorView& d,
                        const Operands& operands, std::span<std::byte> workspace, Stream stream) const try {
  if (impl_->memory != Backend::cuda)
    return error(StatusCode::invalid_argument, "the experts are in host memory: run() takes no stream for them");
  NIBBLE_RETURN_IF_ERROR(experts::check_experts(experts, impl_->experts, impl_->n, impl_->k));
  NIBBLE_RETURN_IF_ERROR(experts::check_shapes(rows, impl_->experts, a, d, *impl_));
  if (rows.ids.empty()) return impl_->run_on_device(experts, a, rows, d, operands, workspace, stream);
  NIBBLE_RETURN_IF_ERROR(experts::check_row_operands(impl_->spec, operands, d));
  return impl_->run_ids_on_device(experts, a, rows.ids, d, operands, workspace, stream);
} catch (...) {
  return caught();
}

}  // namespace nibble
