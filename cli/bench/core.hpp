// How nibble measures: cold weights, contestants and probes of the ceilings interleaved, medians.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/nibble.hpp"

namespace nibble::cli {

/// A contestant. `run` does the work once or more, on the next copies of its weights, and returns the seconds per run.
struct Contestant {
  std::string name;
  std::function<Result<double>()> run;
  DType dense = DType::none;  // for other libraries: the type of the dense matrices that they multiply
};

struct Timing {
  double median_us = 0;
  std::size_t samples = 0;
  std::vector<double> round_us;  // the median of each round
};

/// How long measurements take, and in how many rounds.
struct TimingSpec {
  double min_seconds = 0.2;
  int rounds = 7;
  bool sleeps = true;  // between contestants, for the threads of the last one to park
};
/// Times each contestant until it has a sample a round and has run for `min_seconds`. They run interleaved in rounds, in a random order in
/// each, so that a machine that slows down slows all of them; `each_round` is called before each round, to probe the machine.
Result<std::vector<Timing>> time_in_turns(std::span<const Contestant> contestants, const TimingSpec& spec,
                                          const std::function<Status()>& each_round = {});

/// Sizes and image layout of a convolution.
struct ConvShapes {
  ConvGeometry geometry;
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;

  bool operator==(const ConvShapes&) const = default;
};

/// A layer to measure.
struct BenchCase {
  std::string name;
  std::function<Result<QuantTensor>()> load;  // its weight; only one case at a time is in memory
  std::vector<std::int64_t> m;                // rows of activations, or images
  ActScheme act_scheme = {};                  // how activations are quantized while running
  std::vector<std::string> modules = {};      // equal modules of a checkpoint, itself included
  std::optional<ConvShapes> conv = {};        // absent: a linear layer
};

/// How the calls of a contestant follow each other: each on the heels of the last, as fast as the GPU lets them begin; with an ordinary kernel
/// before each, whose own time is subtracted; or so, and each is told the weight of the next (Operands::next), as the layers of a model are
/// known in advance. On the CPU no call begins before the last one has ended, so there is one way.
enum class Calls : std::uint8_t { back_to_back, isolated, chain };
std::string_view name(Calls calls);
/// The value of that name, one of calls_names().
Calls parse_calls(std::string_view text);
std::vector<std::string> calls_names();

/// What is measured of a layer: its product (or convolution), W written as floats, or its activations quantized. The last two are bound by
/// memory, and have no baseline.
enum class Operation : std::uint8_t { linear, dequantize, quantize };
std::string_view name(Operation operation);

/// One measurement's question to the planner: m rows through a linear layer, m images through a convolution, W, or the codes of m rows.
struct BenchWork {
  DType a_dtype = DType::f32;   // of A; codes come with their scales
  DType d_dtype = DType::none;  // of D; none: as A, but no kernel writes FP8; a quantizer writes codes
  std::int64_t m = 1, n = 1, k = 1;
  ActScheme act_scheme = {};
  Accumulation accumulation = Accumulation::fast;
  bool bias = false;
  std::optional<ConvShapes> conv = {};
  Calls calls = Calls::back_to_back;
  Operation operation = Operation::linear;
  bool transposed = false;  // W as [K,N]
  bool glu = false;         // silu(first half of D) · second half, for gate_up layers
  Norm norm = Norm::none;   // before the layer, with the residual stream added and its sum stored

  bool operator==(const BenchWork&) const = default;
  LinearSpec linear() const;
  /// The specification of a convolution.
  ConvSpec convolution() const;
  Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options) const;
  Result<Plan> plan(const PackedWeight& weight, const PlanOptions& options) const;
  DType out() const;
  /// Rows of D: m, or the pixels of m images.
  std::int64_t rows() const;
  std::int64_t a_elements() const;
  std::int64_t d_elements() const;
  /// Outputs in rotation, so that none is in a cache that holds less than `cold_bytes`: of what is bound by writing them.
  std::size_t d_copies(std::uint64_t cold_bytes) const;
  /// Views of dense memory.
  ConstTensorView a(const void* data) const;
  TensorView d(void* data) const;
};

/// A and, where it is codes, their scales and zero points; with a norm its operands: a weight [K], the residual stream [M,K] and its sum.
struct BenchActs {
  Tensor a, scales, zeros, norm;
};
/// Gaussian values: zeros take less power than a model's activations.
Result<BenchActs> activations_for(const BenchWork& work);
/// The operands of a run, which are at these addresses.
Operands operands_of(const BenchWork& work, const BenchActs& acts, const void* scales, const void* zeros, void* norm);

