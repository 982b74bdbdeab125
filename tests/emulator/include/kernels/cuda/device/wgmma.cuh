// Replaces src/kernels/cuda/device/wgmma.cuh: the operands of matrix instructions, and when they are executed.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "emulator/gpu.hpp"
#include "kernels/cuda/device/mma.cuh"

namespace nibble::cuda {

inline void wgmma_fence() { emulator::matrix_fence(); }
inline void wgmma_commit() { emulator::commit(emulator::Engine::matrix); }
template <int kPending>
void wgmma_wait() {
  emulator::wait(emulator::Engine::matrix, kPending);
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

constexpr std::uint32_t kWgmmaPlanarBytes = 64 * 128, kWgmmaPlanarStep = 16 * 128;
inline std::uint32_t wgmma_planar_low(std::uint32_t address) { return address >> 4 | kWgmmaPlanarBytes / 16 << 16; }

/// 32 bytes of row r of an operand.
inline std::array<std::uint8_t, 32> operand_row(std::uint64_t operand, int r) {
  const std::uint32_t address = (static_cast<std::uint32_t>(operand) & 0x3fff) << 4;
  const bool wide = (operand >> 62 & 1) != 0;  // rows of 128 bytes
  std::array<std::uint8_t, 32> row;
  for (std::uint32_t chunk = 0; chunk < 32; chunk += 16) {
    const std::uint32_t at = address + static_cast<std::uint32_t>(r * (wide ? 128 : 64)) + chunk;
    std::memcpy(row.data() + chunk, emulator::shared_at(wide ? emulator::swizzled128(at) : emulator::swizzled64(at)), 16);
  }
  return row;
}
/// The same 16 elements of a planar operand: column r of 16 rows.
inline std::array<std::uint8_t, 32> operand_column(std::uint64_t operand, int r) {
  const std::uint32_t address = (static_cast<std::uint32_t>(operand) & 0x3fff) << 4;
  const std::uint32_t next_columns = (static_cast<std::uint32_t>(operand) >> 16 & 0x3fff) << 4,
                      next_rows = (static_cast<std::uint32_t>(operand >> 32) & 0x3fff) << 4;
  std::array<std::uint8_t, 32> column;
  for (std::uint32_t k = 0; k < 16; ++k) {
    const auto n = static_cast<std::uint32_t>(r);
    const std::uint32_t at = address + n / 64 * next_columns + k / 8 * next_rows + k % 8 * 128 + n % 64 * 2;
    std::memcpy(column.data() + 2 * k, emulator::shared_at(emulator::swizzled128(at)), 2);
  }
  return column;
}
/// 16-bit floats as numbers.
template <class Act>
std::array<float, 16> numbers(const std::array<std::uint8_t, 32>& bytes) {
  std::array<float, 16> values;
  for (std::size_t k = 0; k < 16; ++k)
    values[k] = value_of<Act>(static_cast<std::uint16_t>(bytes[2 * k + 1] << 8 | bytes[2 * k]));
  return values;
}

/// The first operand, 16 numbers of rows g and g + 8, in registers; sums as f32 in the order of K, which hardware does not guarantee.
template <int kN>
struct Wgmma {
  template <class Act, int kPlanar = 0>
  static void begin(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b) {
    issue<Act, kPlanar>(d, a, b, true);
  }
  template <class Act, int kPlanar = 0>
  static void add(float (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b) {
    issue<Act, kPlanar>(d, a, b, false);
  }

 private:
  template <class Act, int kPlanar>
  static void issue(float* d, const std::uint32_t (&a)[4], std::uint64_t b, bool anew) {
    const auto bytes = operand_rows(a);
    const std::array<std::array<float, 16>, 2> rows{numbers<Act>(bytes[0]), numbers<Act>(bytes[1])};
    const int lane = emulator::thread() % 32;
    emulator::issue(emulator::Engine::matrix, [=] {
      for (int j = 0; j < kN / 8; ++j)
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * j + lane % 4 * 2 + i;
          const std::array<float, 16> values = numbers<Act>(kPlanar == 0 ? operand_row(b, column) : operand_column(b, column));
          float sum[2] = {};
          for (std::size_t k = 0; k < 16; ++k)
            sum[0] = std::fma(rows[0][k], values[k], sum[0]), sum[1] = std::fma(rows[1][k], values[k], sum[1]);
          for (int half = 0; half < 2; ++half) {
            float& to = d[4 * j + 2 * half + i];
            to = (anew ? 0.0f : to) + sum[half];
          }
        }
    });
  }
};

}  // namespace nibble::cuda
