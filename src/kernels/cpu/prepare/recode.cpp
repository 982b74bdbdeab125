// u8 codes of activations as s8: the CPU's row, and its loop.
#include <algorithm>
#include <array>
#include <limits>

#include "core/error.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/recode.hpp"

namespace nibble::cpu {
namespace {

Status run(const Kernel&, const StepArgs& args) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 16;                           // codes that a thread takes at a time
  constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min() + 128;  // what is below counts as this
  const RecodeTask t = recode_task(args);
  const std::int64_t pieces = (t.length + kPiece - 1) / kPiece;
  args.executor->parallel_for(t.images * t.rows * pieces, [&](std::int64_t i) {
    const std::int64_t run = i / pieces, begin = i % pieces * kPiece, end = std::min(t.length, begin + kPiece);
    const std::int64_t image = run / t.rows, row = run % t.rows;
    const std::uint8_t* const from = t.from + image * t.from_image + row * t.from_row;
    std::int8_t* const to = t.to + image * t.to_image + row * t.to_row;
    for (std::int64_t k = begin; k < end; ++k) to[k] = static_cast<std::int8_t>(from[k] ^ 0x80);
  });
  for (std::int64_t m = 0; m < t.tokens; ++m)
    for (std::int64_t g = 0; g < t.groups; ++g)
      t.to_zeros[m * t.groups + g] = std::max(t.zeros[m * t.zero_token + g * t.zero_group], kLeast) - 128;
  return {};
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  return accepts_form(self, p);
}

double cost_us(const Kernel&, const Problem& p) {
  constexpr double kNanoseconds = 0.05;  // per code and thread: an estimate of what is read and written at the speed of memory
  return 1e-3 * kNanoseconds * static_cast<double>(p.m) * static_cast<double>(p.k) / static_cast<double>(p.machine.threads);
}

constexpr std::array kKernels{Kernel{.backend = Backend::cpu,
                                     .isa = Isa::baseline,
                                     .op = Op::prepare,
                                     .out = name(ActForm::recoded),
                                     .act = "u8",
                                     .weight = "none",
                                     .layout = "",
                                     .tile = {},
                                     .summary = "u8 codes as s8 codes, 128 less, and their zero points",
                                     .form = ActForm::recoded,
                                     .accepts = accepts,
                                     .cost_us = cost_us,
                                     .workspace = recoded_bytes,
                                     .run = run}};

}  // namespace

std::span<const Kernel> recode_kernels() { return kKernels; }

}  // namespace nibble::cpu
