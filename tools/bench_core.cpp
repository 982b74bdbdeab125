// Weights are packed as many times as it takes to outgrow the last-level cache, and used in rotation: a layer of a real model
// is cold when its turn comes. Activations and outputs stay warm, as they are in a model.
#include "bench_core.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

#include "blas.hpp"

namespace nibble::tools {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int kRounds = 5;
constexpr std::size_t kMaxCopies = 2048;
// Probes of the ceilings in each round; shorter when the measurements are.
constexpr double kUsualSeconds = 0.2, kReadProbeSeconds = 0.02, kPeakProbeSeconds = 0.005;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Page-aligned memory, so that results do not depend on where an allocation happened to land.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(bytes + 1, kAlignment))) {}
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Small, harmless values of either sign.
Tensor activations(DType dtype, std::int64_t m, std::int64_t k) {
  Tensor a(dtype, {m, k});
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < m * k; ++i) {
    state = state * 1664525u + 1013904223u;
    a.set(i, static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f);
  }
  return a;
}

// The copies of one weight in one layout.
Result<std::vector<PackedWeight>> pack_copies(const QuantTensor& q, const PackOptions& options) {
  std::vector<PackedWeight> copies;
  std::uint64_t bytes = 0;
  do {
    auto packed = pack(q, options);
    if (!packed.ok()) return packed.status();
    bytes += packed->bytes().size();
    copies.push_back(*std::move(packed));
  } while (bytes < cold_bytes() && copies.size() < kMaxCopies);
  return copies;
}

// Kernels to measure: the one the planner picks (""), the forced one, or all that could run.
std::vector<std::string> kernels_to_try(const BenchSpec& spec) {
  if (!spec.all_kernels) return {spec.kernel};
  std::vector<std::string> names;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op == Op::linear && kernel.backend != Backend::reference && this_device().has(kernel.isa))
      names.emplace_back(kernel.name);
  }
  return names;
}

// A weight packed for one kernel; kernels that share a layout share the copies.
struct Entry {
  std::string kernel;  // forced; empty: the planner's choice
  std::shared_ptr<const std::vector<PackedWeight>> copies;
};

PackOptions pack_options(const BenchCase& layer, const std::string& kernel, Executor& executor) {
  PackOptions options;
  options.kernel = kernel;
  options.m_max = *std::max_element(layer.m.begin(), layer.m.end());
  options.executor = &executor;
  return options;
}

Result<std::vector<Entry>> pack_for_all(const BenchCase& layer, const QuantTensor& weight, const BenchSpec& spec,
                                        Executor& executor) {
  std::vector<Entry> entries;
  Status refusal;
  for (const std::string& kernel : kernels_to_try(spec)) {
    const PackOptions options = pack_options(layer, kernel, executor);
    auto first = pack(weight, options);
    if (!first.ok()) {
      refusal = first.status();
      continue;
    }
    Entry entry{kernel, nullptr};
    for (const Entry& other : entries) {
      if (other.copies->front().layout() == first->layout()) entry.copies = other.copies;
    }
    if (!entry.copies) {
      auto copies = pack_copies(weight, options);
      if (!copies.ok()) return copies.status();
      entry.copies = std::make_shared<const std::vector<PackedWeight>>(*std::move(copies));
    }
    entries.push_back(std::move(entry));
  }
  if (entries.empty()) return refusal.ok() ? Status(StatusCode::unsupported, "this build has no kernel to measure") : refusal;
  return entries;
}

// The float copies for the BLAS baseline: W dequantized.
class FloatCopies {
 public:
  static Result<FloatCopies> make(const PackedWeight& weight, Executor& executor) {
    FloatCopies made;
    const std::int64_t n = weight.n(), k = weight.k();
    const std::size_t bytes = static_cast<std::size_t>(n * k) * sizeof(float);
    const auto plan = Plan::dequantize(weight, {});
    if (!plan.ok()) return plan.status();
    const Buffer workspace(plan->workspace_bytes());
    made.copies_.emplace_back(bytes);
    const TensorView d(made.copies_[0].as<float>(), {n, k});
    if (Status ran = plan->run(weight, {}, d, {}, workspace.span(), &executor); !ran.ok()) return ran;
    for (std::uint64_t total = bytes; total < cold_bytes() && made.copies_.size() < kMaxCopies; total += bytes) {
      made.copies_.emplace_back(bytes);
      std::copy_n(made.copies_[0].as<float>(), n * k, made.copies_.back().as<float>());
    }
    return made;
  }
  const float* copy(std::size_t i) const { return copies_[i % copies_.size()].as<float>(); }

