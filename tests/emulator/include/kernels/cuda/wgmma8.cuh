// In the place of src/kernels/cuda/wgmma8.cuh: both operands in shared memory.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/wgmma.cuh"
#include "nibble/types.hpp"

namespace nibble::cuda {

struct S8 {
  using Sum = std::int32_t;
  static Sum value(std::uint8_t code) { return static_cast<std::int8_t>(code); }
};
inline const std::array kE4m3Values = [] {
  std::array<float, 256> values{};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = code_value(DType::e4m3, static_cast<std::uint8_t>(i));
  return values;
}();
struct E4m3 {
  using Sum = float;
  static Sum value(std::uint8_t code) { return kE4m3Values[code]; }
};

template <class Code, int kN>
struct Wgmma8 {
  using Sum = typename Code::Sum;
  static void begin(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, true); }
  static void renew(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, true); }
  static void add(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, false); }

 private:
  static void issue(Sum (&d)[kN / 2], std::uint64_t a, std::uint64_t b, bool anew) {
    const int lane = emulator::thread() % 32, row = emulator::thread() / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
    emulator::matrix_issue([sums = &d[0], a, b, anew, row, column] {
      constexpr int kChannels = 32;
      Sum rows[2][kChannels];
      for (int half = 0; half < 2; ++half)
        for (int k = 0; k < kChannels; ++k) rows[half][k] = Code::value(operand_byte(a, row + 8 * half, k));
      for (int j = 0; j < kN / 8; ++j)
        for (int i = 0; i < 2; ++i) {
          Sum sum[2] = {};
          for (int k = 0; k < kChannels; ++k) {
            const Sum value = Code::value(operand_byte(b, 8 * j + column + i, k));
            sum[0] += rows[0][k] * value, sum[1] += rows[1][k] * value;
          }
          for (int half = 0; half < 2; ++half) {
            Sum& to = sums[4 * j + 2 * half + i];
            to = (anew ? Sum{} : to) + sum[half];
          }
        }
    });
  }
};

}  // namespace nibble::cuda
