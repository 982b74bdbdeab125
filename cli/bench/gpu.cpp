// A GPU as a Machine. A CUDA graph runs the layer on all cold copies one after the other, as a decoder does, and is replayed between two
// events. For isolated calls the graph has an ordinary kernel before each, and a graph of those kernels alone is replayed after it: the
// difference is the layer's. cuBLAS is the baseline, and in f16 it measures the peak.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "bench/core.hpp"
#include "bench/cublas.hpp"

namespace nibble::cli {
namespace {

// Replays between two events: enough for a millisecond or two, which events measure well. A graph of 2048 convolutions needs only one.
constexpr int kMostReplays = 10;
constexpr double kEnoughSeconds = 2e-3;

Status check(cudaError_t code, std::string_view what) {
  if (code == cudaSuccess) return {};
  return {StatusCode::internal, fmt::format("CUDA: {}: {}", what, cudaGetErrorString(code))};
}

// An owned handle of CUDA.
template <class Handle, cudaError_t (*kDestroy)(Handle)>
struct Owned {
  Handle handle = nullptr;

  Owned() = default;
  Owned(Owned&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  ~Owned() {
    if (handle != nullptr) (void)kDestroy(handle);
  }
};
using OwnedStream = Owned<cudaStream_t, cudaStreamDestroy>;
using OwnedEvent = Owned<cudaEvent_t, cudaEventDestroy>;
using OwnedGraph = Owned<cudaGraph_t, cudaGraphDestroy>;
using OwnedExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;

// Enqueues the work once, on copy i of its weights.
using Enqueue = std::function<Status(std::size_t i, cudaStream_t stream)>;

// What is enqueued before each call; nothing where calls are back to back.
Enqueue separator(const GpuReadProbe& probe, Calls calls) {
  if (calls == Calls::back_to_back) return {};
  return [&probe](std::size_t, cudaStream_t stream) { return probe.separate(Stream{stream}); };
}

// A captured graph of the work on each of `count` copies. The time of `separators`, which is a part of it, is subtracted.
class Replay {
 public:
  static Result<Replay> capture(std::size_t count, const Enqueue& enqueue, const Enqueue& separators = {}) {
    Replay made;
    made.count_ = count;
    if (Status captured = made.capture_all(enqueue, separators); !captured.ok()) return captured;
    const auto once = made.replay(made.exec_);
    if (!once.ok()) return once.status();
    made.replays_ = std::clamp(static_cast<int>(kEnoughSeconds / *once), 1, kMostReplays);
    return made;
  }

  // Seconds per run.
  Result<double> operator()() const {
    const auto all = replay(exec_);
    if (!all.ok()) return all;
    if (separators_.handle == nullptr) return per_run(*all);
    const auto separators = replay(separators_);
    if (!separators.ok()) return separators;
    if (*all > *separators) return per_run(*all - *separators);
    return Status(
        StatusCode::internal,
        fmt::format("isolated calls took {:.1f} µs, and what separates them {:.1f} µs: the GPU is busy with something else",
                    1e6 * *all, 1e6 * *separators));
  }

 private:
  double per_run(double seconds) const { return seconds / static_cast<double>(count_); }

  // Seconds that one replay takes.
  Result<double> replay(const OwnedExec& exec) const {
    Status status = check(cudaEventRecord(begin_.handle, stream_.handle), "cudaEventRecord");
    for (int i = 0; i < replays_ && status.ok(); ++i)
      status = check(cudaGraphLaunch(exec.handle, stream_.handle), "cudaGraphLaunch");
    if (status.ok()) status = check(cudaEventRecord(end_.handle, stream_.handle), "cudaEventRecord");
    if (status.ok()) status = check(cudaEventSynchronize(end_.handle), "cudaEventSynchronize");
    float ms = 0;
    if (status.ok()) status = check(cudaEventElapsedTime(&ms, begin_.handle, end_.handle), "cudaEventElapsedTime");
    if (!status.ok()) return status;
    return 1e-3 * static_cast<double>(ms) / replays_;
  }