 private:
  std::vector<Buffer> copies_;
};

// A plan with everything its runs need.
struct Run {
  Plan plan;
  std::shared_ptr<const std::vector<PackedWeight>> copies;
  std::shared_ptr<const Buffer> workspace;
  ConstTensorView a;
  TensorView d;
  Executor* executor;
  std::shared_ptr<Status> failure = std::make_shared<Status>();

  void operator()(std::size_t i) const {
    Status status = plan.run((*copies)[i % copies->size()], a, d, {}, workspace->span(), executor);
    if (!status.ok()) *failure = std::move(status);
  }
};

// The ceilings as they were in each round.
struct Probes {
  Ceiling peak = Ceiling::f32;
  std::vector<double> gbytes_per_s, gops;
};

// Fills in what follows from the times: traffic counts weights, activations and outputs once each.
void derive(BenchResult& result, const Timing& timing, const Probes& probes, std::size_t weight_bytes, DType act) {
  const double element = bits(act) / 8.0;
  const auto m = static_cast<double>(result.m), n = static_cast<double>(result.n), k = static_cast<double>(result.k);
  const double bytes = static_cast<double>(weight_bytes) + element * m * (k + n), operations = 2 * m * n * k;
  result.median_us = timing.median_us;
  result.samples = timing.samples;
  result.gbytes_per_s = bytes / (result.median_us * 1e3);
  result.gflops = operations / (result.median_us * 1e3);
  std::vector<double> memory, compute;
  for (std::size_t round = 0; round < timing.round_us.size(); ++round) {
    memory.push_back(100 * bytes / (probes.gbytes_per_s[round] * 1e3) / timing.round_us[round]);
    compute.push_back(100 * operations / (probes.gops[round] * 1e3) / timing.round_us[round]);
    result.round_percents.push_back(std::max(memory.back(), compute.back()));
  }
  result.peak = probes.peak;
  result.ceiling_gbytes_per_s = median(probes.gbytes_per_s);
  result.ceiling_gops = median(probes.gops);
  result.memory_percent = median(memory);
  result.compute_percent = median(compute);
  result.memory_bound = result.memory_percent >= result.compute_percent;
  result.roofline_percent = median(result.round_percents);
}

std::string_view backend_of(std::string_view kernel) {
  for (const KernelInfo& info : kernels()) {
    if (info.name == kernel) return name(info.backend);
  }
  return "";
}

// A layer, ready to run.
struct Prepared {
  const BenchCase& layer;
  const QuantTensor& weight;
  std::vector<Entry> entries;
  std::optional<PackedWeight> by_default;  // as the planner packs it; only when all kernels are measured
  std::optional<FloatCopies> floats;
};

// The kernel the planner would run, "" when that is unknown.
std::string planned_kernel(const Prepared& prepared, const LinearSpec& linear, int threads) {
  if (!prepared.by_default) return "";
  PlanOptions options;
  options.threads = threads;
  const auto plan = Plan::linear(*prepared.by_default, linear, options);
  return plan.ok() ? std::string(plan->kernel(linear.m_max)) : "";
}

// What the planner says of a kernel that was measured, for the machine as it was then.
double predicted_us(const PackedWeight& weight, const LinearSpec& linear, const BenchResult& result, const Roofline& best) {
  PlanOptions options;
  options.kernel = result.kernel;
  options.machine = best;
  options.machine->read_gbytes_per_s = result.ceiling_gbytes_per_s;
  for (Ceiling peak : {Ceiling::f32, Ceiling::bf16, Ceiling::int8})
    (*options.machine)[peak] *= result.ceiling_gops / best[result.peak];
  const auto plan = Plan::linear(weight, linear, options);
  return plan.ok() ? plan->explain().buckets.back().cost_us : 0.0;
}

