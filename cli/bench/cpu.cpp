// The CPU as a Machine: runs are timed by the clock; OpenBLAS and oneDNN are baselines.
#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <new>
#include <numeric>

#include "bench/blas.hpp"
#include "bench/core.hpp"
#include "bench/dnnl.hpp"

namespace nibble::cli {
namespace {

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

// Seconds that `work` takes.
template <class Work>
double seconds_of(Work work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A plan with the operands of its runs.
struct PlanRun {
  Plan plan;
  Copies copies;
  Executor& executor;
  BenchWork work;
  BenchActs acts;
  std::size_t d_copies;
  Buffer d, workspace;
  std::size_t next = 0;

  static std::size_t d_bytes(const BenchWork& work) { return static_cast<std::size_t>(work.d_elements()) * sizeof(float); }

  Result<double> operator()() {
    const PackedWeight& weight = (*copies)[next % copies->size()];
    const ConstTensorView in = work.a(acts.a.bytes.data());
    const TensorView out = work.d(d.as<std::byte>() + next++ % d_copies * d_bytes(work));
    const Operands operands = operands_of(work, acts, acts.scales.bytes.data(), acts.zeros.bytes.data(), acts.norm.bytes.data());
    Status ran;
    const double seconds = seconds_of([&] { ran = plan.run(weight, in, out, operands, workspace.span(), &executor); });
    if (!ran.ok()) return ran;
    return seconds;
  }
};

// Plans one after the other, each on the next copy of its weight.
struct SequenceRun {
  std::vector<PlanCall> calls;
  std::size_t copies;
  Executor& executor;
  std::shared_ptr<std::byte> memory;
  Buffer workspace;
  std::size_t next = 0;

  Result<double> operator()() {
    const std::size_t at = next++ % copies;
    Status ran;
    const double seconds = seconds_of([&] {
      for (const PlanCall& call : calls)
        if (ran.ok()) ran = call.plan.run((*call.copies)[at], call.a, call.d, call.operands, workspace.span(), &executor);
    });
    if (!ran.ok()) return ran;
    return seconds;
  }
};

// Calls of a layer of experts, one after the other.
struct MoeRun {
  MoeCalls calls;
  Executor& executor;
  std::shared_ptr<std::byte> memory;
  Buffer workspace;

  Result<double> operator()() {
    Status ran;
    const double seconds = seconds_of([&] {
      for (std::size_t i = 0; i < calls.operands.size() && ran.ok(); ++i) ran = calls.run(i, workspace.span(), &executor);
    });
    if (!ran.ok()) return ran;
    return seconds / static_cast<double>(calls.operands.size());
  }
};

// A quantizer, on the next copy of its activations.
struct QuantizeRun {
  BenchWork work;
  std::optional<StaticActs> known;
  Executor& executor;
  QuantizerMemory parts;
  std::size_t copies;
  Buffer memory;
  std::size_t next = 0;

  Result<double> operator()() {
    std::byte* const at = memory.as<std::byte>() + next++ % copies * parts.bytes;
    Status ran;
    const double seconds = seconds_of([&] { ran = parts.run(work, known, at, &executor); });
    if (!ran.ok()) return ran;
    return seconds;
  }
};

// The function object of a contestant: std::function copies what it holds, and buffers do not copy.
template <class Run>
std::function<Result<double>()> shared(std::shared_ptr<Run> run) {
  return [run] { return (*run)(); };
}

// Dense weights of a layer, in bytes enough for f32. Smaller elements find more copies in them.
using DenseCopies = std::shared_ptr<const std::vector<Buffer>>;

// A product of dense matrices, each on the next copy of the weights.
template <class In, class Out>
struct DenseRun {
  std::function<bool(std::int64_t m, std::int64_t n, std::int64_t k, const In* a, const In* w, Out* d)> product;
  std::string_view library;
  DenseCopies copies;
  std::int64_t m, n, k;
  Tensor a;
  Buffer d;
  std::size_t next = 0;

  Result<double> operator()() {
    constexpr std::size_t kParts = sizeof(float) / sizeof(In);  // NOLINT(bugprone-sizeof-expression)
    const std::size_t at = next++ % (copies->size() * kParts);
    const In* w = (*copies)[at / kParts].template as<In>() + static_cast<std::int64_t>(at % kParts) * n * k;
    bool done = false;
    const double seconds = seconds_of([&] { done = product(m, n, k, a.as<In>(), w, d.as<Out>()); });
    if (!done) return Status(StatusCode::internal, fmt::format("{} refused {}×{}×{}", library, m, n, k));
    return seconds;
  }
};

class Dense : public Baseline {
 public:
  static Result<std::unique_ptr<Baseline>> make(const PackedWeight& weight, const BenchMachine& machine) {
    const std::int64_t n = weight.n(), k = weight.k();
    const std::size_t bytes = static_cast<std::size_t>(n * k) * sizeof(float);
    const auto plan = Plan::dequantize(weight, {});
    if (!plan.ok()) return plan.status();
    const Buffer workspace(plan->workspace_bytes());
    std::vector<Buffer> copies;
    copies.emplace_back(bytes);
    const TensorView d(copies[0].as<float>(), {n, k});
    if (Status ran = plan->run(weight, {}, d, {}, workspace.span(), &machine.executor()); !ran.ok()) return ran;
    for (std::uint64_t total = bytes; total < machine.cold_bytes() && copies.size() < kMaxCopies; total += bytes) {
      copies.emplace_back(bytes);
      std::copy_n(copies[0].as<float>(), n * k, copies.back().as<float>());
    }
    return std::unique_ptr<Baseline>(new Dense(std::move(copies), machine.executor().threads()));
  }

  // f32 for any layer; bf16 for layers of bf16, and int8 for layers of int8 activations, where the library has them.
  Result<std::vector<Contestant>> contestants(const BenchWork& work) override {
    std::vector<Contestant> all;
    if (const Blas* blas = Blas::load(threads_)) {
      all.push_back(
          product<float, float>("openblas_f32", DType::f32, work, [blas](auto m, auto n, auto k, auto a, auto w, auto d) {
            blas->linear(m, n, k, a, w, d);
            return true;
          }));
    }
    const Dnnl* dnnl = Dnnl::load(threads_);
    if (dnnl == nullptr) return all;
    all.push_back(product<float, float>("onednn_f32", DType::f32, work, [dnnl](auto m, auto n, auto k, auto a, auto w, auto d) {
      return dnnl->linear(m, n, k, a, w, d);
    }));
    if (work.a_dtype == DType::bf16 && dnnl->has_bf16())
      all.push_back(product<std::uint16_t, float>(
          "onednn_bf16", DType::bf16, work,
          [dnnl](auto m, auto n, auto k, auto a, auto w, auto d) { return dnnl->linear_bf16(m, n, k, a, w, d); }));
    if (work.act_scheme.codes == DType::s8)
      all.push_back(product<std::int8_t, std::int32_t>(
          "onednn_s8", DType::s8, work,
          [dnnl](auto m, auto n, auto k, auto a, auto w, auto d) { return dnnl->linear_s8(m, n, k, a, w, d); }));
    return all;
  }

 private:
  Dense(std::vector<Buffer> copies, int threads)
      : copies_(std::make_shared<const std::vector<Buffer>>(std::move(copies))), threads_(threads) {}

  template <class In, class Out, class Product>
  Contestant product(std::string_view name, DType type, const BenchWork& work, Product product) const {
    using Run = DenseRun<In, Out>;
    auto run =
        std::make_shared<Run>(Run{.product = product,
                                  .library = name,
                                  .copies = copies_,
                                  .m = work.m,
                                  .n = work.n,
                                  .k = work.k,
                                  .a = type == DType::s8 ? Tensor(type, {work.m, work.k}) : activations(type, work.m, work.k),
                                  .d = Buffer(static_cast<std::size_t>(work.m * work.n) * sizeof(Out))});
    return {std::string(name), shared(std::move(run)), type};
  }

  DenseCopies copies_;
  int threads_;
};

class Cpu : public BenchMachine {
 public:
  explicit Cpu(Executor& executor) : executor_(executor), probe_(executor), roofline_(probe_.roofline()) {}

  Backend backend() const override { return Backend::cpu; }
  Executor& executor() const override { return executor_; }
  const Roofline& roofline() const override { return roofline_; }

  Result<double> probe(Ceiling ceiling, double share) override {
    return probe_.measure(ceiling, share * (ceiling == Ceiling::read ? 0.02 : 0.005));
  }

  Ceiling peak_for(DType a_dtype, const ActScheme& act_scheme) const override {
    return cpu_peak_for(a_dtype, act_scheme, roofline_);
  }

  std::uint64_t cold_bytes() const override {
    const DeviceInfo& device = this_device();
    const auto wanted = std::max<std::int64_t>(64 << 20, 3 * device.l3_bytes);
    return static_cast<std::uint64_t>(device.memory_bytes > 0 ? std::min(wanted, device.memory_bytes / 8) : wanted);
  }

  // Reads new copies and the memory of the probe once. Memory was seen to be read at two thirds of its speed the first time after so much of
  // it had been written, which would be taken for the speed of a kernel, or for the bandwidth that it is compared with.
  void settle(std::span<const std::span<const std::byte>> copies) override {
    executor_.parallel_for(static_cast<std::int64_t>(copies.size()), [&](std::int64_t i) {
      const std::span<const std::byte> bytes = copies[static_cast<std::size_t>(i)];
      sink_.fetch_add(
          std::accumulate(bytes.begin(), bytes.end(), 0U, [](unsigned sum, std::byte b) { return sum + unsigned(b); }),
          std::memory_order_relaxed);
    });
    constexpr double kTimes = 3;  // the probe has more than cold_bytes(), and is slower until then
    (void)probe_.measure(Ceiling::read, kTimes * static_cast<double>(cold_bytes()) / 1e9 / roofline_.read_gbytes_per_s);
  }

  Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) override {
    auto acts = activations_for(work);
    if (!acts.ok()) return acts.status();
    settle_once(copies);
    PlanRun run{.plan = plan,
                .copies = copies,
                .executor = executor_,
                .work = work,
                .acts = *std::move(acts),
                .d_copies = work.d_copies(cold_bytes()),
                .d = Buffer(work.d_copies(cold_bytes()) * PlanRun::d_bytes(work)),
                .workspace = Buffer(plan.workspace_bytes())};
    // The first write to a page waits for the system to provide it.
    std::fill_n(run.d.as<std::byte>(), run.d_copies * PlanRun::d_bytes(work), std::byte{});
    return Contestant{std::string(plan.kernel(work.m)), shared(std::make_shared<PlanRun>(std::move(run)))};
  }

  Result<std::shared_ptr<std::byte>> place(std::span<const std::byte> bytes) override {
    const auto buffer = std::make_shared<Buffer>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), buffer->as<std::byte>());
    return std::shared_ptr<std::byte>(buffer, buffer->as<std::byte>());
  }

