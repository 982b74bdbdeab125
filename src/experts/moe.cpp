// The layer: tokens in the order of their experts, gate_up with its glu, down, and the weighted sum.
//
//   ids [T,top_k] ─count─▶ pairs (t, j), sorted by expert, of one expert by token
//
//   x[t] of its pairs ──gate_up, glu──▶ hidden ──down──▶ results, f32       an expert at a time (shares.hpp)
//   D[t] = Σ_j weights[t,j] · results[pair (t, j)], in the order of j       a token at a time
//
// Workspace: shares | pairs | places of pairs | results | of each expert at a time: its x | its hidden | of the plans
//
// x and hidden of one expert fit a core's L2, where the products read them: a copy of all pairs would go through memory twice.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "epilogue/epilogue.hpp"
#include "experts/moe_plan.hpp"
#include "plan/experts_plan.hpp"

namespace nibble {

using experts::Share;

namespace {

Status check_matrix(std::string_view what, const ConstTensorView& v, DType type, std::int64_t rows, std::int64_t columns) {
  if (!v.empty() && v.rank == 2 && v.dtype == type && v.dim(0) == rows && v.dim(1) == columns && v.stride(1) == 1) return {};
  return error(StatusCode::invalid_argument, "{} must be {} [{},{}] with a last stride of 1, got {}", what, name(type), rows,
               columns, experts::described(v));
}

/// Each id is an expert or −1, and no token has an expert twice.
Status check_ids(const ConstTensorView& ids, std::int64_t tokens, std::int64_t top_k, std::int64_t experts) {
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t id = experts::index_at(ids, t, j);
      if (id < -1 || id >= experts)
        return error(StatusCode::invalid_argument, "ids[{},{}]={} is outside [-1, {}]", t, j, id, experts - 1);
      for (std::int64_t i = 0; id != -1 && i < j; ++i)
        if (experts::index_at(ids, t, i) == id)
          return error(StatusCode::invalid_argument, "ids[{},{}] and ids[{},{}] are both {}", t, i, t, j, id);
    }
  return {};
}

}  // namespace

Result<MoePlan> MoePlan::make(const PackedExperts& gate_up, const PackedExperts& down, const MoeSpec& spec,
                              const PlanOptions& options) {
  return make(gate_up, gate_up.spec(), down, down.spec(), spec, options);
}

Result<MoePlan> MoePlan::make(const PackedExperts& gate_up, const LinearSpec& gate_up_spec, const PackedExperts& down,
                              const LinearSpec& down_spec, const MoeSpec& spec, const PlanOptions& options) try {
  LinearSpec first = gate_up_spec, second = down_spec;
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"tokens_max", spec.tokens_max}, {"top_k", spec.top_k}}));
  const std::int64_t hidden = first.epilogue.columns(gate_up.n());
  if (gate_up.count() != down.count() || hidden != down.k())
    return error(StatusCode::invalid_argument, "{} experts of gate_up write {} channels, {} experts of down read {}",
                 gate_up.count(), hidden, down.count(), down.k());
  if (spec.top_k > gate_up.count())
    return error(StatusCode::invalid_argument, "top_k={}, of {} experts", spec.top_k, gate_up.count());
  if (first.epilogue.out != second.a_dtype || !is_compute_float(second.a_dtype) || !is_compute_float(first.a_dtype))
    return error(
        StatusCode::invalid_argument,
        "gate_up takes {} and writes {}, down takes {}: floats, of one type between them; pack them for such a specification",
        name(first.a_dtype), name(first.epilogue.out), name(second.a_dtype));
  for (const LinearSpec* each : {&first, &second})
    if (each->epilogue.gate || each->epilogue.residual || each->epilogue.row_scale || each->epilogue.col_scale ||
        each->norm.kind != Norm::none)
      return error(StatusCode::unsupported, "the products of a layer of experts take no {}: of operands biases alone, their own",
                   each->norm.kind != Norm::none ? "norm" : each->epilogue.name());
  for (const DType out : {spec.out, second.epilogue.out})
    if (!is_compute_float(out))
      return error(StatusCode::unsupported, "D of a layer of experts, and what down writes, are f32, f16 or bf16, not {}",
                   name(out));
  NIBBLE_RETURN_IF_ERROR(
      check_elements("the pairs of tokens and experts", {spec.tokens_max, spec.top_k, std::max(down.n(), gate_up.k())}));
  if (gate_up.backend() != down.backend())
    return error(StatusCode::invalid_argument, "the experts of gate_up are in {} memory, those of down in {} memory",
                 gate_up.backend() == Backend::cuda ? "device" : "host", down.backend() == Backend::cuda ? "device" : "host");
  const bool on_gpu = gate_up.backend() == Backend::cuda;
  first.m_max = second.m_max = spec.tokens_max * (on_gpu ? spec.top_k : 1);
  first.epilogue.bias = gate_up[0].has_bias();
  second.epilogue.bias = !on_gpu && down[0].has_bias();  // on the GPU the sum adds it
  if (!on_gpu) second.epilogue.out = DType::f32;         // results are few beside what a core reads of weights
  const auto planned = [&](const PackedExperts& each, const LinearSpec& of) {
    return on_gpu ? plan_experts(each.for_plans(), each.count(), of, options) : Plan::linear(each[0], of, options);
  };
  NIBBLE_ASSIGN_OR_RETURN(Plan gate_up_plan, planned(gate_up, first));
  NIBBLE_ASSIGN_OR_RETURN(Plan down_plan, planned(down, second));
  if (on_gpu) NIBBLE_RETURN_IF_ERROR(experts::check_device_experts(gate_up.count()));
  const Plan* const plans[] = {&gate_up_plan, &down_plan};
  const auto row_bytes = [](std::int64_t columns, DType type) {
    return experts::padded(static_cast<std::size_t>(columns * bits(type) / 8));
  };
  const experts::Shares::Sizes sizes{.experts = gate_up.count(),
                                     .rows = product({spec.tokens_max, spec.top_k}),
                                     .expert_rows = spec.tokens_max,
                                     .row_bytes = row_bytes(gate_up.k(), first.a_dtype) + row_bytes(hidden, second.a_dtype)};
  const experts::Shares shares = on_gpu ? experts::Shares() : experts::Shares(sizes, experts::threads_of(options), plans);
  return MoePlan(std::make_shared<Impl>(Impl{.spec = spec,
                                             .sum = {.residual = spec.residual, .out = spec.out},
                                             .gate_up = gate_up_plan,
                                             .down = down_plan,
                                             .x_type = first.a_dtype,
                                             .hidden_type = second.a_dtype,
                                             .result_type = second.epilogue.out,
                                             .experts = gate_up.count(),
                                             .k = gate_up.k(),
                                             .hidden = hidden,
                                             .n = down.n(),
                                             .gate_up_n = gate_up.n(),
                                             .memory = gate_up.backend(),
                                             .shares = shares}));
} catch (...) {
  return caught();
}

