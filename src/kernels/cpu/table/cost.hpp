// What the cost models of the CPU kernels share. A kernel counts *slots*: the time one multiply-add of a whole vector register
// takes on this machine, which its measured (or assumed) f32 peak gives. What a machine does per slot differs little between
// CPUs of one instruction set; how long a slot lasts does, and so does its memory.
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

/// How much longer than its share the busiest thread works when `tasks` equal tasks are dealt out.
inline double imbalance(std::int64_t tasks, int threads) {
  const std::int64_t rounds = (tasks + threads - 1) / threads;
  return static_cast<double>(rounds) * threads / static_cast<double>(tasks);
}

/// Computing and reading overlap, but not perfectly where both take long: a core sees some twenty lines ahead.
inline double overlapped(double compute_us, double memory_us) {
  constexpr double kNorm = 3;  // ∞ would be the larger of the two, 1 their sum
  return std::pow(std::pow(compute_us, kNorm) + std::pow(memory_us, kNorm), 1 / kNorm);
}

/// Waking the threads and joining them.
constexpr double kLoopUs = 2.0;

}  // namespace nibble::cpu