/// The memory of a quantizer's input and outputs, one after the other.
struct QuantizerMemory {
  std::size_t codes, scales, zeros;  // where they begin; A is at 0
  std::size_t bytes;                 // in all
  double scale_bytes;                // of scales and zero points

  explicit QuantizerMemory(const BenchWork& work);
  /// Reads and writes the memory that begins at `memory`, by the CPU or on a stream of the GPU.
  template <class Where>
  Status run(const BenchWork& work, const std::optional<StaticActs>& known, std::byte* memory, Where where) const {
    const ActScheme& scheme = work.act_scheme;
    const std::int64_t m = work.m, groups = scheme.group.cols(work.k);
    const auto of_groups = [&](std::size_t at, DType type) {
      TensorView view(memory + at, type, {m, groups});
      view.strides = {1, m};  // as block-scaled GEMMs read them
      return scheme.group.k == 0 ? TensorView(memory + at, type, {m}) : view;
    };
    ActOutputs out{.codes = TensorView(memory + codes, scheme.codes, {m, work.k})};
    if (scheme.group != GroupShape::tensor()) {
      out.scales = of_groups(scales, DType::f32);
      if (scheme.zero != ZeroKind::none) out.zeros = of_groups(zeros, DType::s32);
    }
    return quantize_activations(ConstTensorView(memory, work.a_dtype, {m, work.k}), scheme, out, {.known = known}, where);
  }
};

/// Sizes of a decoder's block, whose four products run one after the other (block.hpp).
struct BlockShape {
  std::int64_t hidden = 1, intermediate = 1, heads = 1, kv_heads = 1, head_dim = 1;

  /// Channels of all queries, and of all keys.
  std::int64_t q() const { return heads * head_dim; }
  std::int64_t kv() const { return kv_heads * head_dim; }
};

/// Sizes of a layer of experts (moe.hpp).
struct MoeShape {
  std::int64_t experts = 1, top_k = 1, hidden = 1, intermediate = 1;
};

/// How tokens fall on experts: all equally likely; the i-th most popular with a probability as 1/i; one that half of the tokens have, about;
/// one that no token has, and the others equally likely.
enum class Routing : std::uint8_t { uniform, zipf, hot, empty };
std::string_view name(Routing routing);
/// The value of that name, one of routing_names().
Routing parse_routing(std::string_view text);
std::vector<std::string> routing_names();

/// A measured layer of experts.
struct MoeResult {
  MoeShape shape;
  Routing routing = Routing::uniform;
  double hit = 0, bytes = 0;  // experts that a call's tokens have, in the mean of the calls, and their packed bytes
};

struct BenchResult {
  std::string name;
  std::int64_t m = 1, n = 0, k = 0;  // of the product: m of a convolution counts output pixels
  std::optional<ConvShapes> conv = {};
  std::int64_t batch = 1;                // of a convolution
  std::optional<BlockShape> block = {};  // it is a decoder's block, or a product in one
  std::optional<MoeResult> moe = {};     // it is a layer of experts, of m tokens
  std::string scheme, a_dtype, d_dtype, backend, kernel, layout;
  Calls calls = Calls::back_to_back;
  Operation operation = Operation::linear;
  bool transposed = false;
  bool glu = false;
  Norm norm = Norm::none;
  bool prescale = false;                               // of the weight, which A is multiplied by first
  double median_us = 0, gbytes_per_s = 0, gflops = 0;  // 10⁹ operations per second, be they in floating point or not
  // The ceilings, by probes in every round, and the share of them that was reached: the median over the rounds of the least time over the
  // measured time.
  Ceiling peak = Ceiling::f32;  // the peak it is compared with
  double ceiling_gbytes_per_s = 0, ceiling_gops = 0;
  double memory_percent = 0, compute_percent = 0;
  bool memory_bound = true;            // which of the two limits it
  double roofline_percent = 0;         // least time over measured time
  std::vector<double> round_percents;  // roofline_percent, round by round
  std::size_t samples = 0;
  bool chosen = true;                          // what the planner would run
  double predicted_us = 0;                     // by the planner, with the probed ceilings; 0: it was not asked
  std::vector<std::string> modules = {};       // as in BenchCase
  std::map<std::string, double> baselines;     // median µs
  std::map<std::string, std::string> doubted;  // baselines with implausible times, and why
};