  Status fetch(std::span<std::byte> to, const std::byte* from) override {
    std::copy_n(from, to.size(), to.begin());
    return {};
  }

  Result<Contestant> sequence(std::string name, std::vector<PlanCall> calls, std::size_t copies, Calls,
                              std::shared_ptr<std::byte> memory) override {
    std::size_t workspace = 0;
    for (const PlanCall& call : calls) workspace = std::max(workspace, call.plan.workspace_bytes());
    return Contestant{std::move(name), shared(std::make_shared<SequenceRun>(SequenceRun{std::move(calls), copies, executor_,
                                                                                        std::move(memory), Buffer(workspace)}))};
  }

  Result<Contestant> experts(std::string name, MoeCalls calls, Calls, std::shared_ptr<std::byte> memory) override {
    Buffer workspace(calls.plan.workspace_bytes());
    return Contestant{
        std::move(name),
        shared(std::make_shared<MoeRun>(MoeRun{std::move(calls), executor_, std::move(memory), std::move(workspace)}))};
  }

  Result<std::vector<Operator>> operators(const QuantTensor& q, const BenchWork& work) override {
    if (work.operation != Operation::quantize) return std::vector<Operator>();
    const QuantizerMemory parts(work);
    const std::size_t copies = work.d_copies(cold_bytes());
    const auto run =
        std::make_shared<QuantizeRun>(QuantizeRun{work, q.static_acts, executor_, parts, copies, Buffer(copies * parts.bytes)});
    const Tensor a = activations(work.a_dtype, work.m, work.k);
    for (std::size_t i = 0; i < copies; ++i)
      std::copy(a.bytes.begin(), a.bytes.end(), run->memory.as<std::byte>() + i * parts.bytes);
    return std::vector{Operator{{"quantize_activations", shared(run)}, "", parts.scale_bytes}};
  }

