// The rows of the float family, per instruction set.
#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/float_tile.hpp"

namespace nibble::cpu {
namespace {

/// Row blocks of a task: as many as leave four tasks a thread, so that an interrupted thread does not delay the others, and at most 16.
/// They lie one after the other: a thread that goes elsewhere every 128 KiB reads slower than one that does every 2 MiB, beyond which
/// little is gained.
std::int64_t task_blocks(std::int64_t blocks, int threads) {
  return whole_streams(std::clamp<std::int64_t>(blocks / (4 * threads), 1, 16));
}

template <const FloatIsa& kIsa>
Status run_linear(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const FloatTask task{.decoder = &decoder,
                       .weight = args.weight->bytes.data(),
                       .activations = reinterpret_cast<const float*>(args.prepared),
                       .m = args.a.dim(0),
                       .outputs = Outputs(self.isa, args)};
  const std::int64_t blocks = decoder.geometry.row_blocks(), step = task_blocks(blocks, args.executor->threads());
  const std::int64_t ranges = (blocks + step - 1) / step, token_blocks = (task.m + kIsa.tokens - 1) / kIsa.tokens;
  // Row blocks are the inner index: concurrent tasks share one block of activations, which stays in L2.
  args.executor->parallel_for(ranges * token_blocks, [&](std::int64_t i) {
    const std::int64_t begin = i % ranges * step, m = i / ranges * kIsa.tokens;
    kIsa.linear(task, begin, std::min(begin + step, blocks), m);
  });
  return {};
}

Status accepts_float(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (p.scheme.is_dense() && p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "the weight is {}, the activations are to be quantized to {}", p.scheme.name(),
                 name(p.act_scheme.codes));
  if (p.act_scheme.codes != DType::none && p.act_scheme.codes != DType::e4m3)
    return error(StatusCode::unsupported, "multiplies floats, the activations are to be quantized to {}",
                 name(p.act_scheme.codes));
  if (!is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0 && p.permutes_k)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  return {};
}

/// Slots (cost.hpp), fitted to measurements.
struct Rates {
  double decode;  // per vector of the panel
  double floats;  // the same, decoded from codes of e4m3 or e2m1
  double dot;     // per token and vector of the panel
  double tile;    // per tile and vector of the panel, however few tokens it has: the latency of its sums
  double direct;  // per vector of codes of e4m3 or e2m1 that few tokens multiply without a panel
};
#if defined(__aarch64__)
constexpr Rates kBaselineRates{.decode = 7.4, .floats = 9, .dot = 3.1, .tile = 3.1, .direct = 9};
#else
constexpr Rates kBaselineRates{.decode = 7.4, .floats = 40, .dot = 3.1, .tile = 3.1, .direct = 40};  // no bytes are looked up
#endif
constexpr Rates kAvx2Rates{.decode = 4.7, .floats = 4.7, .dot = 1.22, .tile = 5.6, .direct = 4.8};
constexpr Rates kAvx512Rates{.decode = 3.8, .floats = 6.5, .dot = 1.08, .tile = 1.2, .direct = 3.7};
constexpr Rates kAvx512OnTwoPorts{.decode = 3.7, .floats = 6.5, .dot = 1.23, .tile = 7, .direct = 3.7};
constexpr Rates kAvx512Bf16Rates{.decode = 3.8, .floats = 6.5, .dot = 1.08, .tile = 1.2, .direct = 3.4};
constexpr double kGeneral = 62;  // per vector of a panel that is decoded in double
constexpr double kHalf = 2;      // per vector of a panel of dense f16 or bf16, an estimate: half a load, a shift and a store

/// kOnTwoPorts: the rates of such machines (has_two_ports).
template <const FloatIsa& kIsa, const Rates& kUsual, const Rates& kOnTwoPorts>
double linear_cost_us(const Kernel&, const Problem& p) {
  const Rates& rates = rates_of(p.machine, kUsual, kOnTwoPorts);
  const bool simple =
      (p.scheme.zero == ZeroKind::none || p.scheme.zero == ZeroKind::integer) && info(p.scheme.codes).kind != DTypeKind::floating;
  const bool floats = (p.scheme.codes == DType::e4m3 || p.scheme.codes == DType::e2m1) && p.scheme.zero == ZeroKind::none;
  const bool whole = bits(p.scheme.codes) == 4 || bits(p.scheme.codes) == 8;
  const double panel = p.scheme.codes == DType::f32 ? 0.0
                       : p.scheme.is_dense()        ? kHalf
                       : simple                     ? (whole ? 1 : 2) * rates.decode
                                                    : (floats ? rates.floats : kGeneral);
  const bool direct = floats && p.m <= kIsa.few;
  const std::int64_t token_blocks = (p.m + kIsa.tokens - 1) / kIsa.tokens;
  const auto tile_slots = [&rates](std::int64_t height) { return std::max(rates.tile, rates.dot * static_cast<double>(height)); };
  const std::int64_t full = p.m / kIsa.tile_m, tail = p.m % kIsa.tile_m, blocks = (p.n + kIsa.rows - 1) / kIsa.rows;
  const double tiles = static_cast<double>(full) * tile_slots(kIsa.tile_m) + (tail != 0 ? tile_slots(tail) : 0.0);
  const double decode = static_cast<double>(token_blocks) * panel;
  const int vectors_per_block = kIsa.rows / kIsa.lanes;
  const double vectors = static_cast<double>(blocks * vectors_per_block);
  const double slots =
      vectors * static_cast<double>(p.k) * (direct ? rates.direct + rates.dot * static_cast<double>(p.m) : decode + tiles);
  const std::int64_t step = task_blocks(blocks, p.machine.threads), tasks = (blocks + step - 1) / step * token_blocks;
  const double compute = 1e-3 * slots * slot_ns(p.machine, kIsa.lanes) / p.machine.threads;
  return kLoopUs + overlapped(p.machine, compute * imbalance(tasks, p.machine.threads), read_us(p, kIsa.rows));
}

template <const FloatIsa& kIsa, const Rates& kRates, const Rates& kOnTwoPorts = kRates>
constexpr Kernel linear_row(Isa isa, std::string_view layout, Tile tile, std::string_view summary) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::linear,
          .out = "any",
          .act = "f32",
          .weight = "any",
          .layout = layout,
          .tile = tile,
          .summary = summary,
          .form = ActForm::f32,
          .accepts = accepts_float,
          .cost_us = linear_cost_us<kIsa, kRates, kOnTwoPorts>,
          .run = run_linear<kIsa>};
}

