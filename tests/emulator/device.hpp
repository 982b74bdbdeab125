// The words of CUDA C++ that kernels use, as C++: included in front of everything else.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/gpu.hpp"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
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

using std::max;
using std::min;

struct ThreadIndex {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(nibble::emulator::thread()); }
  } x;
};
struct BlockIndex {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(nibble::emulator::block()); }
  } x;
};
struct BlockSize {
  struct X {
    operator unsigned() const { return static_cast<unsigned>(nibble::emulator::threads()); }
  } x;
};
inline constexpr ThreadIndex threadIdx{};
inline constexpr struct {
  BlockIndex::X x;
  unsigned y = 0;
} blockIdx{};
inline constexpr BlockSize blockDim{};

inline void __syncthreads() { nibble::emulator::named_barrier(0, nibble::emulator::threads()); }
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
inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
template <class T>
T __ldcg(const T* from) {
  return *from;
}
