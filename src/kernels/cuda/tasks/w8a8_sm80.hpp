// The sm_80 GEMM of 8-bit codes (sm80/w8a8_kernel.cuh) in plain numbers: the shapes of its CTAs, how long they take, and the memory of those that
// divide K. The launcher chooses shapes by them, the planner rows of the table.
#pragma once

#include "kernels/cuda/tasks/gemm_sm80.hpp"

namespace nibble::cuda {

/// Few tokens; more. Fitted to the sm80_n64k128 of bench/results/h200/survey-int8.json, with records of 128 channels. Memory bounds several CTAs of
/// 32 × 16 on an SM; what they take themselves is an estimate.
inline constexpr GemmSm80Shape kW8A8Sm80Few{32, 16, 0.21, 0.1};
inline constexpr GemmSm80Shape kW8A8Sm80Some{64, 64, 0.47, 0.38}, kW8A8Sm80Many{128, 128, 1.03, 1.03};

/// Predicted microseconds of a launch's CTAs, of which `ranks` divide K of a tile.
constexpr double w8a8_sm80_us(const GemmSm80Shape& shape, std::int64_t m, std::int64_t n, int records, int ranks, int sms) {
  const int of_rank = records_of(ranks - 1, ranks, records).count;
  return gemm_sm80_us(shape, gemm_sm80_tiles(shape, m, n) * ranks, of_rank, ranks, sms);
}
/// The shape of integers and floats whose scales come at the end.
constexpr GemmSm80Shape w8a8_sm80_shape(std::int64_t m, std::int64_t n, int records, int ranks, int sms) {
  if (m <= kW8A8Sm80Few.tokens) return kW8A8Sm80Few;
  const auto us = [&](const GemmSm80Shape& shape) { return w8a8_sm80_us(shape, m, n, records, ranks, sms); };
  return us(kW8A8Sm80Some) <= us(kW8A8Sm80Many) ? kW8A8Sm80Some : kW8A8Sm80Many;
}

/// The CTAs that divide K of integers: `split`, or as many as there are records; one where sums would not stay in L2, which are the same.
constexpr int w8a8_sm80_ranks(int split, std::int64_t m, std::int64_t n, int records) {
  const int ranks = std::min(split, records);
  return m <= split_k_tokens(n, ranks) ? ranks : 1;
}
/// The memory in which their sums meet, whatever the shape.
constexpr std::size_t w8a8_sm80_bytes(int split, std::int64_t m, std::int64_t n, int records) {
  const int ranks = std::min(split, records);
  const std::int64_t tokens = std::min<std::int64_t>(m, split_k_tokens(n, ranks));
  const auto bytes = [&](const GemmSm80Shape& s) {
    return split_k_bytes(ranks, gemm_sm80_tiles(s, tokens, n), s.rows, s.tokens);
  };
  if (tokens <= kW8A8Sm80Few.tokens) return bytes(kW8A8Sm80Few);
  return std::max(bytes(kW8A8Sm80Some), bytes(kW8A8Sm80Many));
}

}  // namespace nibble::cuda
