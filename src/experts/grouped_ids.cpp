// A grouped product of pairs of a token and one of its experts, which lie in the order of tokens.
//
//   ids [T,top_k] ─count─▶ pairs, sorted by expert
//
//   A [T,K] or [T·top_k,K] of an expert's pairs ──its plan──▶ D [T·top_k,N]     an expert at a time (shares.hpp)
//
// The one pair of an expert is read and written where it lies. Of more, the rows of A and of the operands are gathered, and the results put in
// their places, in memory that fits a core's L2.
//
// Workspace: shares | pairs | of each expert at a time: rows of A | of D | of operands | of the plan
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "experts/grouped_plan.hpp"

namespace nibble {

using experts::rows_of;
using experts::Share;

namespace {

/// The bytes of a row of a matrix, or of an element of a vector.
std::size_t bytes_of_row(const ConstTensorView& v) {
  return static_cast<std::size_t>((v.rank == 2 ? v.dim(1) : 1) * bits(v.dtype) / 8);
}

/// Whether it has an element or a row for each row of D: a scale may be one of all.
bool is_per_row(const ConstTensorView& v, std::int64_t rows) { return v.dim(0) == rows; }

/// A matrix, or a vector, whose rows are gathered.
struct Gathered {
  ConstTensorView from = {};
  std::byte* to = nullptr;
  std::int64_t divisor = 1;            // row pair / divisor of `from`
  ConstTensorView* operand = nullptr;  // which it becomes

  void take(std::int64_t row, std::int64_t pair) const {
    const std::size_t bytes = bytes_of_row(from);
    std::memcpy(to + static_cast<std::size_t>(row) * bytes, rows_of(from, pair / divisor, 1).data, bytes);
  }
  ConstTensorView rows(std::int64_t count) const {
    ConstTensorView made = from;
    made.data = to;
    made.shape[0] = count;
    made.strides = {from.rank == 2 ? from.dim(1) : 1, 1};
    return made;
  }
};

}  // namespace

Status GroupedPlan::Impl::run_ids(const PackedExperts& of, const ConstTensorView& a, const ConstTensorView& ids,
                                  const TensorView& d, const Operands& operands, std::span<std::byte> workspace,
                                  Executor& threads) const {
  const std::int64_t all = d.dim(0), top_k = ids.dim(1), divisor = a.dim(0) == all ? 1 : top_k;
  const std::size_t needed =
      experts::kAlignment + shares_bytes() + pairs_bytes() + shares_of_ids.workspace_bytes();  // as ids_workspace_bytes()
  NIBBLE_ASSIGN_OR_RETURN(experts::Arena arena, experts::Arena::of(workspace, needed));
  const std::span<Share> all_shares = arena.take<Share>(static_cast<std::size_t>(experts));
  const std::span<std::int32_t> pairs = arena.take<std::int32_t>(static_cast<std::size_t>(spec.m_max));  // by place

  // Counts, then where each expert's begin, then each pair to the next place of its expert.
  const auto expert_of = [&](std::int64_t pair) { return experts::index_at(ids, pair / top_k, pair % top_k); };
  for (std::int64_t e = 0; e < experts; ++e) all_shares[static_cast<std::size_t>(e)] = {.expert = e};
  for (std::int64_t pair = 0; pair < all; ++pair)
    if (const std::int64_t id = expert_of(pair); id >= 0) ++all_shares[static_cast<std::size_t>(id)].rows;
  std::int64_t first = 0;
  for (Share& share : all_shares) {
    share.first = first;
    first += std::exchange(share.rows, 0);
  }
  const std::size_t d_bytes = bytes_of_row(d);
  for (std::int64_t pair = 0; pair < all; ++pair) {
    const std::int64_t id = expert_of(pair);
    if (id < 0) {
      std::memset(rows_of(d, pair, 1).data, 0, d_bytes);
      continue;
    }
    Share& share = all_shares[static_cast<std::size_t>(id)];
    pairs[static_cast<std::size_t>(share.first + share.rows++)] = static_cast<std::int32_t>(pair);
  }
  const auto end = std::remove_if(all_shares.begin(), all_shares.end(), [](const Share& share) { return share.rows == 0; });
  const std::span<const Share> work(all_shares.begin(), end);
  if (work.empty()) return {};

  return shares_of_ids.run(
      work, arena.rest(), threads, [&](const Share& share, Executor& own, std::span<std::byte> scratch) -> Status {
        const std::int32_t* const pair = pairs.data() + share.first;
        Operands rest = operands;
        const auto each = {std::pair(spec.epilogue.row_scale, &rest.row_scale), std::pair(spec.epilogue.gate, &rest.gate),
                           std::pair(spec.epilogue.residual, &rest.residual)};
        if (share.rows == 1) {
          for (const auto& [there, view] : each)
            if (there && is_per_row(*view, all)) *view = rows_of(*view, *pair, 1);
          return plan.run(of[share.expert], rows_of(a, *pair / divisor, 1), rows_of(d, *pair, 1), rest, scratch, &own);
        }
        const auto rows = static_cast<std::size_t>(share.rows);
        NIBBLE_ASSIGN_OR_RETURN(experts::Arena of_share, experts::Arena::of(scratch, 0));
        ConstTensorView x = a;
        std::array<Gathered, 4> gathered;
        std::size_t count = 0;
        const auto gather = [&](ConstTensorView& from, std::int64_t by) {
          gathered[count++] = {from, of_share.take<std::byte>(rows * bytes_of_row(from)).data(), by, &from};
        };
        gather(x, divisor);
        for (const auto& [there, view] : each)
          if (there && is_per_row(*view, all)) gather(*view, 1);
        const TensorView to(of_share.take<std::byte>(rows * d_bytes).data(), d.dtype, {share.rows, d.dim(1)});
        own.parallel_for(share.rows, [&](std::int64_t i) {
          for (const Gathered& part : std::span(gathered).first(count)) part.take(i, pair[i]);
        });
        for (const Gathered& part : std::span(gathered).first(count)) *part.operand = part.rows(share.rows);
        NIBBLE_RETURN_IF_ERROR(plan.run(of[share.expert], x, to, rest, of_share.rest(), &own));
        own.parallel_for(share.rows,
                         [&](std::int64_t i) { std::memcpy(rows_of(d, pair[i], 1).data, rows_of(to, i, 1).data, d_bytes); });
        return {};
      });
}

}  // namespace nibble
