// The rows of the dot-product family, per instruction set: exact (24-bit fixed-point activations), int8 by segments of K, and int8
// over all of K.
#include <array>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/dot_tile.hpp"
#include "kernels/cpu/tiles/whole_tile.hpp"

namespace nibble::cpu {
namespace {

template <const DotIsa& kIsa>
Status run(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const DotTask task(self, args, decoder);
  // Tasks are whole row blocks, at least four per thread, so that an interrupted thread does not delay the others.
  const std::int64_t fair = (geo.row_blocks() + 4 * args.executor->threads() - 1) / (4 * args.executor->threads());
  std::int64_t most = std::min(fair, kMaxTaskBlocks);
  if (task.zero_sums == ZeroSums::per_segment && self.isa != Isa::amx)  // which keeps no sums of codes
    most = std::clamp<std::int64_t>(kColumnFloats / (task.segments.count() * kIsa.rows), 1, most);
  // A single tile reads row blocks once, several of them side by side.
  const std::int64_t step =
      task.m <= task.tile ? whole_streams(most) : std::clamp<std::int64_t>(kIsa.task_bytes / geo.row_block_bytes, 1, most);
  const std::int64_t ranges = (geo.row_blocks() + step - 1) / step;
  const std::int64_t tokens = kIsa.task_tokens / task.tile * task.tile;
  const std::int64_t token_blocks = (task.m + tokens - 1) / tokens;
  args.executor->parallel_for(ranges * token_blocks, [&](std::int64_t i) {
    const std::int64_t block = i % ranges * step, m = i / ranges * tokens;
    kIsa.linear(task, block, std::min(block + step, geo.row_blocks()), m, std::min(m + tokens, task.m));
  });
  return {};
}

/// The word in the names of kernels that sum over all of K, not by segments.
constexpr std::string_view kWhole = "whole";

Status accepts_dot(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (info(p.scheme.codes).kind == DTypeKind::floating)
    return error(StatusCode::unsupported, "multiplies integer codes, the weight has {} codes", name(p.scheme.codes));
  const bool quantizes = p.act_scheme.codes != DType::none;
  if (self.form == ActForm::s8x3 && quantizes)
    return error(StatusCode::unsupported, "keeps activations exact, they are to be quantized to {}", name(p.act_scheme.codes));
  if (is_int8(self.form) && !quantizes)
    return error(StatusCode::unsupported, "quantizes activations to int8, they are to stay exact");
  if (!quantizes) return {};
  if (p.act_scheme.codes != DType::s8)
    return error(StatusCode::unsupported, "multiplies int8, the activations are to be quantized to {}", name(p.act_scheme.codes));
  if (!is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0 && p.permutes_k)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  if (self.isa == Isa::amx && !sums_whole_rows(p.scheme, p.act_scheme)) {
    if (p.act_scheme.zero == ZeroKind::offset)
      return error(StatusCode::unsupported,
                   "adds float offsets of activations in another order than the kernels of vectors, whose bits results have");
    const std::int64_t block = p.act_scheme.group.k, group = p.scheme.group.k;
    if (block % tile::kOctet != 0 && block < (group == 0 ? p.k : group))
      return error(StatusCode::unsupported,
                   "takes blocks of activations that are a multiple of {} channels or of the weight's groups, not {}",
                   tile::kOctet, block);
  }
  const bool sums_whole = sums_whole_rows(p.scheme, p.act_scheme);
  const std::string scheme = Scheme{p.scheme, p.act_scheme}.name();
  if (sums_whole && self.variant != kWhole)
    return error(StatusCode::unsupported, "sums by segments of K, {} has one scale per token and output channel", scheme);
  if (!sums_whole && self.variant == kWhole)
    return error(StatusCode::unsupported, "sums over all of K, {} has not one scale per token and output channel", scheme);
  return {};
}

/// Slots (cost.hpp) of one register tile over one segment of K; fitted to measurements, see docs/kernels/cpu-dot.md.
struct DotRates {
  double dot;      // per vector of 4-byte dot products
  double wide;     // the same for codes of more than 4 bits
  double octet;    // per vector and octet: loading and splitting codes
  double segment;  // per vector and segment: its header, and the latency of the last sums
  double token;    // per token, vector and segment: applying scales
};
/// Per token, vector and segment: the correction for zero points of activations.
constexpr double kZeroSlots = 1.1;

/// `rates` of the kernels over all of K, which do nothing per segment.
constexpr DotRates whole(DotRates rates) {
  rates.segment = 40;  // once: starting sums, scales and the epilogue
  rates.token = 12;
  return rates;
}

/// Per vector and octet, for codes that are neither of 4 nor of 8 bits.
constexpr double kWidenSlots = 16;

/// kOnTwoPorts: the rates of such machines (has_two_ports).
template <const DotIsa& kIsa, const DotRates& kUsual, const DotRates& kOnTwoPorts>
double cost_us(const Kernel& self, const Problem& p) {
  const DotRates& rates = rates_of(p.machine, kUsual, kOnTwoPorts);
  const std::int64_t tile = prepared_tile(self.form, p.m, kIsa.tile);
  const ActDigits digits = ActDigits::make(p.act_scheme, p.scheme, p.k);
  const int width = bits(p.scheme.codes), vectors = kIsa.rows / kIsa.lanes;
  const double octets = static_cast<double>(tile::Geometry::octets(p.k));
  const double segments = std::ceil(static_cast<double>(p.k) / static_cast<double>(digits.piece));
  const bool narrow = width == 4 || width == 8;
  const bool zeros = digits.zero_sums == ZeroSums::per_segment;
  const double token = rates.token + (zeros ? kZeroSlots : 0);
  const auto slots = [&](std::int64_t height) {  // of a tile over all of K
    const std::int64_t room = token_room(self.form);
    const std::int64_t rows_of_tiles = (height + room - 1) / room * room * digits.digits;
    const auto rows = static_cast<double>(rows_of_tiles);
    const double dots = 2 * rows * (width == 4 ? rates.dot : rates.wide);
    const double codes = narrow ? rates.octet * width / 4 : rates.octet + kWidenSlots;
    return vectors * (octets * (dots + codes) + segments * (rates.segment + static_cast<double>(height) * token));
  };
  const std::int64_t full = p.m / tile, tail = p.m % tile, blocks = (p.n + kIsa.rows - 1) / kIsa.rows;
  double tiles = static_cast<double>(full) * slots(tile) + (tail != 0 ? slots(tail) : 0.0);
  if (zeros)  // the first tile of each task sums codes
    tiles += std::ceil(static_cast<double>(p.m) / static_cast<double>(kIsa.task_tokens)) * vectors * octets *
             (width == 4 ? rates.dot : 2 * rates.wide);
  const double compute = 1e-3 * static_cast<double>(blocks) * tiles * slot_ns(p.machine, kIsa.lanes) / p.machine.threads;
  const bool streams = narrow && p.m * digits.digits <= (kIsa.lanes == 16 ? 6 : 1);  // streams_of()
  return kLoopUs + overlapped(p.machine, compute * imbalance(blocks, p.machine.threads), read_us(p, kIsa.rows), streams);
}

#if defined(__x86_64__)
/// Tiles of AMX by segments: a row block is unpacked once for all tokens of a task. Storing and scaling sums take longer than the products of
/// short segments.
constexpr double kAmxDotSlots = 0.45, kAmxTokenSlots = 3.5, kAmxZeroSlots = 3.5, kAmxOctetSlots = 22, kAmxSegmentSlots = 143;

double cost_amx_us(const Kernel& self, const Problem& p) {
  const DotIsa& isa = kAmxInt8;
  constexpr std::int64_t kStepOctets = kRowBytes / tile::kOctet;
  const ActDigits digits = ActDigits::make(p.act_scheme, p.scheme, p.k);
  const bool zeros = digits.zero_sums == ZeroSums::per_segment;
  const double segments = std::ceil(static_cast<double>(p.k) / static_cast<double>(digits.piece));
  const std::int64_t step_octets = (digits.piece + kRowBytes - 1) / kRowBytes * kStepOctets;
  const std::int64_t room = token_room(self.form), rows = (p.m + room - 1) / room * room;
  const double dots = 2 * static_cast<double>(step_octets * rows) * kAmxDotSlots;
  const double scaling = static_cast<double>(p.m) * (kAmxTokenSlots + (zeros ? kAmxZeroSlots : 0));
  const double unpacking = static_cast<double>(tile::Geometry::octets(digits.piece)) *
                               (kAmxOctetSlots + ((bits(p.scheme.codes) == 4 || bits(p.scheme.codes) == 8) ? 0 : kWidenSlots)) +
                           kAmxSegmentSlots;
  const double times = std::ceil(static_cast<double>(p.m) / static_cast<double>(isa.task_tokens));
  const std::int64_t vectors = isa.rows / isa.lanes, blocks = (p.n + isa.rows - 1) / isa.rows;
  const double slots = static_cast<double>(blocks * vectors) * segments * (dots + scaling + times * unpacking);
  const double compute = 1e-3 * slots * slot_ns(p.machine, isa.lanes) / p.machine.threads;
  return kLoopUs + overlapped(p.machine, compute * imbalance(blocks, p.machine.threads), read_us(p, isa.rows));
}
#endif

template <const DotIsa& kIsa, const DotRates& kRates, const DotRates& kOnTwoPorts = kRates>
constexpr Kernel row(Isa isa, ActForm form, std::string_view layout, Tile tile, std::string_view variant = {}) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::linear,
          .out = "any",
          .act = name(form),
          .weight = "any",
          .layout = layout,
          .variant = variant,
          .tile = tile,
          .summary = form == ActForm::s8x3 ? "exact: integer dot products, activations as 24-bit fixed point"
                     : variant == kWhole
                         ? "W8A8: integer dot products over all of K, exact up to the scales of token and output channel"
                         : "int8 activations: integer dot products, scaled once per segment of K",
          .form = form,
          .sums = form == ActForm::s8x3 ? Sums::fixed_point : Sums::integers,
          .accepts = accepts_dot,
          .cost_us = cost_us<kIsa, kRates, kOnTwoPorts>,
          .run = run<kIsa>};
}

