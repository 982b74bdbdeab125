// The last step of a glu whose weight does not lie in pairs of rows (finish.hpp): the factors of D from both halves of the sums, a few at a
// time, through the epilogue.
#include "kernels/finish.hpp"

#include <algorithm>
#include <array>

#include "epilogue/epilogue.hpp"
#include "kernels/cpu/families.hpp"

namespace nibble::cpu {
namespace {

Status run(const Kernel&, const StepArgs& args) {
  constexpr std::int64_t kColumns = 256;  // of D, whose sums stay in L1
  const std::int64_t half = args.d.dim(1), pieces = (half + kColumns - 1) / kColumns;
  args.executor->parallel_for(args.d.dim(0) * pieces, [&](std::int64_t i) {
    const std::int64_t m = i / pieces, begin = i % pieces * kColumns, count = std::min(kColumns, half - begin);
    const auto pair = [&](const auto* sums) {
      std::array<float, 2 * kColumns> pairs;
      for (std::int64_t j = 0; j < count; ++j) {
        pairs[static_cast<std::size_t>(2 * j)] = to_f32(sums[j]);
        pairs[static_cast<std::size_t>(2 * j + 1)] = to_f32(sums[half + j]);
      }
      epilogue::store_row(*args.epilogue, args.operands, pairs.data(), m, 2 * begin, 2 * count, args.d);
    };
    const std::int64_t first = m * 2 * half + begin;
    if (args.a.dtype == DType::f32) pair(static_cast<const float*>(args.a.data) + first);
    if (args.a.dtype == DType::f16) pair(static_cast<const f16*>(args.a.data) + first);
    if (args.a.dtype == DType::bf16) pair(static_cast<const bf16*>(args.a.data) + first);
  });
  return {};
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kNanoseconds = 1.5;  // per sum and thread: an estimate of exp and of what is read and written
  return 1e-3 * kNanoseconds * static_cast<double>(p.m) * static_cast<double>(p.n) / static_cast<double>(p.machine.threads);
}

constexpr std::array kKernels{
    Kernel{.backend = Backend::cpu,
           .isa = Isa::baseline,
           .op = Op::finish,
           .out = "any",
           .act = "any",
           .weight = "none",
           .layout = "",
           .tile = {},
           .summary = "the epilogue of sums in memory: a glu of a weight with scales for blocks of several rows",
           .accepts = accepts_common,
           .cost_us = cost_us,
           .run = run}};

}  // namespace

std::span<const Kernel> finish_kernels() { return kKernels; }

}  // namespace nibble::cpu
