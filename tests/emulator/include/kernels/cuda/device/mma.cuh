// Replaces src/kernels/cuda/device/mma.cuh: matrix instructions of a warp, done at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "emulator/gpu.hpp"
#include "kernels/cuda/device/mma_parts.cuh"
#include "nibble/types.hpp"

namespace nibble::cuda {

/// Rows g and g + 8 of an operand in registers, 32 bytes each: a lane 4g + t has bytes 4t … 4t + 3 and 16 more on, of both rows.
inline std::array<std::array<std::uint8_t, 32>, 2> operand_rows(const std::uint32_t (&a)[4]) {
  std::array<std::array<std::uint8_t, 32>, 2> rows;
  const auto first = static_cast<std::size_t>(emulator::thread() % 32 / 4 * 4);
  for (std::size_t half = 0; half < 2; ++half) {  // of K
    const auto lanes = emulator::all_lanes(std::uint64_t{a[2 * half + 1]} << 32 | a[2 * half]);
    for (std::size_t t = 0; t < 4; ++t)
      for (std::size_t i = 0; i < 8; ++i)
        rows[i / 4][16 * half + 4 * t + i % 4] = static_cast<std::uint8_t>(lanes[first + t] >> 8 * i);
  }
  return rows;
}

template <class Act>
float value_of(std::uint16_t bits) {
  if constexpr (std::is_same_v<Act, __half>)
    return to_f32(f16{bits});
  else
    return to_f32(bf16{bits});
}

/// Columns 2t and 2t + 1 of the other operand, in registers as its rows would be: a lane 4c + t has bytes 4t … 4t + 3 of column c, and 16 more on.
inline std::array<std::array<std::uint8_t, 32>, 2> operand_columns(std::uint32_t b0, std::uint32_t b1) {
  const auto lanes = emulator::all_lanes(std::uint64_t{b1} << 32 | b0);
  const auto first = static_cast<std::size_t>(emulator::thread() % 4 * 2);
  std::array<std::array<std::uint8_t, 32>, 2> columns;
  for (std::size_t c = 0; c < 2; ++c)
    for (std::size_t t = 0; t < 4; ++t)
      for (std::size_t i = 0; i < 8; ++i)
        columns[c][16 * (i / 4) + 4 * t + i % 4] = static_cast<std::uint8_t>(lanes[4 * (first + c) + t] >> 8 * i);
  return columns;
}

template <class Act>
constexpr bool kHasProducts = true;

/// Sums as f32 in the order of K, which hardware does not guarantee.
template <class Act>
void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if (std::is_same_v<Act, __half> && emulator::is_turing()) return mma_f16_of_parts(d, a, b0, b1);
  const auto rows = operand_rows(a), columns = operand_columns(b0, b1);
  const auto number = [](const std::array<std::uint8_t, 32>& bytes, std::size_t k) {
    return value_of<Act>(static_cast<std::uint16_t>(bytes[2 * k + 1] << 8 | bytes[2 * k]));
  };
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t k = 0; k < 16; ++k) d[i] = std::fma(number(rows[i / 2], k), number(columns[i % 2], k), d[i]);
}
inline void mma_s8(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if (emulator::is_turing()) return mma_s8_of_parts(d, a, b0, b1);
  const auto rows = operand_rows(a), columns = operand_columns(b0, b1);
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t k = 0; k < 32; ++k)
      d[i] += static_cast<std::int8_t>(rows[i / 2][k]) * static_cast<std::int8_t>(columns[i % 2][k]);
}

inline void mma_s8_half(std::int32_t (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
  if (emulator::is_turing()) return mma_s8_half_of_parts(d, a0, a1, b);
  mma_s8(d, {a0, a1, 0, 0}, b, 0);
}

/// Two ones.
template <class Act>
constexpr std::uint32_t kOnes = std::is_same_v<Act, __half> ? 0x3c003c00u : 0x3f803f80u;

}  // namespace nibble::cuda
