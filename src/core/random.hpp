// Counter-based random numbers: value i of a seed is a pure function, so filling in parallel is deterministic everywhere.
#pragma once

#include <cmath>
#include <cstdint>

namespace nibble {

/// The finaliser of splitmix64 over (seed, counter): 64 well-mixed bits.
constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t x = seed * 0xd1342543de82ef95u + (counter + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// In (0, 1).
constexpr double random_uniform(std::uint64_t seed, std::uint64_t counter) {
  return (static_cast<double>(random_bits(seed, counter) >> 11) + 0.5) * 0x1p-53;
}

/// Standard normal (Box–Muller).
inline float random_normal(std::uint64_t seed, std::uint64_t counter) {
  const double radius = std::sqrt(-2.0 * std::log(random_uniform(seed, 2 * counter)));
  const double angle = 6.283185307179586 * random_uniform(seed, 2 * counter + 1);
  return static_cast<float>(radius * std::cos(angle));
}

}  // namespace nibble
