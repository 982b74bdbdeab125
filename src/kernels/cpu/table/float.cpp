// The rows of the float family: linear and dequantize, per instruction set.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/float_tile.hpp"
#include "kernels/cpu/transpose.hpp"

namespace nibble::cpu {
namespace {

template <const FloatIsa& kIsa>
Status run_linear(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const FloatTask task{.decoder = &decoder,
                       .weight = args.weight->bytes.data(),
                       .activations = reinterpret_cast<const float*>(args.prepared),
                       .m = args.a.dim(0),
                       .outputs = Outputs(self.isa, args)};
  const std::int64_t blocks = decoder.geometry.row_blocks();
  const std::int64_t token_blocks = (task.m + kIsa.tokens - 1) / kIsa.tokens;
  // Row blocks are the inner index: concurrent tasks share one block of activations, which stays in L2.
  args.executor->parallel_for(blocks * token_blocks,
                              [&](std::int64_t i) { kIsa.linear(task, i % blocks, i / blocks * kIsa.tokens); });
  return {};
}

constexpr int kMostRows = 32;  // R of any layout

/// Writes W of `count` input channels, k0 and those after it, to D: a panel [count][R].
template <const FloatIsa& kIsa>
void store_panel(const float* panel, std::int64_t n0, std::int64_t k0, int count, const StepArgs& args) {
  const PackedWeightData& weight = *args.weight;
  const DType type = args.d.dtype;
  const std::int64_t width = bits(type) / 8, stride = args.d.stride(0) * width;
  const std::int64_t live = std::min<std::int64_t>(kIsa.rows, weight.n - n0);
  alignas(64) std::byte converted[kChunk * kMostRows * 2];
  const auto* from = reinterpret_cast<const std::byte*>(panel);
  if (type != DType::f32) {
    kIsa.convert(panel, count * kIsa.rows, type, converted);
    from = converted;
  }
  auto* const d = static_cast<std::byte*>(args.d.data);
  if (!args.transposed && weight.perm.empty())
    return transpose(static_cast<int>(width), from, kIsa.rows * width, count, live, d + n0 * stride + k0 * width, stride);
  for (int i = 0; i < count; ++i, from += kIsa.rows * width) {
    const std::int64_t k = weight.perm.empty() ? k0 + i : weight.perm[static_cast<std::size_t>(k0 + i)];
    if (args.transposed)
      std::memcpy(d + k * stride + n0 * width, from, static_cast<std::size_t>(live * width));
    else
      transpose(static_cast<int>(width), from, kIsa.rows * width, 1, live, d + n0 * stride + k * width, stride);
  }
}

template <const FloatIsa& kIsa>
Status run_dequantize(const Kernel&, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const std::int64_t blocks = geo.row_blocks();
  // A row of [K,N] has pieces of R numbers. A task writes up to four side by side, as long as there are tasks for all threads.
  const std::int64_t together = args.transposed ? std::clamp<std::int64_t>(blocks / (4 * args.executor->threads()), 1, 4) : 1;
  args.executor->parallel_for((blocks + together - 1) / together, [&](std::int64_t task) {
    alignas(64) float panel[kChunk * kMostRows];
    const std::int64_t first = task * together, end = std::min(blocks, first + together);
    for (std::int64_t g = 0; g < geo.groups(); ++g) {
      const std::int64_t k_begin = g * geo.group, k_end = std::min(geo.k, k_begin + geo.group);
      for (std::int64_t k = k_begin; k < k_end; k += kChunk)
        for (std::int64_t block = first; block < end; ++block) {
          const int count = static_cast<int>(std::min<std::int64_t>(kChunk, k_end - k));
          kIsa.decode(decoder, args.weight->bytes.data() + geo.record(block, g), k - k_begin, count, panel);
          store_panel<kIsa>(panel, block * kIsa.rows, k, count, args);
        }
    }
  });
  return {};
}

Status accepts_float(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (p.act_scheme.codes != DType::none && p.act_scheme.codes != DType::e4m3)
    return error(StatusCode::unsupported, "multiplies floats, the activations are to be quantized to {}",
                 name(p.act_scheme.codes));
  NIBBLE_RETURN_IF_ERROR(accepts_block(p.act_scheme));
  if (!is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0 && p.permutes_k)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  return {};
}

/// Slots (cost.hpp), fitted to measurements.
struct Rates {
  double decode;  // per vector of the panel
  double dot;     // per token and vector of the panel
  double tile;    // per tile and vector of the panel, however few tokens it has: the latency of its sums
};
constexpr Rates kBaselineRates{.decode = 7.4, .dot = 3.1, .tile = 3.1};
constexpr Rates kAvx2Rates{.decode = 3.8, .dot = 1.08, .tile = 3.7};
constexpr Rates kAvx512Rates{.decode = 3.8, .dot = 1.08, .tile = 1.2};
constexpr double kE4m3 = 9;      // per vector of a panel that is decoded from e4m3 codes
constexpr double kGeneral = 62;  // per vector of a panel that is decoded in double

template <const FloatIsa& kIsa, const Rates& kRates>
double linear_cost_us(const Kernel&, const Problem& p) {
  const bool simple =
      (p.scheme.zero == ZeroKind::none || p.scheme.zero == ZeroKind::integer) && info(p.scheme.codes).kind != DTypeKind::floating;
  const bool e4m3 = p.scheme.codes == DType::e4m3;
  const bool whole = bits(p.scheme.codes) == 4 || bits(p.scheme.codes) == 8;
  const std::int64_t token_blocks = (p.m + kIsa.tokens - 1) / kIsa.tokens;
  const auto tile_slots = [](std::int64_t height) { return std::max(kRates.tile, kRates.dot * static_cast<double>(height)); };
  const std::int64_t full = p.m / kIsa.tile_m, tail = p.m % kIsa.tile_m, blocks = (p.n + kIsa.rows - 1) / kIsa.rows;
  const double tiles = static_cast<double>(full) * tile_slots(kIsa.tile_m) + (tail != 0 ? tile_slots(tail) : 0.0);
  const double decode = static_cast<double>(token_blocks) * (simple ? (whole ? 1 : 2) * kRates.decode : e4m3 ? kE4m3 : kGeneral);
  const int vectors_per_block = kIsa.rows / kIsa.lanes;
  const double vectors = static_cast<double>(blocks * vectors_per_block);
  const double slots = vectors * static_cast<double>(p.k) * (decode + tiles);
  const std::int64_t tasks = blocks * token_blocks;
  const double compute = 1e-3 * slots * slot_ns(p.machine, kIsa.lanes) / p.machine.threads;
  return kLoopUs + overlapped(compute * imbalance(tasks, p.machine.threads), read_us(p, kIsa.rows));
}

template <const FloatIsa& kIsa, const Rates& kRates>
double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kStoreNanoseconds = 0.2;  // conversion and transposition; the same for every row
  const double per_weight = kRates.decode * slot_ns(p.machine, kIsa.lanes) / p.machine.threads / kIsa.lanes;
  return 1e-3 * static_cast<double>(p.n) * static_cast<double>(p.k) * (per_weight + kStoreNanoseconds / p.machine.threads);
}

template <const FloatIsa& kIsa, const Rates& kRates>
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
          .cost_us = linear_cost_us<kIsa, kRates>,
          .run = run_linear<kIsa>};
}