#if defined(__x86_64__)
/// The rates of AMX are per tile of 16 tokens; `octet` is loading a tile.
constexpr DotRates kAmxWholeRates = whole({.dot = 0.38, .wide = 0.38, .octet = 1});

constexpr Kernel amx_segments() {
  Kernel kernel = row<kAmxInt8, kAmxWholeRates>(Isa::amx, ActForm::s8k64, "cpu_n32", {32, 32, 0});
  kernel.cost_us = cost_amx_us;
  return kernel;
}
#endif

constexpr DotRates kBaselineRates{.dot = 8.0, .wide = 8.2, .octet = 2, .segment = 90, .token = 6};
constexpr DotRates kBaselineWholeRates = whole(kBaselineRates);
#if defined(__x86_64__)
constexpr DotRates kAvx512VnniRates{.dot = 1, .wide = 1, .octet = 1.1, .segment = 6, .token = 1.7};
constexpr DotRates kAvx512VnniOnTwoPorts{.dot = 1.24, .wide = 1.24, .octet = 2.65, .segment = 23.5, .token = 1.7};
constexpr DotRates kAvx512VnniFixedOnTwoPorts{.dot = 1.06, .wide = 1.06, .octet = 2.65, .segment = 23.5, .token = 1.7};
constexpr DotRates kAvx512VnniWholeRates = whole(kAvx512VnniRates);
constexpr DotRates kAvx512OnTwoPorts{.dot = 3.2, .wide = 5, .octet = 2.65, .segment = 23.5, .token = 1.7};
constexpr DotRates kAvx512Rates{.dot = 2.1, .wide = 3.2, .octet = 1.1, .segment = 6, .token = 1.7};
constexpr DotRates kAvx512WholeRates = whole({.dot = 2.1, .wide = 2.3, .octet = 1.1});  // widened once for all tokens
constexpr DotRates kAvx512WholeOnTwoPorts = whole({.dot = 5, .wide = 5.5, .octet = 1.5});
constexpr DotRates kAvx2VnniRates{.dot = 1.15, .wide = 1.15, .octet = 3.2, .segment = 9, .token = 2.5};
constexpr DotRates kAvx2VnniWholeRates = whole({.dot = 1.15, .wide = 1.15, .octet = 1.8});
constexpr DotRates kAvx2Rates{.dot = 2.15, .wide = 3.9, .octet = 1.1, .segment = 22, .token = 2.5};
constexpr DotRates kAvx2WholeRates = whole({.dot = 2.15, .wide = 2.5, .octet = 1.1});
#elif defined(__aarch64__)
constexpr DotRates kDotprodRates{.dot = 1, .wide = 1, .octet = 1.1, .segment = 35, .token = 3};
constexpr DotRates kDotprodWholeRates = whole(kDotprodRates);
/// Of matrix products, by the instructions of the loops (bench/aarch64_loops.py) beside those of SDOT: 104 per octet of 12 rows of 4-bit codes,
/// where SDOT has 189, and sums that go through L1 between zips.
constexpr DotRates kI8mmRates{.dot = 0.54, .wide = 0.54, .octet = 2, .segment = 35, .token = 5.3};
constexpr DotRates kI8mmWholeRates = whole(kI8mmRates);
#endif