  Status capture_all(const Enqueue& enqueue, const Enqueue& separators) {
    Status status = check(cudaStreamCreateWithFlags(&stream_.handle, cudaStreamNonBlocking), "cudaStreamCreate");
    if (status.ok()) status = check(cudaEventCreate(&begin_.handle), "cudaEventCreate");
    if (status.ok()) status = check(cudaEventCreate(&end_.handle), "cudaEventCreate");
    if (!status.ok()) return status;
    if (separators) status = capture_into(separators_, separators);
    return status.ok() ? capture_into(exec_, enqueue) : status;
  }

  Status capture_into(OwnedExec& exec, const Enqueue& enqueue) {
    Status status = enqueue(0, stream_.handle);  // loads the code, which is not possible during a capture
    if (status.ok()) status = check(cudaStreamSynchronize(stream_.handle), "cudaStreamSynchronize");
    if (status.ok()) status = check(cudaStreamBeginCapture(stream_.handle, cudaStreamCaptureModeThreadLocal), "capture");
    if (!status.ok()) return status;
    for (std::size_t i = 0; i < count_ && status.ok(); ++i) status = enqueue(i, stream_.handle);
    OwnedGraph graph;
    const Status ended = check(cudaStreamEndCapture(stream_.handle, &graph.handle), "cudaStreamEndCapture");
    if (!status.ok()) return status;
    if (!ended.ok()) return ended;
    return check(cudaGraphInstantiate(&exec.handle, graph.handle, 0), "cudaGraphInstantiate");
  }

  std::size_t count_ = 1;
  int replays_ = 1;
  OwnedStream stream_;
  OwnedEvent begin_, end_;
  OwnedExec exec_, separators_;
};

// A call on copy i of its weights, after what separates it from the last.
Enqueue separated(const Enqueue& separate, const Enqueue& enqueue) {
  if (!separate) return enqueue;
  return [&](std::size_t i, cudaStream_t stream) {
    const Status apart = separate(i, stream);
    return apart.ok() ? enqueue(i, stream) : apart;
  };
}

// A contestant that replays, and keeps what the graph points to.
template <class OperandData>
Result<Contestant> replaying(std::string name, std::size_t count, std::shared_ptr<OperandData> operands, const Enqueue& enqueue,
                             const Enqueue& separate) {
  auto captured = Replay::capture(count, separated(separate, enqueue), separate);
  if (!captured.ok()) return captured.status().with_context(name);
  return Contestant{std::move(name), [operands, replay = std::make_shared<Replay>(*std::move(captured))] { return (*replay)(); }};
}

Result<DeviceMemory> to_device(const Tensor& tensor) {
  if (tensor.empty()) return DeviceMemory();
  auto memory = DeviceMemory::allocate(tensor.bytes.size());
  if (!memory.ok()) return memory.status();
  if (Status copied = copy_to_device(memory->data(), tensor.bytes.data(), tensor.bytes.size()); !copied.ok()) return copied;
  return memory;
}

constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Of a [M,K] or [N,K] matrix of f16.
std::size_t f16_bytes(std::int64_t rows, std::int64_t columns) { return 2 * static_cast<std::size_t>(rows * columns); }

// Activations stay warm, and so do the outputs of products.
struct OperandData {
  DeviceMemory a, scales, zeros, norm, d;
  Operands args;
  std::size_t d_bytes, d_copies;

  std::byte* d_at(std::size_t i) const { return d.data() + i % d_copies * d_bytes; }

  static Result<std::shared_ptr<OperandData>> make(const BenchWork& work, std::uint64_t cold_bytes) {
    const auto acts = activations_for(work);
    if (!acts.ok()) return acts.status();
    auto a = to_device(acts->a), scales = to_device(acts->scales), zeros = to_device(acts->zeros), norm = to_device(acts->norm);
    const std::size_t d_bytes = aligned(static_cast<std::size_t>(work.d_elements()) * sizeof(float));
    const std::size_t d_copies = work.d_copies(cold_bytes);
    auto d = DeviceMemory::allocate(d_copies * d_bytes);
    for (const auto* memory : {&a, &scales, &zeros, &norm, &d}) {
      if (!memory->ok()) return memory->status();
    }
    const Operands args = operands_of(work, *acts, scales->data(), zeros->data(), norm->data());
    return std::make_shared<OperandData>(OperandData{*std::move(a), *std::move(scales), *std::move(zeros), *std::move(norm),
                                                     *std::move(d), args, d_bytes, d_copies});
  }
};

// Cold copies of a dense W[N,K], one after the other.
struct DenseCopies {
  DType type;
  std::size_t bytes, count;
  DeviceMemory memory;

