// The CUDA C++ that kernels use, as C++: included before everything else.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "emulator/gpu.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__  // of what is declared extern; of other arrays a test says static, for all threads of a CTA are one thread's fibers
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n)

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  std::int32_t x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(std::uint32_t x, std::uint32_t y) { return {x, y}; }
inline uint4 make_uint4(std::uint32_t x, std::uint32_t y, std::uint32_t z, std::uint32_t w) { return {x, y, z, w}; }

using std::max;
using std::min;

/// Read where it stands, as on a GPU: each thread has its own.
template <unsigned (*kRead)()>
struct Special {
  operator unsigned() const { return kRead(); }
};
namespace nibble::emulator {
inline unsigned thread_x() { return static_cast<unsigned>(thread() % cta().x); }
inline unsigned thread_y() { return static_cast<unsigned>(thread() / cta().x); }
inline unsigned block_x() { return static_cast<unsigned>(block() % grid().x); }
inline unsigned block_y() { return static_cast<unsigned>(block() / grid().x); }
inline unsigned grid_y() { return static_cast<unsigned>(grid().y); }
inline unsigned grid_x() { return static_cast<unsigned>(grid().x); }
inline unsigned cta_x() { return static_cast<unsigned>(cta().x); }
inline unsigned cta_y() { return static_cast<unsigned>(cta().y); }
}  // namespace nibble::emulator
inline constexpr struct {
  Special<nibble::emulator::thread_x> x;
  Special<nibble::emulator::thread_y> y;
} threadIdx{};
inline constexpr struct {
  Special<nibble::emulator::block_x> x;
  Special<nibble::emulator::block_y> y;
} blockIdx{};
inline constexpr struct {
  Special<nibble::emulator::cta_x> x;
  Special<nibble::emulator::cta_y> y;
} blockDim{};

inline constexpr struct {
  Special<nibble::emulator::grid_x> x;
  Special<nibble::emulator::grid_y> y;
} gridDim{};

inline void __syncthreads() { nibble::emulator::named_barrier(0, nibble::emulator::cta().count()); }
inline void __syncwarp() { nibble::emulator::all_lanes(0); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = nibble::emulator::all_lanes(bits)[static_cast<std::size_t>(from)];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, nibble::emulator::thread() % 32 ^ lanes);
}

inline unsigned __match_any_sync(unsigned, int value) {
  const auto lanes = nibble::emulator::all_lanes(static_cast<std::uint32_t>(value));
  unsigned same = 0;
  for (std::size_t i = 0; i < 32; ++i) same |= unsigned{lanes[i] == static_cast<std::uint32_t>(value)} << i;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto lanes = nibble::emulator::all_lanes(value);
  unsigned those = 0;
  for (std::size_t i = 0; i < 32; ++i) those |= unsigned{lanes[i] != 0} << i;
  return those;
}
inline unsigned atomicAdd(unsigned* at, unsigned more) { return std::exchange(*at, *at + more); }
inline void __threadfence() {}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

inline std::uint32_t __reduce_max_sync(unsigned, std::uint32_t value) {
  const auto lanes = nibble::emulator::all_lanes(value);
  return static_cast<std::uint32_t>(*std::max_element(lanes.begin(), lanes.end()));
}

/// Four bytes of the eight of a (0 … 3) and b (4 … 7), a nibble of `which` each.
inline std::uint32_t __byte_perm(std::uint32_t a, std::uint32_t b, std::uint32_t which) {
  const std::uint64_t both = std::uint64_t{b} << 32 | a;
  std::uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<std::uint32_t>(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
inline std::int32_t __dp4a(std::int32_t a, std::int32_t b, std::int32_t c) {
  for (int i = 0; i < 4; ++i) c += static_cast<std::int8_t>(a >> 8 * i) * static_cast<std::int8_t>(b >> 8 * i);
  return c;
}
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float2int_rn(float x) {  // saturates; a NaN becomes 0
  return x != x ? 0 : x >= 0x1p31f ? 2147483647 : x <= -0x1p31f ? -2147483647 - 1 : static_cast<int>(std::nearbyint(x));
}
/// The larger ones of two signed, or unsigned, halves.
inline std::uint32_t __vmaxs2(std::uint32_t a, std::uint32_t b) {
  const auto half = [](std::uint32_t x, int i) { return static_cast<std::int16_t>(x >> 16 * i); };
  const auto larger = [&](int i) {
    return static_cast<std::uint32_t>(static_cast<std::uint16_t>(std::max(half(a, i), half(b, i))));
  };
  return larger(1) << 16 | larger(0);
}
inline std::uint32_t __vmaxu2(std::uint32_t a, std::uint32_t b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, const T& value) {
  *to = value;
}
