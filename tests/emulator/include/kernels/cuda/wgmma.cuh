// In the place of src/kernels/cuda/wgmma.cuh: how matrix instructions find their operands, and when they are done.
#pragma once

#include <array>
#include <cstdint>

#include "emulator/gpu.hpp"

namespace nibble::cuda {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::matrix_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::matrix_wait(kPending);
}
template <class Sum, int kCount>
void wgmma_wait_for(Sum (&)[kCount]) {
  wgmma_wait<0>();
}

constexpr std::uint32_t kWgmmaRows128 = 1u << 30 | 1024 / 16, kWgmmaRows64 = 1u << 31 | 512 / 16;
inline std::uint32_t wgmma_operand_low(std::uint32_t address) { return address >> 4 | 1u << 16; }
inline std::uint64_t wgmma_operand(std::uint32_t low, std::uint32_t high = kWgmmaRows128) {
  return std::uint64_t{high} << 32 | low;
}

/// Byte b of row r of an operand.
inline std::uint8_t operand_byte(std::uint64_t operand, int r, int b) {
  const std::uint32_t address = (static_cast<std::uint32_t>(operand) & 0x3fff) << 4;
  const bool wide = (operand >> 62 & 1) != 0;  // rows of 128 bytes
  const std::uint32_t at = address + static_cast<std::uint32_t>(r * (wide ? 128 : 64) + b);
  return *emulator::shared_at(wide ? emulator::swizzled128(at) : emulator::swizzled64(at));
}

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

/// Of 16-bit floats: not emulated, and so not defined.
template <int kN>
struct Wgmma;

}  // namespace nibble::cuda