  static Result<std::shared_ptr<DenseCopies>> make(DType type, std::int64_t n, std::int64_t k, std::uint64_t cold_bytes) {
    const std::size_t bytes = aligned(static_cast<std::size_t>(n * k * bits(type) / 8));
    const std::size_t count = copies_in(cold_bytes, bytes);
    auto memory = DeviceMemory::allocate(count * bytes);
    if (!memory.ok()) return memory.status();
    return std::make_shared<DenseCopies>(DenseCopies{type, bytes, count, *std::move(memory)});
  }
  std::byte* at(std::size_t i) const { return memory.data() + i * bytes; }
};

// Where A comes as codes and those of W have 8 bits, their product by cuBLASLt; else that of f16 with the dequantized weight.
class CublasLayer : public Baseline {
 public:
  CublasLayer(Cublas& cublas, const GpuReadProbe& probe, const QuantTensor& q, const PackedWeight& weight,
              std::uint64_t cold_bytes)
      : cublas_(cublas), probe_(probe), q_(q), weight_(weight), cold_bytes_(cold_bytes) {}

  Result<std::vector<Contestant>> contestants(const BenchWork& work) override {
    const bool floats = info(q_.scheme.codes).kind == DTypeKind::floating;
    const bool codes = bits(q_.scheme.codes) == 8 && work.a_dtype == (floats ? DType::e4m3 : DType::s8);
    const BenchWork dense = codes ? work : BenchWork{.a_dtype = DType::f16, .m = work.m, .n = work.n, .k = work.k};
    std::optional<GpuCodesProduct> product;
    if (codes) {
      auto made = GpuCodesProduct::make(work.m, work.n, work.k, work.a_dtype, work.out(), work.accumulation);
      if (made.status().code() == StatusCode::unsupported) return std::vector<Contestant>();
      if (!made.ok()) return made.status();
      product = *std::move(made);
    }
    if (Status copied = copy(dense.a_dtype); !copied.ok()) return copied;
    if (copies_ == nullptr) return std::vector<Contestant>();
    const auto operands = OperandData::make(dense, cold_bytes_);
    if (!operands.ok()) return operands.status();
    struct Kept {
      std::shared_ptr<OperandData> operands;
      std::shared_ptr<DenseCopies> copies;
      std::optional<GpuCodesProduct> product;
    };
    const auto keep = std::make_shared<Kept>(Kept{*operands, copies_, std::move(product)});
    auto made = replaying(
        codes ? fmt::format("cublaslt_{}", name(work.a_dtype)) : "cublas_f16", copies_->count, keep,
        [&](std::size_t i, cudaStream_t stream) {
          const std::byte *const a = keep->operands->a.data(), *const w = keep->copies->at(i);
          std::byte* const d = keep->operands->d.data();
          return keep->product ? keep->product->run(a, w, d, Stream{stream})
                               : cublas_.linear(work.m, work.n, work.k, a, w, d, stream);
        },
        separator(probe_, work.calls));
    if (!made.ok()) return made.status();
    made->dense = dense.a_dtype;
    return std::vector<Contestant>{*std::move(made)};
  }

 private:
  // Null where the layout has no dequantize kernels: it is for activations in codes.
  Status copy(DType type) {
    if (copies_ != nullptr && copies_->type == type) return {};
    copies_ = nullptr;  // its memory is freed before more is asked for
    const auto plan = Plan::dequantize(weight_, {.out = DType::f16});
    if (type == DType::f16 && !plan.ok()) return {};
    auto made = DenseCopies::make(type, q_.n, q_.k, cold_bytes_);
    if (!made.ok()) return made.status();
    copies_ = *std::move(made);
    Status copied;
    for (std::size_t i = 0; i < copies_->count && copied.ok(); ++i)
      copied = type == DType::f16 ? plan->run(weight_, {}, TensorView(copies_->at(i), type, {q_.n, q_.k}), {}, {}, Stream{})
                                  : copy_to_device(copies_->at(i), q_.codes.data(), q_.codes.size());
    return copied.ok() ? synchronize() : copied;
  }