#if defined(__x86_64__)
/// The same loops, in which e4m3 is looked up by VBMI; other codes are left to the row of AVX-512.
Status accepts_e4m3(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_float(self, p));
  if (p.scheme.codes != DType::e4m3 || p.scheme.zero != ZeroKind::none)
    return error(StatusCode::unsupported, "looks up codes of e4m3, the weight has {}", p.scheme.name());
  return {};
}
constexpr Kernel e4m3_row() {
  Kernel row = linear_row<kAvx512Bf16Float, kAvx512Bf16Rates>(
      Isa::avx512bf16, "cpu_n32", {8, 32, 0},
      "f32 multiply-adds in 8×32 register tiles, e4m3 looked up by VBMI; FP8 activations as floats");
  row.weight = "e4m3";
  row.accepts = accepts_e4m3;
  return row;
}
#endif

constexpr std::array kLinear {
#if defined(__x86_64__)
  e4m3_row(),
      linear_row<kAvx512Float, kAvx512Rates, kAvx512OnTwoPorts>(
          Isa::avx512, "cpu_n32", {8, 32, 0},
          "f32 multiply-adds in 8×32 register tiles, weights decoded to an f32 panel; FP8 activations as floats"),
      linear_row<kAvx2Float, kAvx2Rates>(
          Isa::avx2, "cpu_n16", {6, 16, 0},
          "f32 multiply-adds in 6×16 register tiles, weights decoded to an f32 panel; FP8 activations as floats"),
#endif
#if defined(__aarch64__)
      linear_row<kBaselineFloat, kBaselineRates>(
          Isa::baseline, "cpu_n16", {6, 16, 0},
          "f32 multiply-adds in 6×16 register tiles, weights decoded to an f32 panel; FP8 activations as floats"),
#else
  linear_row<kBaselineFloat, kBaselineRates>(
      Isa::baseline, "cpu_n16", {2, 16, 0},
      "f32 multiply-adds in 2×16 register tiles, weights decoded to an f32 panel; FP8 activations as floats"),
#endif
};

}  // namespace

std::span<const Kernel> float_kernels() { return kLinear; }

}  // namespace nibble::cpu
