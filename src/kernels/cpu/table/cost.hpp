// The shared parts of the cost models of the CPU kernels. A kernel counts *slots*: the time one multiply-add of a whole vector register
// takes on this machine, derived from its measured (or assumed) f32 peak. The work per slot differs little between CPUs of one instruction
// set; the length of a slot and the memory bandwidth do.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/kernel.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {

/// Nanoseconds of one slot of one thread, for vectors of `lanes` floats.
inline double slot_ns(const Roofline& machine, int lanes) { return 2.0 * lanes * machine.threads / machine.f32_gflops; }

/// Microseconds to read a weight of row blocks of `rows` from memory.
inline double read_us(const Problem& p, int rows) {
  const auto geo = tile::geometry(rows, p.scheme, p.zero_type, p.n, p.k);
  return 1e-3 * static_cast<double>(geo.total_bytes()) / p.machine.read_gbytes_per_s;
}

/// The time of the busiest thread relative to an even share, for `tasks` equal tasks.
inline double imbalance(std::int64_t tasks, int threads) {
  const std::int64_t rounds = (tasks + threads - 1) / threads;
  return static_cast<double>(rounds) * threads / static_cast<double>(tasks);
}

/// Computing and reading overlap, but not perfectly where both take long: a core reads only some twenty lines ahead.
inline double overlapped(double compute_us, double memory_us) {
  constexpr double kNorm = 3;  // ∞ would be the larger of the two, 1 their sum
  return std::pow(std::pow(compute_us, kNorm) + std::pow(memory_us, kNorm), 1 / kNorm);
}

/// Waking the threads and joining them.
constexpr double kLoopUs = 2.0;

}  // namespace nibble::cpu