  Cublas& cublas_;
  const GpuReadProbe& probe_;
  const QuantTensor& q_;
  const PackedWeight& weight_;
  std::uint64_t cold_bytes_;
  std::shared_ptr<DenseCopies> copies_;
};

// Cold copies of the tensors of a weight in an AWQ or GPTQ checkpoint, which have its scales and, in whatever order, its codes.
struct StoredWeight {
  CheckpointTensors shape;
  std::size_t qzeros, scales, g_idx, bytes, copies;  // where they begin; qweight is at 0
  DeviceMemory memory;

  static bool has(const QuantTensor& q, CheckpointTensors::Format format) {
    const DTypeInfo& codes = info(q.scheme.codes);
    const bool integers = codes.kind == DTypeKind::uint || codes.kind == DTypeKind::biased;
    const bool exact = q.scheme.zero == ZeroKind::none || q.scheme.zero == ZeroKind::integer;
    const bool awq = format == CheckpointTensors::Format::awq;
    return integers && exact && q.scheme.group.n == 1 && q.scheme.group.k > 0 &&
           (codes.bits == 4 || (!awq && (codes.bits < 4 || codes.bits == 8))) && !(awq && q.n % 8 != 0);
  }

  static Result<std::shared_ptr<StoredWeight>> make(const QuantTensor& q, CheckpointTensors::Format format,
                                                    std::uint64_t cold_bytes) {
    const bool awq = format == CheckpointTensors::Format::awq;
    const std::int64_t b = bits(q.scheme.codes), weight_words = awq ? q.k * (q.n / 8) : (q.k * b + 31) / 32 * q.n,
                       zero_words = q.groups() * (awq ? q.n / 8 : (q.n * b + 31) / 32);
    auto made = std::make_shared<StoredWeight>();
    made->shape = {
        .format = format, .bits = static_cast<int>(b), .scale = q.scheme.scale, .n = q.n, .k = q.k, .group = q.scheme.group.k};
    made->qzeros = aligned(static_cast<std::size_t>(4 * weight_words));
    made->scales = made->qzeros + aligned(static_cast<std::size_t>(4 * zero_words));
    made->g_idx = made->scales + aligned(q.scales.bytes.size());
    made->bytes = made->g_idx + aligned(static_cast<std::size_t>(4 * q.k));
    std::vector<std::byte> host(made->bytes);
    for (std::size_t i = 0; i < made->scales; ++i)
      host[i] = static_cast<std::byte>(q.codes[2 * i % q.codes.size()] | q.codes[(2 * i + 1) % q.codes.size()] << 4);
    std::copy(q.scales.bytes.begin(), q.scales.bytes.end(), host.begin() + static_cast<std::ptrdiff_t>(made->scales));
    std::vector<std::int32_t> groups;
    for (std::int64_t k = 0; k < q.k; ++k) groups.push_back(static_cast<std::int32_t>(k / q.scheme.group.k));
    std::shuffle(groups.begin(), groups.end(), std::mt19937(1));
    std::memcpy(host.data() + made->g_idx, groups.data(), 4 * groups.size());
    made->copies = copies_in(cold_bytes, made->bytes);
    auto memory = DeviceMemory::allocate(made->copies * made->bytes);
    if (!memory.ok()) return memory.status();
    made->memory = *std::move(memory);
    for (std::size_t i = 0; i < made->copies; ++i) {
      if (Status copied = copy_to_device(made->memory.data() + i * made->bytes, host.data(), host.size()); !copied.ok())
        return copied;
    }
    return made;
  }

