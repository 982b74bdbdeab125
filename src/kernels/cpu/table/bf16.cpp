// The rows of the bf16 family.
#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/bf16_tile.hpp"

namespace nibble::cpu {
#if defined(__x86_64__) || defined(__aarch64__)
namespace {

template <const Bf16Isa& kIsa>
Status run(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const DotTask task(self, args, decoder);
  // At least four tasks a thread, so that an interrupted thread does not delay the others; an even number of row blocks where they are pairs.
  const std::int64_t blocks = geo.row_blocks(), tasks = 4 * args.executor->threads();
  const std::int64_t fair = (blocks + tasks - 1) / tasks, step = std::min<std::int64_t>(fair + fair % 2, kIsa.blocks);
  const std::int64_t ranges = (blocks + step - 1) / step, token_blocks = (task.m + kIsa.tokens - 1) / kIsa.tokens;
  args.executor->parallel_for(ranges * token_blocks, [&](std::int64_t i) {
    const std::int64_t begin = i % ranges * step;
    kIsa.linear(task, begin, std::min(begin + step, blocks), i / ranges * kIsa.tokens);
  });
  return {};
}

/// The largest magnitude of code − zero that the types allow.
int farthest(DType codes, DType zero) {
  const int low = codes == DType::s8 ? -128 : -info(codes).bias, high = low + (1 << bits(codes)) - 1;
  const int zero_low = zero == DType::s8 ? -128 : 0, zero_high = zero == DType::s8 ? 127 : 255;
  return std::max(high - zero_low, zero_high - low);
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  const DType codes = p.scheme.codes;
  const bool fp8 = p.act_scheme.codes == DType::e4m3;
  if (p.act_scheme.codes != DType::none && !fp8)
    return error(StatusCode::unsupported, "multiplies bf16, the activations are to be quantized to {}", name(p.act_scheme.codes));
  if (fp8 && p.scheme.is_dense())
    return error(StatusCode::unsupported, "the weight is {}, the activations are to be quantized to e4m3", p.scheme.name());
  if (fp8 && !is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0 && p.permutes_k)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  const std::int64_t group = p.scheme.group.k == 0 ? p.k : p.scheme.group.k;
  if (fp8 && p.act_scheme.group.k != 0 && p.act_scheme.group.k < group && p.act_scheme.group.k % tile::kOctet != 0)
    return error(StatusCode::unsupported, "reads octets of channels, the activations have scales per {}", p.act_scheme.group.k);
  const int terms = fp8 || (p.a_dtype == DType::bf16 && !p.prescales_k) ? 1 : p.a_dtype == DType::f16 && !p.prescales_k ? 2 : 3;
  if (terms != bf16_terms(self.form))
    return error(StatusCode::unsupported, "multiplies activations that are sums of {} bf16; {} are {}", bf16_terms(self.form),
                 fp8             ? "e4m3"
                 : p.prescales_k ? "those times a prescale"
                                 : name(p.a_dtype),
                 terms);
  if (codes == DType::bf16) return {};
  if ((codes == DType::e4m3 || codes == DType::e2m1) && p.scheme.zero == ZeroKind::none) return {};
  if (info(codes).kind == DTypeKind::floating || (bits(codes) != 4 && bits(codes) != 8))
    return error(StatusCode::unsupported, "decodes integers of 4 and 8 bits, e4m3, e2m1 and bf16, the weight has {} codes",
                 name(codes));
  if (p.scheme.zero == ZeroKind::offset || p.scheme.zero == ZeroKind::real)
    return error(StatusCode::unsupported, "needs code − zero to be an integer, the weight has float {}",
                 p.scheme.zero == ZeroKind::real ? "zero points" : "offsets");
  // bf16 has every integer up to 256, and of those beyond the even ones.
  const int far = p.scheme.zero == ZeroKind::integer && p.zero_type != DType::none ? farthest(codes, p.zero_type) : 0;
  if (far > 256)
    return error(StatusCode::unsupported, "needs code − zero in bf16, up to 256; with {} codes and {} zero points it may be {}",
                 name(codes), name(p.zero_type), far);
  return {};
}

/// Slots (cost.hpp), fitted to measurements.
struct Bf16Rates {
  double dot;     // per token and vector of dot products
  double decode;  // per vector of the panel: 4-bit codes with zero points; twice that for 8-bit integers, nothing for bf16
  double plain;   // the same of 4-bit codes without
  double e4m3;
  double flush;  // per token, vector and segment
  int tokens;    // that are multiplied together, as many or fewer
};

/// kOnTwoPorts: the rates of such machines (has_two_ports).
template <const Bf16Isa& kIsa, const Bf16Rates& kUsual, const Bf16Rates& kOnTwoPorts>
double cost_us(const Kernel& self, const Problem& p) {
  const Bf16Rates& rates = rates_of(p.machine, kUsual, kOnTwoPorts);
  const std::int64_t blocks = (p.n + kIsa.rows - 1) / kIsa.rows, vectors_per_block = kIsa.rows / kIsa.lanes;
  const double vectors = static_cast<double>(blocks * vectors_per_block);
  const double pairs = 4.0 * static_cast<double>(tile::Geometry::octets(p.k));
  const ActDigits digits = ActDigits::make(p.act_scheme, p.scheme, p.k);
  const double segments = std::ceil(static_cast<double>(p.k) / static_cast<double>(digits.piece));
  const std::int64_t token_blocks = (p.m + kIsa.tokens - 1) / kIsa.tokens;
  const std::int64_t tokens_of_tiles = (p.m + rates.tokens - 1) / rates.tokens * rates.tokens;
  const auto tokens = static_cast<double>(tokens_of_tiles);
  const bool wide = bits(p.scheme.codes) == 8;
  const double decode = p.scheme.is_dense()               ? 0
                        : p.scheme.codes == DType::e4m3   ? rates.e4m3
                        : wide                            ? 2 * rates.decode
                        : p.scheme.zero == ZeroKind::none ? rates.plain
                                                          : rates.decode;
  const double slots =
      vectors * (pairs * (bf16_terms(self.form) * rates.dot * tokens + decode * static_cast<double>(token_blocks)) +
                 segments * tokens * rates.flush);
  const std::int64_t tasks = blocks * token_blocks;
  const double compute = 1e-3 * slots * slot_ns(p.machine, kIsa.lanes) / p.machine.threads;
  return kLoopUs + overlapped(p.machine, compute * imbalance(tasks, p.machine.threads), read_us(p, kIsa.rows));
}

template <const Bf16Isa& kIsa, const Bf16Rates& kRates, const Bf16Rates& kOnTwoPorts = kRates>
constexpr Kernel row(Isa isa, ActForm form, Tile tile) {
  return {
      .backend = Backend::cpu,
      .isa = isa,
      .op = Op::linear,
      .out = "any",
      .act = name(form),
      .weight = "any",
      .layout = tile.n == 32 ? "cpu_n32" : "cpu_n16",
      .tile = tile,
      .summary =
          "exact: bf16 dot products, weights decoded to a bf16 panel that many tokens share; dense bf16 as it lies; FP8 as bf16",
      .form = form,
      .accepts = accepts,
      .cost_us = cost_us<kIsa, kRates, kOnTwoPorts>,
      .run = run<kIsa>};
}

#if defined(__x86_64__)
constexpr Bf16Rates kAmxRates{.dot = 0.22, .decode = 5, .plain = 2, .e4m3 = 5.2, .flush = 10.4, .tokens = 16};
constexpr Bf16Rates kAvx512Rates{.dot = 1.09, .decode = 5.4, .plain = 5.4, .e4m3 = 10.8, .flush = 7.7, .tokens = 2};
/// A dot product every second clock.
constexpr Bf16Rates kAvx512OnTwoPorts{.dot = 4, .decode = 5.4, .plain = 5.4, .e4m3 = 10.8, .flush = 7.7, .tokens = 2};

constexpr std::array kKernels{
    row<kAmxBf16, kAmxRates>(Isa::amx, ActForm::bf16k32, {32, 32, 0}),
    row<kAmxBf16, kAmxRates>(Isa::amx, ActForm::bf16x2k32, {32, 32, 0}),
    row<kAmxBf16, kAmxRates>(Isa::amx, ActForm::bf16x3k32, {32, 32, 0}),
    row<kAvx512Bf16, kAvx512Rates, kAvx512OnTwoPorts>(Isa::avx512bf16, ActForm::bf16, {8, 32, 0}),
};
#else
/// By the instructions of the loops (bench/aarch64_loops.py), in the slots of SDOT (dot.cpp): 52 of them for 24 BFMMLA.
constexpr Bf16Rates kNeonRates{.dot = 0.63, .decode = 3, .plain = 3, .e4m3 = 6, .flush = 3, .tokens = 2};

constexpr std::array kKernels{row<kNeonBf16, kNeonRates>(Isa::neonbf16, ActForm::bf16, {12, 16, 0})};
#endif

}  // namespace

std::span<const Kernel> bf16_kernels() { return kKernels; }
#else
std::span<const Kernel> bf16_kernels() { return {}; }
#endif

}  // namespace nibble::cpu
