// How nibble measures: weights cold, contestants and probes of the ceilings taking turns, medians.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
  std::vector<double> round_us;  // the median of each round
};

/// Times each contestant until it has at least five samples and has run for `min_seconds`. They take turns in five rounds, so
/// that a machine that slows down slows all of them; `each_round` is called before each, to look at the machine.
std::vector<Timing> time_in_turns(std::span<const Contestant> contestants, double min_seconds,
                                  const std::function<void()>& each_round = {});

/// Bytes of weights to rotate through, so that each copy has left the caches before its turn comes again.
std::uint64_t cold_bytes();

/// A layer to measure.
struct BenchCase {
  std::string name;
  std::function<Result<QuantTensor>()> load;  // its weight; only one case at a time is in memory
  std::vector<std::int64_t> m;
  ActScheme quantize = {};                // how activations are quantized while running
  std::vector<std::string> modules = {};  // the ones of a checkpoint that are like it, itself included
};

struct BenchResult {
  std::string name;
  std::int64_t m = 1, n = 0, k = 0;
  std::string scheme, act, backend, kernel, layout;
  double median_us = 0, gbytes_per_s = 0, gflops = 0;  // 10⁹ operations per second, be they in floating point or not
  // The ceilings, by probes in every round, and how close this came to them: the median over the rounds of the time needed at
  // best over the time taken.
  Ceiling peak = Ceiling::f32;  // of the arithmetic it is held against
  double ceiling_gbytes_per_s = 0, ceiling_gops = 0;
  double memory_percent = 0, compute_percent = 0;
  bool memory_bound = true;            // which of the two limits it
  double roofline_percent = 0;         // of the larger of the two times needed
  std::vector<double> round_percents;  // roofline_percent, round by round
  std::size_t samples = 0;
  bool chosen = true;                       // what the planner would run
  double predicted_us = 0;                  // by the planner, for the machine as the probes saw it
  std::vector<std::string> modules = {};    // as in BenchCase
  std::map<std::string, double> baselines;  // median µs
};

/// The peak a layer is held against: int8 with quantized activations; bf16 for bf16 activations where the CPU has instructions
/// for them; else f32. Kernels may use other instructions to the same accuracy, and pass it.
Ceiling peak_for(DType act, const ActScheme& quantize, const Roofline& roofline);

struct BenchSpec {
  std::vector<DType> acts = {DType::f32};
  std::string kernel;        // force; empty: as the planner decides
  bool all_kernels = false;  // every kernel that accepts, but for the reference
  double min_seconds = 0.2;
  bool baselines = true;
};

/// How much slower the planner's choices were than the best kernel measured in their place.
struct Regret {
  std::size_t places = 0;         // layer, M, scheme and activation type, where the choice was among the kernels measured
  double worst = 1, median = 1;   // time of the choice over the time of the best
  BenchResult chosen, preferred;  // where it was worst
};
/// Of results of all kernels; nothing where no choice was measured.
std::optional<Regret> regret_of(std::span<const BenchResult> results);

/// How far the planner's predictions are from the measured times: |predicted / measured − 1|, over all results.
struct Misprediction {
  double median = 0, worst = 0;
  BenchResult at;  // where it was worst
};
Misprediction misprediction_of(std::span<const BenchResult> results);

/// What measuring needs of the machine.
struct BenchMachine {
  const Roofline& roofline;
  RooflineProbe& probe;
  Executor& executor;
};

/// Measures one layer for each activation type and each of its M. `step` is called before each with a description.
Result<std::vector<BenchResult>> bench_layer(const BenchCase& layer, const BenchSpec& spec, const BenchMachine& machine,
                                             const std::function<void(const std::string&)>& step);

}  // namespace nibble::tools