  CheckpointTensors at(std::size_t i, bool act_order) const {
    const std::byte* const first = memory.data() + i * bytes;
    CheckpointTensors tensors = shape;
    tensors.qweight = first, tensors.qzeros = first + qzeros, tensors.scales = first + scales;
    if (act_order) tensors.g_idx = first + g_idx;
    return tensors;
  }
};

// 10⁹ operations per second of a product for which the time to read operands is negligible.
Result<double> measure_f16_gflops(Cublas& cublas) {
  constexpr std::int64_t kSize = 8192, kRows = 256;  // of Gaussian numbers, which repeat
  const Tensor block = activations(DType::f16, kRows, kSize);
  std::vector<DeviceMemory> matrices;
  for (int i = 0; i < 3; ++i) {
    auto matrix = DeviceMemory::allocate(f16_bytes(kSize, kSize));
    if (!matrix.ok()) return matrix.status();
    for (std::size_t at = 0; i < 2 && at < matrix->size(); at += block.bytes.size()) {
      if (Status copied = copy_to_device(matrix->data() + at, block.bytes.data(), block.bytes.size()); !copied.ok())
        return copied;
    }
    matrices.push_back(*std::move(matrix));
  }
  const auto replay = Replay::capture(1, [&](std::size_t, cudaStream_t stream) {
    return cublas.linear(kSize, kSize, kSize, matrices[0].data(), matrices[1].data(), matrices[2].data(), stream);
  });
  if (!replay.ok()) return replay.status();
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const auto seconds = (*replay)();
    if (!seconds.ok()) return seconds.status();
    best = std::max(best, 2e-9 * kSize * kSize * kSize / *seconds);
  }
  return best;
}

class Gpu : public BenchMachine {
 public:
  static Result<std::unique_ptr<BenchMachine>> make(Executor& executor) {
    const auto info = this_gpu();
    if (!info.ok()) return info.status();
    auto reads = GpuReadProbe::make();
    if (!reads.ok()) return reads.status();
    auto made = std::make_unique<Gpu>(executor, *info, *std::move(reads));
    for (Ceiling ceiling : {Ceiling::read, Ceiling::f16}) {
      const auto value = ceiling == Ceiling::read   ? made->probe(ceiling, 1)
                         : made->cublas_ != nullptr ? measure_f16_gflops(*made->cublas_)
                                                    : Result<double>(0.0);
      if (!value.ok()) return value.status();
      made->roofline_[ceiling] = *value;
    }
    return std::unique_ptr<BenchMachine>(std::move(made));
  }

  Gpu(Executor& executor, GpuInfo info, GpuReadProbe reads)
      : executor_(executor), info_(std::move(info)), reads_(std::move(reads)), cublas_(Cublas::load()) {}

  Backend backend() const override { return Backend::cuda; }
  Executor& executor() const override { return executor_; }
  const Roofline& roofline() const override { return roofline_; }

  // The peak is measured once: a measurement beside each run would heat the GPU.
  Result<double> probe(Ceiling ceiling, double) override {
    return ceiling == Ceiling::read ? reads_.measure() : roofline_[ceiling];
  }

  // bf16 products are as fast.
  Ceiling peak_for(DType a_dtype, const ActScheme&) const override { return a_dtype == DType::f32 ? Ceiling::f32 : Ceiling::f16; }

  std::uint64_t cold_bytes() const override {
    constexpr std::int64_t kEnough = 400'000'000;
    return static_cast<std::uint64_t>(std::max(kEnough, 6 * info_.l2_bytes));
  }

  Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) override {
    BenchWork shared = work;  // by all ways of calling
    shared.calls = Calls::back_to_back;
    if (operands_ == nullptr || work_ != shared) {
      operands_ = nullptr;  // its memory is freed before more is asked for
      auto made = OperandData::make(work, cold_bytes());
      if (!made.ok()) return made.status();
      operands_ = *std::move(made);
      work_ = shared;
    }
    auto workspace =
        plan.workspace_bytes() == 0 ? Result<DeviceMemory>(DeviceMemory()) : DeviceMemory::allocate(plan.workspace_bytes());
    if (!workspace.ok()) return workspace.status();
    struct Kept {
      std::shared_ptr<OperandData> operands;
      Copies copies;
      DeviceMemory workspace;
    };
    const auto keep = std::make_shared<Kept>(Kept{operands_, copies, *std::move(workspace)});
    const OperandData& on_gpu = *keep->operands;
    return replaying(
        std::string(plan.kernel(work.m)), copies->size(), keep,
        [&](std::size_t i, cudaStream_t stream) {
          Operands args = on_gpu.args;
          if (work.calls == Calls::chain) args.next = &(*copies)[(i + 1) % copies->size()];
          return plan.run((*copies)[i], work.a(on_gpu.a.data()), work.d(on_gpu.d_at(i)), args,
                          std::span(keep->workspace.data(), keep->workspace.size()), Stream{stream});
        },
        separator(reads_, work.calls));
  }