std::size_t MoePlan::workspace_bytes() const { return impl_->workspace_bytes(); }
const Plan& MoePlan::gate_up_plan() const { return impl_->gate_up; }
const Plan& MoePlan::down_plan() const { return impl_->down; }

Status MoePlan::Impl::check(const PackedExperts& gate_up_experts, const PackedExperts& down_experts, const ConstTensorView& x,
                            const MoeOperands& operands, const TensorView& d) const {
  NIBBLE_RETURN_IF_ERROR(experts::check_experts(gate_up_experts, experts, gate_up_n, k));
  NIBBLE_RETURN_IF_ERROR(experts::check_experts(down_experts, experts, n, hidden));
  const std::int64_t tokens = x.rank == 2 ? x.dim(0) : 0, top_k = spec.top_k;
  if (tokens < 1 || tokens > spec.tokens_max)
    return error(StatusCode::invalid_argument, "x has {} tokens, the plan takes 1…{}", tokens, spec.tokens_max);
  NIBBLE_RETURN_IF_ERROR(check_matrix("x", x, x_type, tokens, k));
  NIBBLE_RETURN_IF_ERROR(check_matrix("D", d, spec.out, tokens, n));
  NIBBLE_RETURN_IF_ERROR(experts::check_indices("ids", operands.ids, {tokens, top_k}));
  const ConstTensorView& weights = operands.weights;
  if (weights.empty() || weights.dtype != DType::f32 || weights.rank != 2 || weights.dim(0) != tokens || weights.dim(1) != top_k)
    return error(StatusCode::invalid_argument, "weights must be f32 [{},{}], got {}", tokens, top_k, experts::described(weights));
  return epilogue::check_args(sum, {.residual = operands.residual}, d);
}

Status MoePlan::run(const PackedExperts& gate_up, const PackedExperts& down, const ConstTensorView& x,
                    const MoeOperands& operands, const TensorView& d, std::span<std::byte> workspace, Stream stream) const try {
  if (impl_->memory != Backend::cuda)
    return error(StatusCode::invalid_argument, "the experts are in host memory: run() takes no stream for them");
  NIBBLE_RETURN_IF_ERROR(impl_->check(gate_up, down, x, operands, d));
  return impl_->run_on_device(gate_up, down, x, operands, d, workspace, stream);
} catch (...) {
  return caught();
}