  Result<std::unique_ptr<Baseline>> baseline(const QuantTensor&, const PackedWeight& weight) override {
    const std::int64_t bytes = weight.n() * weight.k() * static_cast<std::int64_t>(sizeof(float));
    const bool none = Blas::load(executor_.threads()) == nullptr && Dnnl::load(executor_.threads()) == nullptr;
    if (none || bytes >= this_device().memory_bytes / 8) return std::unique_ptr<Baseline>();
    return Dense::make(weight, *this);
  }

  std::string baseline_description() const override {
    const Blas* blas = Blas::load(executor_.threads());
    const Dnnl* dnnl = Dnnl::load(executor_.threads());
    if (blas == nullptr && dnnl == nullptr) return "none: neither OpenBLAS nor oneDNN is installed";
    const std::string both = blas != nullptr && dnnl != nullptr ? "; " : "";
    return (blas != nullptr ? blas->description() : "") + both + (dnnl != nullptr ? dnnl->description() : "") +
           ", the same layer as dense matrices";
  }

 private:
  // A layer's, for all of its plans.
  void settle_once(const Copies& copies) {
    if (settled_.lock() == copies) return;
    settled_ = copies;
    std::vector<std::span<const std::byte>> bytes;
    for (const PackedWeight& copy : *copies) bytes.push_back(copy.bytes());
    settle(bytes);
  }

  Executor& executor_;
  RooflineProbe probe_;
  Roofline roofline_;
  std::weak_ptr<const std::vector<PackedWeight>> settled_;
  std::atomic<unsigned> sink_{0};
};

}  // namespace

Ceiling cpu_peak_for(DType a_dtype, const ActScheme& act_scheme, const Roofline& roofline) {
  if (act_scheme.codes == DType::e4m3) return Ceiling::f32;  // FP8 is multiplied as floats
  if (act_scheme.codes != DType::none) return Ceiling::int8;
  return a_dtype == DType::bf16 && roofline.bf16_gflops > 0 ? Ceiling::bf16 : Ceiling::f32;
}

std::unique_ptr<BenchMachine> cpu_machine(Executor& executor) { return std::make_unique<Cpu>(executor); }

}  // namespace nibble::cli
