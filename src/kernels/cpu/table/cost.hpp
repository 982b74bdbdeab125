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

/// Whether the machine is one of Intel's servers since Sapphire Rapids, as its peaks tell: those of AMX or, where it may not be used, of bf16 dot
/// products, which take two clocks. Two multiply-adds of 512 bits a clock take both of their vector ports, so that whatever else a loop does takes
/// twice as many slots as on Zen 4, which has one and two more ports.
inline bool has_two_ports(const Roofline& machine) {
  return machine.bf16_gflops > 8 * machine.f32_gflops || (machine.bf16_gflops > 0 && machine.bf16_gflops < machine.f32_gflops);
}

/// The rates of a kernel that hold on the machine.
template <class Rates>
const Rates& rates_of(const Roofline& machine, const Rates& usual, const Rates& on_two_ports) {
  return has_two_ports(machine) ? on_two_ports : usual;
}

/// Nanoseconds of one slot of one thread, for vectors of `lanes` floats. On Zen 4 a vector of 512 bits takes as long as two of 256, on Intel's as
/// long as one.
inline double slot_ns(const Roofline& machine, int lanes) {
  return 2.0 * (has_two_ports(machine) ? 16 : lanes) * machine.threads / machine.f32_gflops;
}

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

/// Computing and reading overlap, but not perfectly where both take long: a core reads only some twenty lines ahead, of several `streams` more.
inline double overlapped(const Roofline& machine, double compute_us, double memory_us, bool streams = false) {
  // ∞ would be the larger of the two, 1 their sum; and how much longer kernels read than the loop that measured the memory.
  const double norm = !has_two_ports(machine) ? 3 : streams ? 2.5 : 1.5;
  const double reading = !has_two_ports(machine) ? 1 : streams ? 1.05 : 1.15;
  return std::pow(std::pow(compute_us, norm) + std::pow(reading * memory_us, norm), 1 / norm);
}

/// Waking the threads and joining them.
constexpr double kLoopUs = 2.0;

}  // namespace nibble::cpu
