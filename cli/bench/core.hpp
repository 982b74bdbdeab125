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

/// Something to time. `run` does the work, once or more, on the next copies of its weights, and returns the seconds that once
/// took.
struct Contestant {
  std::string name;
  std::function<Result<double>()> run;
  DType dense = DType::none;  // of another library's: the type of the dense matrices that it multiplies
};

struct Timing {
  double median_us = 0;
  std::size_t samples = 0;
  std::vector<double> round_us;  // the median of each round
};

/// Times each contestant until it has at least seven samples and has run for `min_seconds`. They take turns in seven rounds, so
/// that a machine that slows down slows all of them; `each_round` is called before each, to look at the machine.
Result<std::vector<Timing>> time_in_turns(std::span<const Contestant> contestants, double min_seconds,
                                          const std::function<Status()>& each_round = {});

/// Sizes of a convolution, and where its images lie.
struct ConvShapes {
  ConvGeometry geometry;
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;
};

/// A layer to measure.
struct BenchCase {
  std::string name;
  std::function<Result<QuantTensor>()> load;  // its weight; only one case at a time is in memory
  std::vector<std::int64_t> m;                // rows of activations, or images
  ActScheme act_scheme = {};                  // how activations are quantized while running
  std::vector<std::string> modules = {};      // the ones of a checkpoint that are like it, itself included
  std::optional<ConvShapes> conv = {};        // absent: a linear layer
};

/// One measurement's question to the planner: m rows through a linear layer, or m images through a convolution.
struct BenchWork {
  DType a_dtype = DType::f32;  // of A; codes come with their scales
  std::int64_t m = 1, n = 1, k = 1;
  ActScheme act_scheme = {};
  Accumulation accumulation = Accumulation::fast;
  bool bias = false;
  std::optional<ConvShapes> conv = {};

  LinearSpec linear() const;
  /// Of a convolution.
  ConvSpec convolution() const;
  Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options) const;
  Result<Plan> plan(const PackedWeight& weight, const PlanOptions& options) const;
  /// Of D: as A is, but no kernel writes FP8.
  DType out() const { return a_dtype == DType::e4m3 ? DType::bf16 : a_dtype; }
  /// Rows of D: m, or the pixels of m images.
  std::int64_t rows() const;
  std::int64_t a_elements() const;
  std::int64_t d_elements() const { return rows() * n; }
  /// Views of dense memory.
  ConstTensorView a(const void* data) const;
  TensorView d(void* data) const;
};

/// A, and where it comes as codes, their scales and zero points.
struct BenchActs {
  Tensor a, scales, zeros;
};
/// Gaussian: zeros take less power than a model does.
Result<BenchActs> activations_for(const BenchWork& work);
/// The operands of a run, whose scales and zero points are at these addresses.
Operands operands_of(const BenchActs& acts, const void* scales, const void* zeros);

struct BenchResult {
  std::string name;
  std::int64_t m = 1, n = 0, k = 0;  // of the product: m of a convolution counts output pixels
  std::optional<ConvShapes> conv = {};
  std::int64_t batch = 1;  // of a convolution
  std::string scheme, a_dtype, backend, kernel, layout;
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
  bool chosen = true;                          // what the planner would run
  double predicted_us = 0;                     // by the planner, for the machine as the probes saw it
  std::vector<std::string> modules = {};       // as in BenchCase
  std::map<std::string, double> baselines;     // median µs
  std::map<std::string, std::string> doubted;  // baselines whose times are not believed, and why
};

struct BenchSpec {
  std::vector<DType> acts = {DType::f32};
  Accumulation accumulation = Accumulation::fast;
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

/// Copies of one packed weight, used in rotation: so many that each has left the caches before its turn comes again.
using Copies = std::shared_ptr<const std::vector<PackedWeight>>;

/// Other libraries with one layer as dense weights, cold copies of them.
class Baseline {
 public:
  virtual ~Baseline() = default;
  /// The products that could take the layer's place.
  virtual Result<std::vector<Contestant>> contestants(const BenchWork& work) = 0;
};

/// Why the times of a baseline are no measure of it, "" where they are: it takes many times what its own work needs at best, as when its
/// threads wait for cores that others spin on, or its rounds differ as much. best_us: bytes and operations at the ceilings.
std::string doubt(const Timing& timing, double best_us);
/// The fastest of the baselines that are believed; end() without one.
std::map<std::string, double>::const_iterator fastest_baseline(const BenchResult& result);

/// What measuring asks of a machine: a CPU or a GPU.
class BenchMachine {
 public:
  virtual ~BenchMachine() = default;

  virtual Backend backend() const = 0;
  /// Packs, and on the CPU runs.
  virtual Executor& executor() const = 0;
  /// The ceilings at best.
  virtual const Roofline& roofline() const = 0;
  /// A ceiling as it is now, 0 when it cannot be measured; `share` of the usual effort.
  virtual Result<double> probe(Ceiling ceiling, double share) = 0;
  /// The peak a layer is held against. Kernels may use other instructions to the same accuracy, and pass it.
  virtual Ceiling peak_for(DType a_dtype, const ActScheme& act_scheme) const = 0;
  /// How much of one weight there is to be in rotation.
  virtual std::uint64_t cold_bytes() const = 0;
  /// `plan`, which is the work's, on the copies in turn.
  virtual Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) = 0;
  /// Null when there is none, or its copies would not fit.
  virtual Result<std::unique_ptr<Baseline>> baseline(const PackedWeight& weight) = 0;
  /// "OpenBLAS 0.3.21 ...", or why there is none.
  virtual std::string baseline_description() const = 0;
};
/// What a CPU of that roofline holds a layer against: int8 with quantized activations; bf16 for bf16 activations where it has
/// instructions for them; else f32.
Ceiling cpu_peak_for(DType a_dtype, const ActScheme& act_scheme, const Roofline& roofline);
/// All cores of this machine that `executor` uses.
std::unique_ptr<BenchMachine> cpu_machine(Executor& executor);
/// The current GPU. Fails with unsupported where there is none.
Result<std::unique_ptr<BenchMachine>> gpu_machine(Executor& executor);

// What machines have in common.
inline constexpr std::size_t kMaxCopies = 2048;
double median(std::vector<double> values);
Tensor activations(DType dtype, std::int64_t m, std::int64_t k);

struct LayerBench {
  std::vector<BenchResult> results;
  std::vector<std::string> left_out;  // activation types that no kernel takes so, with the reasons
};
/// Measures one layer for each activation type and each of its M. `step` is called before each with a description. Refuses where it has
/// nothing to measure.
Result<LayerBench> bench_layer(const BenchCase& layer, const BenchSpec& spec, BenchMachine& machine,
                               const std::function<void(const std::string&)>& step);

}  // namespace nibble::tools