struct BenchSpec {
  Operation operation = Operation::linear;
  std::vector<DType> acts = {DType::f32};
  DType d_dtype = DType::none;  // BenchWork::d_dtype
  Accumulation accumulation = Accumulation::fast;
  bool glu = false;        // BenchWork::glu
  Norm norm = Norm::none;  // BenchWork::norm
  std::vector<Calls> calls = {Calls::back_to_back};
  std::string kernel;        // forced; empty: the planner's choice
  bool all_kernels = false;  // every kernel that accepts, except the reference
  double min_seconds = 0.2;
  int rounds = 7;
  bool baselines = true;
};

/// The slowdown of the planner's choices against the best measured kernels.
struct Regret {
  std::size_t places = 0;         // cells (layer, M, scheme, activation type, way of calling) whose choice was measured
  double worst = 1, median = 1;   // time of the choice over the time of the best
  BenchResult chosen, preferred;  // where it was worst
};
/// The regret over results of all kernels; nothing where no choice was measured.
std::optional<Regret> regret_of(std::span<const BenchResult> results);

/// How far the planner's predictions are from the measured times: |predicted / measured − 1|, over all results that have one.
struct Misprediction {
  double median = 0, worst = 0;
  BenchResult at;  // where it was worst; without a name: there are no predictions
};
Misprediction misprediction_of(std::span<const BenchResult> results);

/// Copies of one packed weight, used in rotation: so many that each has left the caches before it is used again.
using Copies = std::shared_ptr<const std::vector<PackedWeight>>;

/// One of several calls that follow each other: a plan, copies of its weight, and where its operands are.
struct PlanCall {
  Plan plan;
  Copies copies;
  ConstTensorView a;
  TensorView d;
  Operands operands = {};
};

/// Calls of a layer of experts that follow each other: call i has operands[i], and the next of the copies of the experts.
struct MoeCalls {
  MoePlan plan;
  std::vector<PackedExperts> gate_up, down;
  ConstTensorView x;
  TensorView d;
  std::vector<MoeOperands> operands;

  /// Call i on the CPU or on a stream of the GPU.
  template <class Where>
  Status run(std::size_t i, std::span<std::byte> workspace, Where where) const {
    const std::size_t at = i % gate_up.size();
    return plan.run(gate_up[at], down[at], x, operands[i], d, workspace, where);
  }
};

/// What does a layer's operation without a plan.
struct Operator {
  Contestant contestant;
  std::string layout;  // of what it reads; "": of nothing packed
  double bytes = 0;    // that move, beside A and D
};

/// Other libraries with one layer as dense weights, cold copies of them.
class Baseline {
 public:
  virtual ~Baseline() = default;
  /// The products that could replace the layer.
  virtual Result<std::vector<Contestant>> contestants(const BenchWork& work) = 0;
};

/// Why the times of a baseline are implausible, or "": it takes many times the least time of its work, as when its threads wait for cores
/// that others spin on, or its rounds differ as much. best_us: bytes and operations at the ceilings.
std::string doubt(const Timing& timing, double best_us);
/// The fastest plausible baseline; end() without one.
std::map<std::string, double>::const_iterator fastest_baseline(const BenchResult& result);

/// A machine to measure on: a CPU or a GPU.
class BenchMachine {
 public:
  virtual ~BenchMachine() = default;

