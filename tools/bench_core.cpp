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
    if (kernel.op == Op::linear && kernel.backend != Backend::reference) names.emplace_back(kernel.name);
  }
  return names;
}

// A weight packed for one kernel; kernels that share a layout share the copies.
struct Entry {
  std::string kernel;  // forced; empty: the planner's choice
  std::shared_ptr<const std::vector<PackedWeight>> copies;
};

Result<std::vector<Entry>> pack_for_all(const BenchCase& layer, const BenchSpec& spec, Executor& executor) {
  std::vector<Entry> entries;
  Status refusal;
  for (const std::string& kernel : kernels_to_try(spec)) {
    PackOptions options;
    options.kernel = kernel;
    options.m_max = *std::max_element(layer.m.begin(), layer.m.end());
    options.executor = &executor;
    auto first = pack(layer.weight, options);
    if (!first.ok()) {
      refusal = first.status();
      continue;
    }
    Entry entry{kernel, nullptr};
    for (const Entry& other : entries) {
      if (other.copies->front().layout() == first->layout()) entry.copies = other.copies;
    }
    if (!entry.copies) {
      auto copies = pack_copies(layer.weight, options);
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

// Fills in what follows from the time: traffic counts weights, activations and outputs once each.
void derive(BenchResult& result, const PackedWeight& weight, DType act, const Roofline& roofline) {
  const double element = bits(act) / 8.0;
  const auto m = static_cast<double>(result.m), n = static_cast<double>(result.n), k = static_cast<double>(result.k);
  const double bytes = static_cast<double>(weight.bytes().size()) + element * m * (k + n);
  const double flops = 2 * m * n * k;
  const double memory_us = bytes / (roofline.read_gbytes_per_s * 1e3);
  const double compute_us = flops / (roofline.f32_gflops * 1e3);
  result.gbytes_per_s = bytes / (result.median_us * 1e3);
  result.gflops = flops / (result.median_us * 1e3);
  result.memory_bound = memory_us >= compute_us;
  result.roofline_percent = 100 * std::max(memory_us, compute_us) / result.median_us;
}

std::string_view backend_of(std::string_view kernel) {
  for (const KernelInfo& info : kernels()) {
    if (info.name == kernel) return name(info.backend);
  }
  return "";
}

// One M: plans, contestants, times, results.
Result<std::vector<BenchResult>> bench_m(const BenchCase& layer, std::int64_t m, std::span<const Entry> entries,
                                         const FloatCopies* floats, const BenchSpec& spec, const Roofline& roofline,
                                         Executor& executor) {
  const std::int64_t n = layer.weight.n, k = layer.weight.k;
  const Tensor a = activations(spec.act, m, k);
  const Tensor float_a = activations(DType::f32, m, k);
  const Buffer d(static_cast<std::size_t>(m * n) * sizeof(float));

  LinearSpec linear{.act = spec.act, .m_max = m, .epilogue = {}};
  linear.epilogue.out = spec.act;
  linear.epilogue.bias = !layer.weight.bias.empty();
  std::vector<Run> runs;
  Status refusal;
  for (const Entry& entry : entries) {
    PlanOptions options;
    options.kernel = entry.kernel;
    options.threads = executor.threads();
    auto plan = Plan::linear(entry.copies->front(), linear, options);
    if (!plan.ok()) {
      refusal = plan.status();
      continue;
    }
    const auto workspace = std::make_shared<const Buffer>(plan->workspace_bytes());
    runs.push_back({*std::move(plan), entry.copies, workspace, ConstTensorView(a.bytes.data(), spec.act, {m, k}),
                    TensorView(static_cast<void*>(d.as<std::byte>()), spec.act, {m, n}), &executor});
  }
  if (runs.empty()) return refusal;

  std::vector<Contestant> contestants;
  for (const Run& run : runs) contestants.push_back({std::string(run.plan.kernel(m)), std::cref(run)});
  const Blas* blas = floats == nullptr ? nullptr : Blas::load(executor.threads());
  if (blas != nullptr) {
    contestants.push_back(
        {"openblas_f32", [&](std::size_t i) { blas->linear(m, n, k, float_a.as<float>(), floats->copy(i), d.as<float>()); }});
  }
  const auto timings = time_in_turns(contestants, spec.min_seconds);

  std::vector<BenchResult> results;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].failure->ok()) return *runs[i].failure;
    const PackedWeight& weight = runs[i].copies->front();
    BenchResult& result = results.emplace_back();
    result.name = layer.name;
    result.modules = layer.modules;
    result.m = m, result.n = n, result.k = k;
    result.scheme = layer.weight.scheme.name();
    result.act = name(spec.act);
    result.kernel = contestants[i].name;
    result.backend = backend_of(result.kernel);
    result.layout = weight.layout();
    result.median_us = timings[i].median_us;
    result.samples = timings[i].samples;
    derive(result, weight, spec.act, roofline);
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

std::vector<Timing> time_in_turns(std::span<const Contestant> contestants, double min_seconds) {
  std::vector<std::vector<double>> samples(contestants.size());
  std::vector<std::size_t> copy(contestants.size(), 0);
  for (int round = 0; round < kRounds; ++round) {
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
      double spent = 0;
      do {
        samples[c].push_back(once());
        spent += samples[c].back();
      } while (spent < min_seconds / kRounds);
    }
  }
  std::vector<Timing> timings;
  for (auto& list : samples) timings.push_back({1e6 * median(list), list.size()});
  return timings;
}

Result<std::vector<BenchResult>> bench_layer(const BenchCase& layer, const BenchSpec& spec, const Roofline& roofline,
                                             Executor& executor, const std::function<void(const std::string&)>& step) {
  const auto entries = pack_for_all(layer, spec, executor);
  if (!entries.ok()) return entries.status().with_context(layer.name);
  std::optional<FloatCopies> floats;
  const std::int64_t float_bytes = layer.weight.n * layer.weight.k * static_cast<std::int64_t>(sizeof(float));
  if (spec.baselines && Blas::load(executor.threads()) != nullptr && float_bytes < this_device().memory_bytes / 8) {
    auto made = FloatCopies::make(entries->front().copies->front(), executor);
    if (!made.ok()) return made.status().with_context(layer.name);
    floats = *std::move(made);
  }
  std::vector<BenchResult> results;
  for (std::int64_t m : layer.m) {
    step(fmt::format("{} M={}", layer.name, m));
    auto measured = bench_m(layer, m, *entries, floats ? &*floats : nullptr, spec, roofline, executor);
    if (!measured.ok()) return measured.status().with_context(layer.name);
    for (BenchResult& result : *measured) results.push_back(std::move(result));
  }
  return results;
}

}  // namespace nibble::tools