  Result<std::shared_ptr<std::byte>> place(std::span<const std::byte> bytes) override {
    auto memory = DeviceMemory::allocate(bytes.size());
    if (!memory.ok()) return memory.status();
    if (Status copied = copy_to_device(memory->data(), bytes.data(), bytes.size()); !copied.ok()) return copied;
    const auto keep = std::make_shared<DeviceMemory>(*std::move(memory));
    return std::shared_ptr<std::byte>(keep, keep->data());
  }

  Status fetch(std::span<std::byte> to, const std::byte* from) override { return copy_from_device(to.data(), from, to.size()); }

  Result<Contestant> sequence(std::string name, std::vector<PlanCall> calls, std::size_t copies, Calls way,
                              std::shared_ptr<std::byte> memory) override {
    std::size_t workspace_bytes = 1;
    for (const PlanCall& call : calls) workspace_bytes = std::max(workspace_bytes, call.plan.workspace_bytes());
    auto workspace = DeviceMemory::allocate(workspace_bytes);
    if (!workspace.ok()) return workspace.status();
    struct Kept {
      std::vector<PlanCall> calls;
      std::shared_ptr<std::byte> memory;
      DeviceMemory workspace;
    };
    const auto keep = std::make_shared<Kept>(Kept{std::move(calls), std::move(memory), *std::move(workspace)});
    const std::vector<PlanCall>& all = keep->calls;
    const Enqueue separate = separator(reads_, way);
    const auto run = [&](std::size_t call, std::size_t i, cudaStream_t stream) {
      const bool last = call + 1 == all.size();
      Operands operands = all[call].operands;
      if (way == Calls::chain) operands.next = &(*all[last ? 0 : call + 1].copies)[last ? (i + 1) % copies : i];
      return all[call].plan.run((*all[call].copies)[i], all[call].a, all[call].d, operands,
                                std::span(keep->workspace.data(), keep->workspace.size()), Stream{stream});
    };
    // All calls, or what separates them alone.
    const auto each = [&](bool runs) -> Enqueue {
      return [&, runs](std::size_t i, cudaStream_t stream) {
        Status status;
        for (std::size_t call = 0; call < all.size() && status.ok(); ++call) {
          if (separate) status = separate(i, stream);
          if (runs && status.ok()) status = run(call, i, stream);
        }
        return status;
      };
    };
    auto captured = Replay::capture(copies, each(true), separate ? each(false) : Enqueue());
    if (!captured.ok()) return captured.status().with_context(name);
    return Contestant{std::move(name), [keep, replay = std::make_shared<Replay>(*std::move(captured))] { return (*replay)(); }};
  }

  Result<Contestant> experts(std::string name, MoeCalls calls, Calls way, std::shared_ptr<std::byte> memory) override {
    auto workspace = DeviceMemory::allocate(calls.plan.workspace_bytes());
    if (!workspace.ok()) return workspace.status();
    struct Kept {
      MoeCalls calls;
      std::shared_ptr<std::byte> memory;
      DeviceMemory workspace;
    };
    const auto keep = std::make_shared<Kept>(Kept{std::move(calls), std::move(memory), *std::move(workspace)});
    return replaying(
        std::move(name), keep->calls.operands.size(), keep,
        [&](std::size_t i, cudaStream_t stream) {
          return keep->calls.run(i, std::span(keep->workspace.data(), keep->workspace.size()), Stream{stream});
        },
        separator(reads_, way));
  }

