// The CPU as a machine to measure on: runs are timed by the clock, OpenBLAS is the baseline.
#include <chrono>
#include <new>

#include "bench_core.hpp"
#include "blas.hpp"

namespace nibble::tools {
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

// A plan with everything its runs need.
struct PlanRun {
  Plan plan;
  Copies copies;
  Executor& executor;
  BenchWork work;
  BenchActs acts;
  Buffer d, workspace;
  std::size_t next = 0;

  Result<double> operator()() {
    const PackedWeight& weight = (*copies)[next++ % copies->size()];
    const ConstTensorView in = work.a(acts.a.bytes.data());
    const TensorView out = work.d(d.as<std::byte>());
    const EpilogueArgs operands = operands_of(acts, acts.scales.bytes.data(), acts.zeros.bytes.data());
    Status ran;
    const double seconds = seconds_of([&] { ran = plan.run(weight, in, out, operands, workspace.span(), &executor); });
    if (!ran.ok()) return ran;
    return seconds;
  }
};

// One call of the BLAS.
struct BlasRun {
  const Blas& blas;
  std::shared_ptr<const std::vector<Buffer>> copies;
  std::int64_t m, n, k;
  Tensor a;
  Buffer d;
  std::size_t next = 0;

  Result<double> operator()() {
    const float* w = (*copies)[next++ % copies->size()].as<float>();
    return seconds_of([&] { blas.linear(m, n, k, a.as<float>(), w, d.as<float>()); });
  }
};

// The function object of a contestant: std::function copies what it holds, and buffers do not copy.
template <class Run>
std::function<Result<double>()> shared(std::shared_ptr<Run> run) {
  return [run] { return (*run)(); };
}

class OpenBlas : public Baseline {
 public:
  static Result<std::unique_ptr<Baseline>> make(const Blas& blas, const PackedWeight& weight, const BenchMachine& machine) {
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
    return std::unique_ptr<Baseline>(new OpenBlas(blas, n, k, std::move(copies)));
  }

  Result<Contestant> contestant(std::int64_t m) override {
    BlasRun run{.blas = blas_,
                .copies = copies_,
                .m = m,
                .n = n_,
                .k = k_,
                .a = activations(DType::f32, m, k_),
                .d = Buffer(static_cast<std::size_t>(m * n_) * sizeof(float))};
    return Contestant{"openblas_f32", shared(std::make_shared<BlasRun>(std::move(run)))};
  }

 private:
  OpenBlas(const Blas& blas, std::int64_t n, std::int64_t k, std::vector<Buffer> copies)
      : blas_(blas), n_(n), k_(k), copies_(std::make_shared<const std::vector<Buffer>>(std::move(copies))) {}

  const Blas& blas_;
  std::int64_t n_, k_;
  std::shared_ptr<const std::vector<Buffer>> copies_;
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

  Ceiling peak_for(DType act, const ActScheme& quantize) const override { return cpu_peak_for(act, quantize, roofline_); }

  std::uint64_t cold_bytes() const override {
    const DeviceInfo& device = this_device();
    const auto wanted = std::max<std::int64_t>(64 << 20, 3 * device.l3_bytes);
    return static_cast<std::uint64_t>(device.memory_bytes > 0 ? std::min(wanted, device.memory_bytes / 8) : wanted);
  }

  Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) override {
    auto acts = activations_for(work);
    if (!acts.ok()) return acts.status();
    PlanRun run{.plan = plan,
                .copies = copies,
                .executor = executor_,
                .work = work,
                .acts = *std::move(acts),
                .d = Buffer(static_cast<std::size_t>(work.d_elements()) * sizeof(float)),
                .workspace = Buffer(plan.workspace_bytes())};
    return Contestant{std::string(plan.kernel(work.m)), shared(std::make_shared<PlanRun>(std::move(run)))};
  }

  Result<std::unique_ptr<Baseline>> baseline(const PackedWeight& weight) override {
    const Blas* blas = Blas::load(executor_.threads());
    const std::int64_t bytes = weight.n() * weight.k() * static_cast<std::int64_t>(sizeof(float));
    if (blas == nullptr || bytes >= this_device().memory_bytes / 8) return std::unique_ptr<Baseline>();
    return OpenBlas::make(*blas, weight, *this);
  }

  std::string baseline_description() const override {
    const Blas* blas = Blas::load(executor_.threads());
    return blas == nullptr ? "none: OpenBLAS is not installed" : blas->description() + ", the same layer in f32";
  }

 private:
  Executor& executor_;
  RooflineProbe probe_;
  Roofline roofline_;
};

}  // namespace

Ceiling cpu_peak_for(DType act, const ActScheme& quantize, const Roofline& roofline) {
  if (quantize.codes == DType::e4m3) return Ceiling::f32;  // FP8 is multiplied as the floats it stands for
  if (quantize.codes != DType::none) return Ceiling::int8;
  return act == DType::bf16 && roofline.bf16_gflops > 0 ? Ceiling::bf16 : Ceiling::f32;
}

std::unique_ptr<BenchMachine> cpu_machine(Executor& executor) { return std::make_unique<Cpu>(executor); }

}  // namespace nibble::tools