// One activation type and M: plans, contestants, times, results.
Result<std::vector<BenchResult>> bench_m(const Prepared& prepared, DType act, std::int64_t m, const BenchSpec& spec,
                                         const BenchMachine& machine) {
  const BenchCase& layer = prepared.layer;
  Executor& executor = machine.executor;
  const std::int64_t n = prepared.weight.n, k = prepared.weight.k;
  const Tensor a = activations(act, m, k);
  const Tensor float_a = activations(DType::f32, m, k);
  const Buffer d(static_cast<std::size_t>(m * n) * sizeof(float));

  LinearSpec linear;
  linear.act = linear.epilogue.out = act;
  linear.quantize = layer.quantize;
  linear.m_max = m;
  linear.epilogue.bias = !prepared.weight.bias.empty();
  std::vector<Run> runs;
  Status refusal;
  for (const Entry& entry : prepared.entries) {
    PlanOptions options;
    options.kernel = entry.kernel;
    options.threads = executor.threads();
    auto plan = Plan::linear(entry.copies->front(), linear, options);
    if (!plan.ok()) {
      refusal = plan.status();
      continue;
    }
    const auto workspace = std::make_shared<const Buffer>(plan->workspace_bytes());
    runs.push_back({*std::move(plan), entry.copies, workspace, ConstTensorView(a.bytes.data(), act, {m, k}),
                    TensorView(static_cast<void*>(d.as<std::byte>()), act, {m, n}), &executor});
  }
  if (runs.empty()) return refusal;

  std::vector<Contestant> contestants;
  for (const Run& run : runs) contestants.push_back({std::string(run.plan.kernel(m)), std::cref(run)});
  const Blas* blas = prepared.floats ? Blas::load(executor.threads()) : nullptr;
  if (blas != nullptr) {
    contestants.push_back({"openblas_f32", [&](std::size_t i) {
                             blas->linear(m, n, k, float_a.as<float>(), prepared.floats->copy(i), d.as<float>());
                           }});
  }
  Probes probes{.peak = peak_for(act, layer.quantize, machine.roofline), .gbytes_per_s = {}, .gops = {}};
  const double share = std::min(1.0, spec.min_seconds / kUsualSeconds);
  const auto timings = time_in_turns(contestants, spec.min_seconds, [&] {
    probes.gbytes_per_s.push_back(machine.probe.measure(Ceiling::read, share * kReadProbeSeconds));
    probes.gops.push_back(machine.probe.measure(probes.peak, share * kPeakProbeSeconds));
  });

  const std::string planned = planned_kernel(prepared, linear, executor.threads());
  std::vector<BenchResult> results;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].failure->ok()) return *runs[i].failure;
    const PackedWeight& weight = runs[i].copies->front();
    BenchResult& result = results.emplace_back();
    result.name = layer.name;
    result.modules = layer.modules;
    result.m = m, result.n = n, result.k = k;
    result.scheme = Scheme{prepared.weight.scheme, layer.quantize}.name();
    result.act = name(act);
    result.kernel = contestants[i].name;
    result.backend = backend_of(result.kernel);
    result.layout = weight.layout();
    result.chosen = !spec.all_kernels || result.kernel == planned;
    derive(result, timings[i], probes, weight.bytes().size(), act);
    result.predicted_us = predicted_us(weight, linear, result, machine.roofline);
    for (std::size_t b = runs.size(); b < contestants.size(); ++b) result.baselines[contestants[b].name] = timings[b].median_us;
  }
  return results;
}

}  // namespace

std::uint64_t cold_bytes() {
  const DeviceInfo& device = this_device();
  const auto wanted = std::max<std::int64_t>(64 << 20, 3 * device.l3_bytes);
  return static_cast<std::uint64_t>(device.memory_bytes > 0 ? std::min(wanted, device.memory_bytes / 8) : wanted);
}

std::vector<Timing> time_in_turns(std::span<const Contestant> contestants, double min_seconds,
                                  const std::function<void()>& each_round) {
  std::vector<std::vector<double>> samples(contestants.size());
  std::vector<std::size_t> copy(contestants.size(), 0);
  std::vector<Timing> timings(contestants.size());
  for (int round = 0; round < kRounds; ++round) {
    if (each_round) each_round();
    for (std::size_t c = 0; c < contestants.size(); ++c) {
      const auto once = [&] {
        const auto start = Clock::now();
        contestants[c].run(copy[c]++);
        return seconds_since(start);
      };
      // The threads of the contestant before park, and one untimed run wakes up these. Where a run takes long, waking up does
      // not matter and only the very first run, which touches new memory, is left out.
      if (contestants.size() > 1) std::this_thread::sleep_for(2ms);
      if (samples[c].empty() || samples[c].back() < 0.02) once();
      std::vector<double> now;
      double spent = 0;
      do {
        now.push_back(once());
        spent += now.back();
      } while (spent < min_seconds / kRounds);
      samples[c].insert(samples[c].end(), now.begin(), now.end());
      timings[c].round_us.push_back(1e6 * median(std::move(now)));
    }
  }
  for (std::size_t c = 0; c < contestants.size(); ++c) {
    timings[c].samples = samples[c].size();
    timings[c].median_us = 1e6 * median(std::move(samples[c]));
  }
  return timings;
}

