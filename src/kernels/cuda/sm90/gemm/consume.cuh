// A pass of a multiplying warpgroup, whatever it multiplies: products, the reduction along K, the store.
//
// A Kernel is a Cta with
//   Sum, Rows                 the type of its sums; what the epilogue needs of a lane's two rows, with their bias
//   multiply                  adds the products of the warpgroup's row block and its share of a pass's records
//   rows_of(pass, block)      loads Rows
//   load_token_terms(pass)    begins to load what the epilogue needs of the pass's tokens
//   wait_for_token_terms()    waits for it
//   subtract_zeros, add_sum_bias, finish    sums of a unit, less zero points, with their bias → values of D, less the epilogue
//   kUnrollsStore             16-bit floats are stored by unrolled code: more of it, less time
#pragma once

#include <type_traits>

#include "kernels/cuda/device/stream_k.cuh"
#include "kernels/cuda/sm90/gemm/reduce.cuh"
#include "kernels/cuda/sm90/gemm/store.cuh"

namespace nibble::cuda {
namespace {

/// Units of a round.
template <class Kernel>
constexpr int kRound = Kernel::kUnits < kRoundUnits ? Kernel::kUnits : kRoundUnits;

/// The units that a warpgroup stores: rounds of `each`, `step` apart, within [first, stop). Of a pass that is not split they are those of
/// its row block. Of a split pass the rounds of the units that its rank owns rotate among the warpgroups; their number of units is a power
/// of two, so that a round is within a row block.
template <class Kernel>
struct Rounds {
  int first, stop, step, each;

  __device__ explicit Rounds(const Kernel& k) {
    if (k.p.schedule.split > 1) {
      const int own = owned_units(k);
      each = min(kRound<Kernel>, own & -own);
      while (each > 1 && each * Kernel::kGroups > own) each /= 2;
      first = k.rank * own + k.warpgroup * each;
      stop = (k.rank + 1) * own;
      step = Kernel::kGroups * each;
    } else {
      first = k.row_group() * Kernel::kUnits;
      stop = first + Kernel::kUnits;
      step = each = kRound<Kernel>;
    }
  }
};

/// Stores the warpgroup's rounds. `rows` are those of the first.
template <class Kernel, class Out, class Sums>
__device__ __forceinline__ void store_rounds(const Kernel& k, const Out& out, const Pass& pass, const Sums& acc,
                                             typename Kernel::Rows rows) {
  const bool received = k.p.schedule.split > 1;
  const Rounds<Kernel> rounds(k);
  const auto tokens = k.tokens_of(pass);
  int round = 0;
#pragma unroll 1
  for (int unit = rounds.first; unit < rounds.stop; unit += rounds.step) {
    const int row_group = unit / Kernel::kUnits, block = pass.block + row_group, in_block = unit % Kernel::kUnits;
    const int first_m = tokens.first() + in_block * kUnitTokens;
    if (row_group >= pass.blocks || first_m >= tokens.end()) continue;
    if (received) {
      if (unit != rounds.first) rows = k.rows_of(pass, block);
#pragma unroll 1
      for (int i = 0; i < rounds.each; ++i) {
        auto sums = received_unit<typename Kernel::Sum>(k, unit + i - k.rank * owned_units(k));
        k.template subtract_zeros<1>(sums.at, rows, in_block + i);
        k.template add_sum_bias<1>(sums.at, block);
        out.stage(round, i, k.template finish<Out::kRaw>(sums, rows, in_block + i), rows.bias);
      }
    } else {
#pragma unroll
      for (int first = 0; first < Kernel::kUnits; first += kRound<Kernel>) {  // registers are indexed at compile time
        if (first != in_block) continue;
#pragma unroll
        for (int i = 0; i < kRound<Kernel>; ++i)
          out.stage(round, i, k.template finish<Out::kRaw>(unit_of(acc, first + i), rows, first + i), rows.bias);
      }
    }
    out.flush(round++, block, first_m, rounds.each * kUnitTokens);
  }
}
/// The same for the sums of a row block, unrolled: it takes fewer instructions and has a copy of flush for each round.
template <class Kernel, class Out, class Sums>
__device__ __forceinline__ void store_unrolled(const Kernel& k, const Out& out, const Pass& pass, const Sums& acc,
                                               const typename Kernel::Rows& rows) {
  const auto tokens = k.tokens_of(pass);
  const int first_m = tokens.first();
#pragma unroll
  for (int first = 0; first < Kernel::kUnits; first += kRound<Kernel>) {
    if (first_m + first * kUnitTokens >= tokens.end()) continue;
#pragma unroll
    for (int i = 0; i < kRound<Kernel>; ++i)
      out.stage(first / kRound<Kernel>, i, k.template finish<Out::kRaw>(unit_of(acc, first + i), rows, first + i), rows.bias);
    out.flush(first / kRound<Kernel>, pass.block + k.row_group(), first_m + first * kUnitTokens, kRound<Kernel> * kUnitTokens);
  }
}

template <class Kernel>
__device__ __forceinline__ void consume_pass(const Kernel& k, const Pass& pass, Cursor& from) {
  using Sum = typename Kernel::Sum;
  const Schedule& schedule = k.p.schedule;
  const bool split = schedule.split > 1, active = k.warpgroup < k.active(), has_block = active && k.row_group() < pass.blocks;
  // Operands of the epilogue are loaded during the products.
  k.load_token_terms(pass);
  const int row_group = min(Rounds<Kernel>(k).first / Kernel::kUnits, schedule.most - 1);
  const typename Kernel::Rows rows = k.rows_of(pass, pass.block + min(row_group, max(pass.blocks - 1, 0)));
  Sum acc[Kernel::kTokens / 2] = {};
  if (has_block)
    k.multiply(pass, from, acc);
  else if (active)
    k.skip(pass.records(), from);
  if (k.depth() > 1 && active) add_warpgroups(k, acc, k.active());
  const bool has_sums = has_block && k.k_index() == 0;
  if (split) {
    k.meet_cluster();  // all rings have been read and become inboxes
    if (has_sums) send_units(k, acc);
    k.meet_cluster();  // all sums have arrived
  } else if (!has_sums) {
    return;
  } else if (schedule.split == kStreamK) {
    const Parts<Sum, Kernel::kUnits> parts{k.p.parts, 4 * Kernel::kGroups, 4 * k.warpgroup + k.warp, k.lane};
    if (pass.end < schedule.records) return parts.store(k.cluster, pass.blocks, acc);
    if (pass.first > 0) parts.add(schedule, k.cluster, pass.first, acc);
  }
  k.wait_for_token_terms();
  if (!split) {
    k.template subtract_zeros<Kernel::kUnits>(acc, rows, 0);
    k.template add_sum_bias<Kernel::kUnits>(acc, pass.block + k.row_group());
  }
  Store<Kernel>{k, k.tokens_of(pass).end()}.with_kind([&](const auto& out) {
    if (std::decay_t<decltype(out)>::kHalf && Kernel::kUnrollsStore && !split)
      store_unrolled(k, out, pass, acc, rows);
    else
      store_rounds(k, out, pass, acc, rows);
  });
  ptx::named_barrier(1 + k.warpgroup, kGroupThreads);  // before the next pass writes into the first buffer
}

}  // namespace
}  // namespace nibble::cuda
