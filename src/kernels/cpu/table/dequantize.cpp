// The rows that write a packed weight as floats, per instruction set.
#include <algorithm>
#include <array>

#include "kernels/cpu/families.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/dequantize_tile.hpp"
#include "nibble/device.hpp"

namespace nibble::cpu {
namespace {

/// D that the threads' own caches do not hold goes past all of them: memory takes it at twice the speed.
bool exceeds_caches(std::int64_t bytes, int threads) { return bytes >= threads * this_device().l2_bytes; }

/// W divided among threads: strips of row blocks, and these into parts along K as long as there are fewer than four for each thread.
struct Division {
  std::int64_t strips, blocks;   // row blocks of a strip
  std::int64_t parts, channels;  // of a part
};
Division divide(const tile::Geometry& geo, const StepArgs& args) {
  Division x;
  x.blocks = args.transposed ? kRowBytes * 8 / bits(args.d.dtype) / geo.rows : 1;
  x.strips = (geo.row_blocks() + x.blocks - 1) / x.blocks;
  const std::int64_t unit = geo.group % tile::kOctet == 0 ? kTileChannels : geo.group;  // a part begins with an octet of a group
  const std::int64_t units = (geo.k + unit - 1) / unit,
                     wanted = std::min(units, (4 * args.executor->threads() + x.strips - 1) / x.strips);
  x.channels = (units + wanted - 1) / wanted * unit;
  x.parts = (geo.k + x.channels - 1) / x.channels;
  return x;
}

template <const DequantizeIsa& kIsa>
Status run_dequantize(const Kernel&, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const std::int64_t width = bits(args.d.dtype) / 8;
  const DequantizeTask task{.decoder = &decoder,
                            .weight = args.weight->bytes.data(),
                            .perm = args.weight->perm.empty() ? nullptr : args.weight->perm.data(),
                            .type = args.d.dtype,
                            .d = static_cast<std::byte*>(args.d.data),
                            .stride = args.d.stride(0) * width,
                            .bypass = exceeds_caches(geo.n * geo.k * width, args.executor->threads())};
  const Division by = divide(geo, args);
  args.executor->parallel_for(by.strips * by.parts, [&](std::int64_t i) {
    const std::int64_t block = i / by.parts * by.blocks, k = i % by.parts * by.channels;
    const DequantizeRange range{.block = block,
                                .block_end = std::min(block + by.blocks, geo.row_blocks()),
                                .k = k,
                                .k_end = std::min(k + by.channels, geo.k)};
    (args.transposed ? kIsa.rows_of_k : kIsa.rows_of_n)(task, range);
  });
  return {};
}

/// Slots (cost.hpp) per vector of weights, fitted to measurements in all types and orders of D.
struct Rates {
  double integer;  // codes whose values are computed in f32; also of dense weights, an estimate
  double e4m3;
  double other;
};
constexpr Rates kBaselineRates{.integer = 50, .e4m3 = 80, .other = 90};
constexpr Rates kAvx2Rates{.integer = 12, .e4m3 = 28, .other = 40};
constexpr Rates kAvx512Rates{.integer = 12, .e4m3 = 30, .other = 40};

template <const DequantizeIsa& kIsa, const Rates& kRates>
double dequantize_cost_us(const Kernel&, const Problem& p) {
  const bool integer =
      (p.scheme.zero == ZeroKind::none || p.scheme.zero == ZeroKind::integer) && info(p.scheme.codes).kind != DTypeKind::floating;
  const double slots = integer || p.scheme.is_dense()  ? kRates.integer
                       : p.scheme.codes == DType::e4m3 ? kRates.e4m3
                                                       : kRates.other;
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k);
  const double compute = 1e-3 * weights / kIsa.lanes * slots * slot_ns(p.machine, kIsa.lanes) / p.machine.threads;
  const double write = 1e-3 * weights * bits(p.epilogue.out) / 8 / p.machine.read_gbytes_per_s;
  return kLoopUs + overlapped(p.machine, compute, read_us(p, kIsa.rows) + write);
}

template <const DequantizeIsa& kIsa, const Rates& kRates>
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

constexpr std::array kDequantize {
#if defined(__x86_64__)
  dequantize_row<kAvx512Dequantize, kAvx512Rates>(Isa::avx512, "cpu_n32", {0, 32, 0}),
      dequantize_row<kAvx2Dequantize, kAvx2Rates>(Isa::avx2, "cpu_n16", {0, 16, 0}),
#endif
      dequantize_row<kBaselineDequantize, kBaselineRates>(Isa::baseline, "cpu_n16", {0, 16, 0}),
};

}  // namespace

std::span<const Kernel> dequantize_kernels() { return kDequantize; }

}  // namespace nibble::cpu