template <const FloatIsa& kIsa, const Rates& kRates>
constexpr Kernel dequantize_row(Isa isa, std::string_view layout, Tile tile) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::dequantize,
          .out = "any",
          .act = "none",
          .weight = "any",
          .layout = layout,
          .tile = tile,
          .summary = "writes W as f32, f16 or bf16, bit-exact",
          .accepts = accepts_common,
          .cost_us = dequantize_cost_us<kIsa, kRates>,
          .run = run_dequantize<kIsa>};
}

constexpr std::array kLinear {
#if defined(__x86_64__)
  linear_row<kAvx512Float, kAvx512Rates>(
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

constexpr std::array kDequantize {
#if defined(__x86_64__)
  dequantize_row<kAvx512Float, kAvx512Rates>(Isa::avx512, "cpu_n32", {0, 32, 0}),
      dequantize_row<kAvx2Float, kAvx2Rates>(Isa::avx2, "cpu_n16", {0, 16, 0}),
#endif
      dequantize_row<kBaselineFloat, kBaselineRates>(Isa::baseline, "cpu_n16", {0, 16, 0}),
};

}  // namespace

std::span<const Kernel> float_kernels() { return kLinear; }
std::span<const Kernel> dequantize_kernels() { return kDequantize; }

}  // namespace nibble::cpu