Status MoePlan::run(const PackedExperts& gate_up, const PackedExperts& down, const ConstTensorView& x,
                    const MoeOperands& operands, const TensorView& d, std::span<std::byte> workspace, Executor* executor) const
    try {
  const Impl& impl = *impl_;
  if (impl.memory == Backend::cuda)
    return error(StatusCode::invalid_argument,
                 "the experts are in device memory: pass a nibble::Stream to run(), not an executor");
  NIBBLE_RETURN_IF_ERROR(impl.check(gate_up, down, x, operands, d));
  const std::int64_t tokens = x.dim(0), top_k = impl.spec.top_k;
  NIBBLE_RETURN_IF_ERROR(check_ids(operands.ids, tokens, top_k, impl.experts));
  const ConstTensorView& weights = operands.weights;
  const Operands last{.residual = operands.residual};
  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, workspace_bytes()));
  const std::span<Share> shares = arena.take<Share>(static_cast<std::size_t>(impl.experts));
  const std::span<std::int32_t> pairs = arena.take<std::int32_t>(impl.pairs());   // t · top_k + j, by place
  const std::span<std::int32_t> places = arena.take<std::int32_t>(impl.pairs());  // the inverse; of none −1
  float* const results = arena.take<float>(impl.pairs() * static_cast<std::size_t>(impl.n)).data();
  Executor& threads = executor != nullptr ? *executor : default_executor();

  // Sorts the pairs: counts, then where each expert's begin, then each pair to the next place of its expert.
  for (std::int64_t e = 0; e < impl.experts; ++e) shares[static_cast<std::size_t>(e)] = {.expert = e};
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = 0; j < top_k; ++j)
      if (const std::int64_t id = experts::index_at(operands.ids, t, j); id >= 0) ++shares[static_cast<std::size_t>(id)].rows;
  std::int64_t first = 0;
  for (Share& share : shares) {
    share.first = first;
    first += std::exchange(share.rows, 0);
  }
  for (std::int64_t t = 0; t < tokens; ++t)
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int64_t id = experts::index_at(operands.ids, t, j);
      const auto pair = static_cast<std::size_t>(t * top_k + j);
      places[pair] = -1;
      if (id < 0) continue;
      Share& share = shares[static_cast<std::size_t>(id)];
      const std::int64_t place = share.first + share.rows++;
      places[pair] = static_cast<std::int32_t>(place);
      pairs[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(pair);
    }
  const auto end = std::remove_if(shares.begin(), shares.end(), [](const Share& share) { return share.rows == 0; });
  const std::span<const Share> work(shares.begin(), end);

  const auto both_products = [&](const Share& share, Executor& own, std::span<std::byte> scratch) -> Status {
    const auto at = static_cast<std::size_t>(share.first), rows = static_cast<std::size_t>(share.rows);
    NIBBLE_ASSIGN_OR_RETURN(experts::Arena own_arena, experts::Arena::of(scratch, 0));
    ConstTensorView from = experts::rows_of(x, pairs[at] / top_k, 1);  // a single row is read where it lies
    if (rows > 1) {
      std::byte* const gathered = own_arena.take<std::byte>(rows * impl.x_row()).data();
      own.parallel_for(share.rows, [&](std::int64_t i) {
        const std::int64_t t = pairs[at + static_cast<std::size_t>(i)] / top_k;
        std::memcpy(gathered + static_cast<std::size_t>(i) * impl.x_row(), experts::rows_of(x, t, 1).data, impl.x_row());
      });
      from = ConstTensorView(gathered, impl.x_type, {share.rows, impl.k});
    }
    const TensorView middle(own_arena.take<std::byte>(rows * impl.hidden_row()).data(), impl.hidden_type,
                            {share.rows, impl.hidden});
    const TensorView to(results + at * static_cast<std::size_t>(impl.n), {share.rows, impl.n});
    NIBBLE_RETURN_IF_ERROR(impl.gate_up.run(gate_up[share.expert], from, middle, {}, own_arena.rest(), &own));
    return impl.down.run(down[share.expert], middle, to, {}, own_arena.rest(), &own);
  };
  if (!work.empty()) NIBBLE_RETURN_IF_ERROR(impl.shares.run(work, arena.rest(), threads, both_products));

  constexpr std::int64_t kColumns = 256;  // of D, whose sums stay in L1
  const std::int64_t pieces = (impl.n + kColumns - 1) / kColumns;
  threads.parallel_for(tokens * pieces, [&](std::int64_t i) {
    const std::int64_t t = i / pieces, begin = i % pieces * kColumns, count = std::min(kColumns, impl.n - begin);
    std::array<float, kColumns> sums{};
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int32_t place = places[static_cast<std::size_t>(t * top_k + j)];
      if (place < 0) continue;
      const float weight = static_cast<const float*>(weights.data)[t * weights.stride(0) + j * weights.stride(1)];
      const float* const result = results + place * impl.n + begin;
      for (std::int64_t n = 0; n < count; ++n) sums[static_cast<std::size_t>(n)] += weight * result[n];
    }
    epilogue::store_row(impl.sum, last, sums.data(), t, begin, count, d);
  });
  return {};
} catch (...) {
  return caught();
}

}  // namespace nibble
