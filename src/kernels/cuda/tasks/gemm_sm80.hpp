// The sm_80 GEMM of 16-bit activations (sm80/gemm_kernel.cuh) in plain numbers: the shapes of its CTAs, how long they take, and the launches
// whose CTAs divide K. The launcher chooses shapes by them, the planner rows of the table.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tasks/split_k.hpp"

namespace nibble::cuda {

/// Output channels × tokens of a CTA, and microseconds of a record of 64 of these channels each: of a CTA that is the only one of its SM, and
/// of each of several.
struct GemmSm80Shape {
  int rows, tokens;
  double alone_us, shared_us;
};
/// Fitted to the sm80_gemm of bench/results/h200/survey-wna16.json, whose time at N = 4096 grows by so much a record from K = 4096 to 14336; that
/// of several CTAs of 64 × 32, of which two share an SM, to N = 28672. Of 64 × 64 it was not measured.
inline constexpr GemmSm80Shape kGemmSm80Shapes[] = {
    {256, 64, 1.6, 1.6}, {128, 64, 0.93, 0.93}, {64, 64, 0.67, 0.6}, {64, 32, 0.45, 0.35}};
/// The same fit: a launch, and the start and the end of a tile for each of its outputs.
constexpr double kGemmSm80LaunchUs = 2.0, kGemmSm80OutputUs = 2.75e-4;

/// Predicted microseconds of so many CTAs of a shape with so many records each, where `ranks` of them divide K of a tile, after the launch.
constexpr double gemm_sm80_us(const GemmSm80Shape& shape, std::int64_t ctas, int records, int ranks, int sms) {
  const std::int64_t rounds = (ctas + sms - 1) / sms;
  const double cta_us =
      kGemmSm80OutputUs * shape.rows * shape.tokens + records * (rounds == 1 ? shape.alone_us : shape.shared_us);
  return static_cast<double>(rounds) * cta_us + add_ranks_us(ranks, rounds, shape.rows, shape.tokens);
}

/// The tiles of a launch.
constexpr std::int64_t gemm_sm80_tiles(const GemmSm80Shape& shape, std::int64_t m, std::int64_t n) {
  return (n + shape.rows - 1) / shape.rows * ((m + shape.tokens - 1) / shape.tokens);
}

/// Bytes of a stage: activations of 128 channels, then a record for each 64 rows; rounded up to a multiple of the swizzle's period.
constexpr int gemm_sm80_stage_bytes(int tokens, int tiles, int record_bytes) {
  return (tokens * 256 + tiles * record_bytes + 127) / 128 * 128;
}
/// The shared memory that a CTA needs at least, which is two stages: of the smallest shape, or of the one for tiles of `expert_rows` rows of
/// experts, unless that is 0.
constexpr int gemm_sm80_least_shared(int expert_rows, int record_bytes) {
  constexpr GemmSm80Shape kMany = kGemmSm80Shapes[1], kLeast = kGemmSm80Shapes[3];
  const int tiles = (expert_rows == kMany.tokens ? kMany : kLeast).rows / 64;
  return 2 * gemm_sm80_stage_bytes(expert_rows == 0 ? kLeast.tokens : expert_rows, tiles, record_bytes);
}

/// The memory in which their sums meet, whatever the shape.
constexpr std::size_t gemm_sm80_bytes(std::int64_t m, std::int64_t n, int ranks) {
  const std::int64_t tokens = std::min<std::int64_t>(m, split_k_tokens(n, ranks));
  std::size_t most = 0;
  for (const GemmSm80Shape& s : kGemmSm80Shapes)
    most = std::max(most, split_k_bytes(ranks, gemm_sm80_tiles(s, tokens, n), s.rows, s.tokens));
  return most;
}

}  // namespace nibble::cuda