  Result<std::vector<Operator>> operators(const QuantTensor& q, const BenchWork& work) override {
    std::vector<Operator> made;
    if (work.operation == Operation::quantize) {
      auto quantizer = quantizer_of(q, work);
      if (!quantizer.ok()) return quantizer.status();
      made.push_back(*std::move(quantizer));
      return made;
    }
    for (const auto& [name, format, act_order] : {std::tuple("awq", CheckpointTensors::Format::awq, false),
                                                  {"gptq", CheckpointTensors::Format::gptq, false},
                                                  {"gptq_act_order", CheckpointTensors::Format::gptq, true}}) {
      if (!StoredWeight::has(q, format)) continue;
      auto dequantizer = dequantizer_of(q, work, name, format, act_order);
      if (dequantizer.status().code() == StatusCode::unsupported) continue;
      if (!dequantizer.ok()) return dequantizer.status();
      made.push_back(*std::move(dequantizer));
    }
    return made;
  }

  Result<std::unique_ptr<Baseline>> baseline(const QuantTensor& q, const PackedWeight& weight) override {
    const auto bytes = static_cast<std::int64_t>(f16_bytes(weight.n(), weight.k()));
    if (cublas_ == nullptr || bytes >= info_.memory_bytes / 8) return std::unique_ptr<Baseline>();
    return std::unique_ptr<Baseline>(new CublasLayer(*cublas_, reads_, q, weight, cold_bytes()));
  }

  std::string baseline_description() const override {
    return cublas_ == nullptr ? "none: there is no libcublas.so.13 or .12"
                              : cublas_->description() + ", the same layer in f16, or its codes without scales";
  }

 private:
  Result<Operator> quantizer_of(const QuantTensor& q, const BenchWork& work) {
    const QuantizerMemory parts(work);
    const std::size_t copies = work.d_copies(cold_bytes());
    auto memory = DeviceMemory::allocate(copies * parts.bytes);
    if (!memory.ok()) return memory.status();
    const auto keep = std::make_shared<DeviceMemory>(*std::move(memory));
    const Tensor a = activations(work.a_dtype, work.m, work.k);
    for (std::size_t i = 0; i < copies; ++i) {
      if (Status copied = copy_to_device(keep->data() + i * parts.bytes, a.bytes.data(), a.bytes.size()); !copied.ok())
        return copied;
    }
    auto made = replaying(
        "quantize_activations", copies, keep,
        [&](std::size_t i, cudaStream_t stream) {
          return parts.run(work, q.static_acts, keep->data() + i * parts.bytes, Stream{stream});
        },
        separator(reads_, work.calls));
    if (!made.ok()) return made.status();
    return Operator{*std::move(made), "", parts.scale_bytes};
  }

  Result<Operator> dequantizer_of(const QuantTensor& q, const BenchWork& work, const std::string& format_name,
                                  CheckpointTensors::Format format, bool act_order) {
    const auto stored = StoredWeight::make(q, format, cold_bytes());
    if (!stored.ok()) return stored.status();
    const auto operands = OperandData::make(work, cold_bytes());
    if (!operands.ok()) return operands.status();
    const auto keep =
        std::make_shared<std::pair<std::shared_ptr<StoredWeight>, std::shared_ptr<OperandData>>>(*stored, *operands);
    auto made = replaying(
        "dequantize_" + format_name, (*stored)->copies, keep,
        [&](std::size_t i, cudaStream_t stream) {
          return dequantize((*stored)->at(i, act_order), work.d((*operands)->d_at(i)), work.transposed, Stream{stream});
        },
        separator(reads_, work.calls));
    if (!made.ok()) return made.status();
    return Operator{*std::move(made), format_name, static_cast<double>((*stored)->bytes)};
  }

  Executor& executor_;
  GpuInfo info_;
  GpuReadProbe reads_;
  Cublas* cublas_;
  Roofline roofline_;
  BenchWork work_;
  std::shared_ptr<OperandData> operands_;  // of work_: the contestants of a cell share them
};

}  // namespace

Result<std::unique_ptr<BenchMachine>> gpu_machine(Executor& executor) { return Gpu::make(executor); }

}  // namespace nibble::cli