  virtual Backend backend() const = 0;
  /// Packs weights and, on the CPU, runs plans.
  virtual Executor& executor() const = 0;
  /// The ceilings at best.
  virtual const Roofline& roofline() const = 0;
  /// A ceiling as it is now, 0 when it cannot be measured; `share` of the usual effort.
  virtual Result<double> probe(Ceiling ceiling, double share) = 0;
  /// The peak that a layer is compared with. Kernels may use other instructions of the same accuracy and exceed it.
  virtual Ceiling peak_for(DType a_dtype, const ActScheme& act_scheme) const = 0;
  /// Bytes of copies of one weight in rotation.
  virtual std::uint64_t cold_bytes() const = 0;
  /// Reads new copies of weights once before they are timed, where that changes how fast they are read afterwards.
  virtual void settle(std::span<const std::span<const std::byte>> /*copies*/) {}
  /// The contestant that runs `plan` on the copies in rotation.
  virtual Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) = 0;
  /// Memory of the machine with a copy of these bytes, freed with its last owner.
  virtual Result<std::shared_ptr<std::byte>> place(std::span<const std::byte> bytes) = 0;
  /// Copies bytes of that memory back.
  virtual Status fetch(std::span<std::byte> to, const std::byte* from) = 0;
  /// The contestant that runs the calls one after the other, all on the next of the first `copies` copies of their weights; its seconds are
  /// those of all calls. It keeps the memory that they read and write.
  virtual Result<Contestant> sequence(std::string name, std::vector<PlanCall> calls, std::size_t copies, Calls way,
                                      std::shared_ptr<std::byte> memory) = 0;
  /// The contestant that runs the calls one after the other; its seconds are those of one in the mean. It keeps the memory.
  virtual Result<Contestant> experts(std::string name, MoeCalls calls, Calls way, std::shared_ptr<std::byte> memory) = 0;
  /// What quantizes A; or what writes W from tensors as checkpoints have them, beside the plan that reads a packed weight.
  virtual Result<std::vector<Operator>> operators(const QuantTensor& q, const BenchWork& work) = 0;
  /// The baseline of a weight and its packed form; null when there is none, or its copies would not fit.
  virtual Result<std::unique_ptr<Baseline>> baseline(const QuantTensor& q, const PackedWeight& weight) = 0;
  /// The name of the baseline, "OpenBLAS 0.3.21 ...", or why there is none.
  virtual std::string baseline_description() const = 0;
};
/// The peak that a CPU of that roofline is compared with: int8 with quantized activations; bf16 for bf16 activations where it has
/// instructions for them; else f32.
Ceiling cpu_peak_for(DType a_dtype, const ActScheme& act_scheme, const Roofline& roofline);
/// All cores of this machine that `executor` uses.
std::unique_ptr<BenchMachine> cpu_machine(Executor& executor);
/// The current GPU. Fails with unsupported where there is none.
Result<std::unique_ptr<BenchMachine>> gpu_machine(Executor& executor);

// Shared by all machines.
inline constexpr std::size_t kMaxCopies = 2048;
double median(std::vector<double> values);
/// How many copies of so many bytes have `cold_bytes`: at least one, at most kMaxCopies.
std::size_t copies_in(std::uint64_t cold_bytes, std::uint64_t bytes);
/// Copies of a packed weight, as many as copies_in(); `pack` makes one more.
Result<Copies> copies_of(PackedWeight first, const std::function<Result<PackedWeight>()>& pack, std::uint64_t cold_bytes);

/// The ceilings as they were in each round.
struct Probes {
  Ceiling peak = Ceiling::f32;
  std::vector<double> gbytes_per_s = {}, gops = {};
};
/// Times the contestants in turns, and probes the ceilings in every round.
Result<std::vector<Timing>> time_beside_probes(std::span<const Contestant> contestants, const BenchSpec& spec,
                                               BenchMachine& machine, Probes& probes);
/// Fills in the values that follow from the times of work that moves so many bytes and has so many operations.
void derive(BenchResult& result, const Timing& timing, const Probes& probes, double bytes, double operations);
Tensor activations(DType dtype, std::int64_t m, std::int64_t k);
/// Element [row, column] of a matrix of f32, f16 or bf16 in host memory.
double value_at(const ConstTensorView& v, std::int64_t row, std::int64_t column);

struct LayerBench {
  std::vector<BenchResult> results;
  std::vector<std::string> left_out;  // activation types that no kernel supports, with the reasons
};
/// [N,K] and transposed [K,N] of W; otherwise there is one order.
std::vector<bool> orders_of(Operation operation);
/// Measures one layer for each activation type and each of its M. `step` is called before each with a description. Refuses where it has
/// nothing to measure.
Result<LayerBench> bench_layer(const BenchCase& layer, const BenchSpec& spec, BenchMachine& machine,
                               const std::function<void(const std::string&)>& step);
/// Measures a block, or a layer of experts, for each type of A: `measure` appends its results, and gets the name of what it measures. After
/// a refusal as unsupported the rest of the type is left out. Refuses where it has nothing to measure.
Result<LayerBench> bench_types(
    std::string_view what, const Scheme& scheme, std::span<const DType> types,
    const std::function<Status(DType type, const std::string& name, std::vector<BenchResult>& results)>& measure);

}  // namespace nibble::cli