Ceiling peak_for(DType act, const ActScheme& quantize, const Roofline& roofline) {
  if (quantize.codes != DType::none) return Ceiling::int8;
  return act == DType::bf16 && roofline.bf16_gflops > 0 ? Ceiling::bf16 : Ceiling::f32;
}

std::optional<Regret> regret_of(std::span<const BenchResult> results) {
  struct Place {
    const BenchResult *chosen = nullptr, *best = nullptr;
  };
  std::map<std::string, Place> places;
  for (const BenchResult& r : results) {
    Place& place = places[fmt::format("{}\n{} {} {} {} {}", r.name, r.m, r.n, r.k, r.scheme, r.act)];
    if (place.best == nullptr || r.median_us < place.best->median_us) place.best = &r;
    if (r.chosen) place.chosen = &r;
  }
  Regret regret;
  std::vector<double> ratios;
  for (const auto& [key, place] : places) {
    if (place.chosen == nullptr) continue;
    const double ratio = place.chosen->median_us / place.best->median_us;
    if (ratios.empty() || ratio > regret.worst) {
      regret.worst = ratio;
      regret.chosen = *place.chosen;
      regret.preferred = *place.best;
    }
    ratios.push_back(ratio);
  }
  if (ratios.empty()) return std::nullopt;
  regret.places = ratios.size();
  regret.median = median(std::move(ratios));
  return regret;
}

Misprediction misprediction_of(std::span<const BenchResult> results) {
  Misprediction found;
  std::vector<double> errors;
  for (const BenchResult& r : results) {
    const double error = std::abs(r.predicted_us / r.median_us - 1);
    if (errors.empty() || error > found.worst) {
      found.worst = error;
      found.at = r;
    }
    errors.push_back(error);
  }
  if (!errors.empty()) found.median = median(std::move(errors));
  return found;
}

Result<std::vector<BenchResult>> bench_layer(const BenchCase& layer, const BenchSpec& spec, const BenchMachine& machine,
                                             const std::function<void(const std::string&)>& step) {
  const auto weight = layer.load();
  if (!weight.ok()) return weight.status().with_context(layer.name);
  step(fmt::format("{} packing", layer.name));
  auto entries = pack_for_all(layer, *weight, spec, machine.executor);
  if (!entries.ok()) return entries.status().with_context(layer.name);
  Prepared prepared{layer, *weight, *std::move(entries), {}, {}};
  if (spec.all_kernels) {
    auto packed = pack(*weight, pack_options(layer, "", machine.executor));
    if (!packed.ok()) return packed.status().with_context(layer.name);
    prepared.by_default = *std::move(packed);
  }
  const std::int64_t float_bytes = weight->n * weight->k * static_cast<std::int64_t>(sizeof(float));
  if (spec.baselines && Blas::load(machine.executor.threads()) != nullptr && float_bytes < this_device().memory_bytes / 8) {
    const PackedWeight& packed = prepared.by_default ? *prepared.by_default : prepared.entries.front().copies->front();
    auto made = FloatCopies::make(packed, machine.executor);
    if (!made.ok()) return made.status().with_context(layer.name);
    prepared.floats = *std::move(made);
  }
  std::vector<BenchResult> results;
  for (DType act : spec.acts) {
    for (std::int64_t m : layer.m) {
      step(fmt::format("{} {} M={}", layer.name, name(act), m));
      auto measured = bench_m(prepared, act, m, spec, machine);
      if (!measured.ok()) return measured.status().with_context(layer.name);
      for (BenchResult& result : *measured) results.push_back(std::move(result));
    }
  }
  return results;
}

}  // namespace nibble::tools
