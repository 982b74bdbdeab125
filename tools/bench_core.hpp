// How nibble measures: weights cold, contestants taking turns, medians.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nibble/nibble.hpp"

namespace nibble::tools {

/// Something to time. `run(i)` does the work once, on copy i of its weights (modulo how many there are).
struct Contestant {
  std::string name;
  std::function<void(std::size_t)> run;
};

struct Timing {
  double median_us = 0;
  std::size_t samples = 0;
};

/// Times each contestant until it has at least five samples and has run for `min_seconds`. They take turns in five rounds, so
/// that a machine that slows down slows all of them.
std::vector<Timing> time_in_turns(std::span<const Contestant> contestants, double min_seconds);

/// Bytes of weights to rotate through, so that each copy has left the caches before its turn comes again.
std::uint64_t cold_bytes();

/// A layer to measure.
struct BenchCase {
  std::string name;
  QuantTensor weight;
  std::vector<std::int64_t> m;
  std::vector<std::string> modules = {};  // the ones of a checkpoint that are like it, itself included
};

struct BenchResult {
  std::string name;
  std::int64_t m = 1, n = 0, k = 0;
  std::string scheme, act, backend, kernel, layout;
  double median_us = 0, gbytes_per_s = 0, gflops = 0;
  bool memory_bound = true;     // which side of the roofline limits it
  double roofline_percent = 0;  // the time this machine needs at best, by measurement, over the time it took
  std::size_t samples = 0;
  std::vector<std::string> modules;         // as in BenchCase
  std::map<std::string, double> baselines;  // median µs
};

struct BenchSpec {
  DType act = DType::f32;
  std::string kernel;        // force; empty: as the planner decides
  bool all_kernels = false;  // every kernel that accepts, but for the reference
  double min_seconds = 0.2;
  bool baselines = true;
};

/// Measures one layer for each of its M. `step` is called before each (M) with a description.
Result<std::vector<BenchResult>> bench_layer(const BenchCase& layer, const BenchSpec& spec, const Roofline& roofline,
                                             Executor& executor, const std::function<void(const std::string&)>& step);

}  // namespace nibble::tools