constexpr std::array kKernels {
#if defined(__x86_64__)
  row<kAvx512VnniFixed, kAvx512VnniRates, kAvx512VnniFixedOnTwoPorts>(Isa::avx512vnni, ActForm::s8x3, "cpu_n32", {3, 32, 0}),
      row<kAvx512Fixed, kAvx512Rates, kAvx512OnTwoPorts>(Isa::avx512, ActForm::s8x3, "cpu_n32", {3, 32, 0}),
      row<kAvx2VnniFixed, kAvx2VnniRates>(Isa::avx2vnni, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<kAvx2Fixed, kAvx2Rates>(Isa::avx2, ActForm::s8x3, "cpu_n16", {1, 16, 0}), amx_segments(),
      row<kAvx512VnniInt8, kAvx512VnniRates, kAvx512VnniOnTwoPorts>(Isa::avx512vnni, ActForm::s8, "cpu_n32", {6, 32, 0}),
      row<kAvx512Int8, kAvx512Rates, kAvx512OnTwoPorts>(Isa::avx512, ActForm::s8, "cpu_n32", {6, 32, 0}),
      row<kAvx2VnniInt8, kAvx2VnniRates>(Isa::avx2vnni, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<kAvx2Int8, kAvx2Rates>(Isa::avx2, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<kAmxWhole, kAmxWholeRates>(Isa::amx, ActForm::s8k64, "cpu_n32", {32, 32, 0}, kWhole),
      row<kAvx512VnniWhole, kAvx512VnniWholeRates>(Isa::avx512vnni, ActForm::s8, "cpu_n32", {12, 32, 0}, kWhole),
      row<kAvx512Whole, kAvx512WholeRates, kAvx512WholeOnTwoPorts>(Isa::avx512, ActForm::s8, "cpu_n32", {12, 32, 0}, kWhole),
      row<kAvx2VnniWhole, kAvx2VnniWholeRates>(Isa::avx2vnni, ActForm::s8, "cpu_n16", {6, 16, 0}, kWhole),
      row<kAvx2Whole, kAvx2WholeRates>(Isa::avx2, ActForm::s8, "cpu_n16", {4, 16, 0}, kWhole),
#elif defined(__aarch64__)
  row<kI8mmFixed, kI8mmRates>(Isa::i8mm, ActForm::s8x3, "cpu_n16", {4, 16, 0}),
      row<kDotprodFixed, kDotprodRates>(Isa::dotprod, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<kI8mmInt8, kI8mmRates>(Isa::i8mm, ActForm::s8, "cpu_n16", {12, 16, 0}),
      row<kDotprodInt8, kDotprodRates>(Isa::dotprod, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<kI8mmWhole, kI8mmWholeRates>(Isa::i8mm, ActForm::s8, "cpu_n16", {12, 16, 0}, kWhole),
      row<kDotprodWhole, kDotprodWholeRates>(Isa::dotprod, ActForm::s8, "cpu_n16", {4, 16, 0}, kWhole),
#endif
      row<kBaselineFixed, kBaselineRates>(Isa::baseline, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<kBaselineInt8, kBaselineRates>(Isa::baseline, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<kBaselineWhole, kBaselineWholeRates>(Isa::baseline, ActForm::s8, "cpu_n16", {4, 16, 0}, kWhole),
};

}  // namespace

std::span<const Kernel> dot_kernels() { return kKernels; }

}  // namespace nibble::cpu
