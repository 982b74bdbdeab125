// Replaces src/kernels/cuda/device/wgmma8.cuh.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "kernels/cuda/device/wgmma.cuh"
#include "nibble/types.hpp"

namespace nibble::cuda {

struct S8 {
  using Sum = std::int32_t;
  static Sum value(std::uint8_t code) { return static_cast<std::int8_t>(code); }
  static Sum add(const std::array<Sum, 33>& addends) { return std::accumulate(addends.begin(), addends.end(), 0); }
};
inline const std::array kE4m3Values = [] {
  std::array<float, 256> values{};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = code_value(DType::e4m3, static_cast<std::uint8_t>(i));
  return values;
}();
struct E4m3 {
  using Sum = float;
  static Sum value(std::uint8_t code) { return kE4m3Values[code]; }
  /// Aligned to the largest, whose 13 bits below the first are kept of all; the rest is dropped.
  static Sum add(const std::array<Sum, 33>& addends) {
    Sum largest = 0, plain = 0;
    for (const Sum x : addends) largest = std::max(largest, std::abs(x)), plain += x;
    if (largest == 0 || !std::isfinite(plain)) return plain;
    const int unit = std::ilogb(largest) - 13;
    const Sum up = power_of_two(-unit);
    std::int64_t sum = 0;
    for (const Sum x : addends) sum += static_cast<std::int64_t>(x * up);
    return static_cast<Sum>(sum) * power_of_two(unit);
  }

 private:
  static Sum power_of_two(int i) { return std::bit_cast<float>((i + 127) << 23); }  // of sums of products: never subnormal
};

/// d[64,N] += a[64,32] · b[N,32]: what a thread has of it, rows g and g + 8 of its warp's 16.
template <class Code, int kN>
void add_products(typename Code::Sum* d, const std::array<std::array<std::uint8_t, 32>, 2>& a, std::uint64_t b, int lane,
                  bool anew) {
  using Sum = typename Code::Sum;
  for (int j = 0; j < kN / 8; ++j)
    for (int i = 0; i < 2; ++i) {
      const auto column = operand_row(b, 8 * j + lane % 4 * 2 + i);
      std::array<Sum, 33> addends[2];
      for (std::size_t k = 0; k < 32; ++k) {
        const Sum value = Code::value(column[k]);
        addends[0][k] = Code::value(a[0][k]) * value, addends[1][k] = Code::value(a[1][k]) * value;
      }
      for (int half = 0; half < 2; ++half) {
        Sum& to = d[4 * j + 2 * half + i];
        addends[half].back() = anew ? Sum{} : to;
        to = Code::add(addends[half]);
      }
    }
}

/// Both operands in shared memory, which is read when the instruction is waited for.
template <class Code, int kN>
struct Wgmma8 {
  using Sum = typename Code::Sum;
  static void begin(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, true); }
  static void renew(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { begin(d, a, b); }
  static void add(Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, false); }
  static void add_if(int keep, Sum (&d)[kN / 2], std::uint32_t a, std::uint64_t b) { issue(d, wgmma_operand(a), b, keep == 0); }

 private:
  static void issue(Sum* d, std::uint64_t a, std::uint64_t b, bool anew) {
    const int lane = emulator::thread() % 32, row = emulator::thread() / 32 % 4 * 16 + lane / 4;
    emulator::issue(emulator::Engine::matrix, [=] {
      const std::array<std::array<std::uint8_t, 32>, 2> rows{operand_row(a, row), operand_row(a, row + 8)};
      add_products<Code, kN>(d, rows, b, lane, anew);
    });
  }
};

/// The first operand in registers.
template <int kN>
struct WgmmaS8 {
  static void begin(std::int32_t (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b) { issue(d, a, b, true); }
  static void add(std::int32_t (&d)[kN / 2], const std::uint32_t (&a)[4], std::uint64_t b) { issue(d, a, b, false); }

 private:
  static void issue(std::int32_t* d, const std::uint32_t (&a)[4], std::uint64_t b, bool anew) {
    const auto rows = operand_rows(a);
    const int lane = emulator::thread() % 32;
    emulator::issue(emulator::Engine::matrix, [=] { add_products<S8, kN>(d, rows, b, lane, anew); });
  }
};

}  // namespace nibble::cuda
