// The rows that write a packed weight as floats, per instruction set.
#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/float_tile.hpp"
#include "kernels/cpu/transpose.hpp"

namespace nibble::cpu {
namespace {

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

/// Slots (cost.hpp) per vector of weights that is decoded, fitted to measurements.
constexpr double kBaselineDecode = 7.4;
constexpr double kAvx2Decode = 3.8;
constexpr double kAvx512Decode = 3.8;

template <const FloatIsa& kIsa, const double& kDecode>
double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kStoreNanoseconds = 0.2;  // conversion and transposition; the same for every row
  const double per_weight = kDecode * slot_ns(p.machine, kIsa.lanes) / p.machine.threads / kIsa.lanes;
  return 1e-3 * static_cast<double>(p.n) * static_cast<double>(p.k) * (per_weight + kStoreNanoseconds / p.machine.threads);
}

template <const FloatIsa& kIsa, const double& kDecode>
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
          .cost_us = dequantize_cost_us<kIsa, kDecode>,
          .run = run_dequantize<kIsa>};
}

constexpr std::array kDequantize {
#if defined(__x86_64__)
  dequantize_row<kAvx512Float, kAvx512Decode>(Isa::avx512, "cpu_n32", {0, 32, 0}),
      dequantize_row<kAvx2Float, kAvx2Decode>(Isa::avx2, "cpu_n16", {0, 16, 0}),
#endif
      dequantize_row<kBaselineFloat, kBaselineDecode>(Isa::baseline, "cpu_n16", {0, 16, 0}),
};

}  // namespace

std::span<const Kernel> dequantize_kernels() { return kDequantize; }

}  // namespace nibble::cpu
