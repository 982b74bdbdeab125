// The rows of the bf16 family.
#include <array>

#include "core/error.hpp"
#include "kernels/cpu/bf16_tile.hpp"
#include "kernels/cpu/cost.hpp"
#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/prepare.hpp"

namespace nibble::cpu {
#if defined(__x86_64__)
namespace {

template <const Bf16Isa& kIsa>
Status run(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const DotTask task(self, args, decoder);
  const std::int64_t blocks = geo.row_blocks();
  const std::int64_t token_blocks = (task.m + kIsa.tokens - 1) / kIsa.tokens;
  args.executor->parallel_for(blocks * token_blocks,
                              [&](std::int64_t i) { kIsa.linear(task, i % blocks, i / blocks * kIsa.tokens); });
  return {};
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  const int width = bits(p.scheme.codes);
  if (p.act != DType::bf16) return error(StatusCode::unsupported, "multiplies bf16 activations, they are {}", name(p.act));
  if (p.quantize.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies bf16, the activations are to be quantized to {}", name(p.quantize.codes));
  if (p.prescales_k) return error(StatusCode::unsupported, "activations times a prescale are not bf16");
  if (info(p.scheme.codes).kind == DTypeKind::floating || (width != 4 && width != 8))
    return error(StatusCode::unsupported, "decodes integers of 4 and 8 bits, the weight has {} codes", name(p.scheme.codes));
  if (p.scheme.zero == ZeroKind::offset || p.scheme.zero == ZeroKind::real)
    return error(StatusCode::unsupported, "needs code − zero to be an integer, the weight has float {}",
                 p.scheme.zero == ZeroKind::real ? "zero points" : "offsets");
  return {};
}

/// Slots (cost.hpp), fitted to measurements.
constexpr double kDot = 1.09;    // per token and vector of dot products
constexpr double kDecode = 5.4;  // per vector of the panel; twice that for 8-bit codes
constexpr double kFlush = 7.7;   // per token, vector and segment

double cost_us(const Kernel&, const Problem& p) {
  constexpr const Bf16Isa& isa = kAvx512Bf16;
  const std::int64_t blocks = (p.n + isa.rows - 1) / isa.rows, vectors_per_block = isa.rows / isa.lanes;
  const double vectors = static_cast<double>(blocks * vectors_per_block);
  const double pairs = 4.0 * static_cast<double>(tile::Geometry::octets(p.k));
  const ActForm form = ActForm::make(p.quantize, p.scheme, p.k);
  const double segments = std::ceil(static_cast<double>(p.k) / static_cast<double>(form.piece));
  const std::int64_t token_blocks = (p.m + isa.tokens - 1) / isa.tokens;
  const double tokens = static_cast<double>(p.m + p.m % 2);
  const double slots =
      vectors * (pairs * (kDot * tokens + (bits(p.scheme.codes) == 4 ? 1 : 2) * kDecode * static_cast<double>(token_blocks)) +
                 segments * tokens * kFlush);
  const std::int64_t tasks = blocks * token_blocks;
  const double compute = 1e-3 * slots * slot_ns(p.machine, isa.lanes) / p.machine.threads;
  return kLoopUs + overlapped(compute * imbalance(tasks, p.machine.threads), read_us(p, isa.rows));
}

constexpr std::array kKernels{
    Kernel{.name = "linear_any_bf16_any__cpu_avx512bf16_m8n32",
           .backend = Backend::cpu,
           .isa = Isa::avx512bf16,
           .op = Op::linear,
           .out = "any",
           .act = "bf16",
           .weight = "any",
           .layout = "cpu_n32",
           .tile = {8, 32, 0},
           .summary = "exact: bf16 dot products of bf16 activations, a panel decoded for many tokens",
           .accepts = accepts,
           .cost_us = cost_us,
           .run = run<kAvx512Bf16>},
};

}  // namespace

std::span<const Kernel> bf16_kernels() { return kKernels; }
#else
std::span<const Kernel> bf16_kernels() { return {}; }
#endif

}  // namespace nibble::cpu
