// The rows of the dot-product family: exact (24-bit fixed-point activations) and dynamic (int8), per instruction set.
#include <array>

#include "core/error.hpp"
#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/dot_tile.hpp"
#include "kernels/cpu/prepare.hpp"

namespace nibble::cpu {
namespace {

/// Row blocks of one task fit in half of a core's L2 together, so that they stay there while the tokens go by.
constexpr std::int64_t kTaskBytes = 512 << 10;
/// Tokens of one task: enough to make up for reading the row blocks from memory.
constexpr std::int64_t kTaskTokens = 192;

template <const DotIsa& kIsa>
void run(const Kernel& self, const StepArgs& args) {
  const Decoder decoder(*args.weight, kIsa.rows);
  const tile::Geometry& geo = decoder.geometry;
  const ActForm form = ActForm::make(args.quantize, geo.group, geo.k);
  const DotTask task{.decoder = &decoder,
                     .weight = args.weight->bytes.data(),
                     .activations = args.prepared,
                     .segments = {geo.k, geo.group, form.piece},
                     .token_bytes = prepared_token_bytes(self.act, args.quantize, geo.group, geo.k),
                     .m = args.a.dim(0),
                     .epilogue = args.epilogue,
                     .operands = &args.operands,
                     .d = &args.d};
  // Tasks are whole row blocks; at least four per thread, so that one that is interrupted does not hold up the others.
  const std::int64_t fair = (geo.row_blocks() + 4 * args.executor->threads() - 1) / (4 * args.executor->threads());
  const std::int64_t step = std::clamp<std::int64_t>(kTaskBytes / geo.row_block_bytes, 1, fair);
  const std::int64_t ranges = (geo.row_blocks() + step - 1) / step;
  const std::int64_t tokens = kTaskTokens / kIsa.tile * kIsa.tile;
  const std::int64_t token_blocks = (task.m + tokens - 1) / tokens;
  args.executor->parallel_for(ranges * token_blocks, [&](std::int64_t i) {
    const std::int64_t block = i % ranges * step, m = i / ranges * tokens;
    kIsa.linear(task, block, std::min(block + step, geo.row_blocks()), m, std::min(m + tokens, task.m));
  });
}

Status accepts_dot(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (info(p.scheme.codes).kind == DTypeKind::floating)
    return error(StatusCode::unsupported, "multiplies integer codes, the weight has {} codes", name(p.scheme.codes));
  const bool dynamic = p.quantize.codes != DType::none;
  if (self.act == "s8x3" && dynamic)
    return error(StatusCode::unsupported, "keeps activations exact, they are to be quantized to {}", name(p.quantize.codes));
  if (self.act == "s8" && !dynamic)
    return error(StatusCode::unsupported, "quantizes activations to int8, they are to stay exact");
  return {};
}

template <const DotIsa& kIsa>
double cost_us(const Kernel& self, const Problem& p) {
  const double digits = self.act == "s8x3" ? 3 : 1;
  return 1e-6 * digits * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) / 32.0 / p.threads;
}

template <const DotIsa& kIsa>
constexpr Kernel row(std::string_view name, Isa isa, std::string_view form, int tile_m) {
  return {.name = name,
          .backend = Backend::cpu,
          .isa = isa,
          .op = Op::linear,
          .out = "any",
          .act = form,
          .weight = "any",
          .layout = "",
          .tile = {tile_m, 0, 0},
          .summary = form == "s8x3" ? "exact: integer dot products of 24-bit fixed-point activations"
                                    : "dynamic: integer dot products of int8 activations",
          .accepts = accepts_dot,
          .cost_us = cost_us<kIsa>,
          .run = run<kIsa>};
}

constexpr Kernel on(Kernel kernel, std::string_view layout, int rows) {
  kernel.layout = layout;
  kernel.tile.n = rows;
  return kernel;
}

constexpr std::array kKernels {
#if defined(__x86_64__)
  on(row<kAvx512VnniFixed>("linear_any_s8x3_any__cpu_avx512vnni_m3n32", Isa::avx512vnni, "s8x3", 3), "cpu_n32", 32),
      on(row<kAvx512Fixed>("linear_any_s8x3_any__cpu_avx512_m3n32", Isa::avx512, "s8x3", 3), "cpu_n32", 32),
      on(row<kAvx2VnniFixed>("linear_any_s8x3_any__cpu_avx2vnni_m1n16", Isa::avx2vnni, "s8x3", 1), "cpu_n16", 16),
      on(row<kAvx2Fixed>("linear_any_s8x3_any__cpu_avx2_m1n16", Isa::avx2, "s8x3", 1), "cpu_n16", 16),
      on(row<kAvx512VnniInt8>("linear_any_s8_any__cpu_avx512vnni_m6n32", Isa::avx512vnni, "s8", 6), "cpu_n32", 32),
      on(row<kAvx512Int8>("linear_any_s8_any__cpu_avx512_m6n32", Isa::avx512, "s8", 6), "cpu_n32", 32),
      on(row<kAvx2VnniInt8>("linear_any_s8_any__cpu_avx2vnni_m4n16", Isa::avx2vnni, "s8", 4), "cpu_n16", 16),
      on(row<kAvx2Int8>("linear_any_s8_any__cpu_avx2_m4n16", Isa::avx2, "s8", 4), "cpu_n16", 16),
#elif defined(__aarch64__)
  on(row<kI8mmFixed>("linear_any_s8x3_any__cpu_i8mm_m1n16", Isa::i8mm, "s8x3", 1), "cpu_n16", 16),
      on(row<kDotprodFixed>("linear_any_s8x3_any__cpu_dotprod_m1n16", Isa::dotprod, "s8x3", 1), "cpu_n16", 16),
      on(row<kI8mmInt8>("linear_any_s8_any__cpu_i8mm_m4n16", Isa::i8mm, "s8", 4), "cpu_n16", 16),
      on(row<kDotprodInt8>("linear_any_s8_any__cpu_dotprod_m4n16", Isa::dotprod, "s8", 4), "cpu_n16", 16),
#endif
      on(row<kBaselineFixed>("linear_any_s8x3_any__cpu_baseline_m1n16", Isa::baseline, "s8x3", 1), "cpu_n16", 16),
      on(row<kBaselineInt8>("linear_any_s8_any__cpu_baseline_m4n16", Isa::baseline, "s8", 4), "cpu_n16", 16),
};

}  // namespace

std::span<const Kernel> dot_kernels() { return kKernels; }

}  // namespace nibble::cpu
