// Features of GPUs only: packing there, streams, threads, graphs, checkpoint tensors. Conformance of its kernels is in
// conformance_test.cpp. Skipped, with the reason, on a machine without a GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <thread>

#include "checkpoint_words.hpp"
#include "layouts/layout.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using testing::random_weight;

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const Status here = runs_here(Isa::simt); !here.ok()) GTEST_SKIP() << here.message();
  }
};

/// A copy of host bytes on the device; a failure fails the test and leaves null.
DeviceMemory on_device(std::span<const std::byte> bytes) {
  auto memory = DeviceMemory::allocate(bytes.size());
  EXPECT_TRUE(memory.ok()) << memory.status().message();
  if (!memory.ok()) return {};
  EXPECT_TRUE(copy_to_device(memory->data(), bytes.data(), bytes.size()).ok());
  return *std::move(memory);
}

std::vector<std::byte> fetch(const void* from, std::size_t bytes, Stream stream = {}) {
  std::vector<std::byte> host(bytes);
  const Status copied = copy_from_device(host.data(), from, bytes, stream);
  EXPECT_TRUE(copied.ok()) << copied.message();
  return host;
}

TEST_F(Gpu, TellsWhatItIs) {
  const auto gpu = this_gpu();
  ASSERT_TRUE(gpu.ok()) << gpu.status().message();
  EXPECT_FALSE(gpu->name.empty());
  EXPECT_GE(gpu->compute_capability, 75);
  EXPECT_GT(gpu->sms, 0);
  EXPECT_GT(gpu->memory_bytes, std::int64_t{1} << 30);
  EXPECT_GT(gpu->l2_bytes, 1 << 20);
  EXPECT_GT(gpu->read_gbytes_per_s, 100);
  EXPECT_LT(gpu->read_gbytes_per_s, 20000);
  EXPECT_EQ(gpu->has(Isa::sm90), gpu->compute_capability == 90);
  for (Isa isa : {Isa::simt, Isa::sm80, Isa::sm90}) EXPECT_EQ(gpu->has(isa), runs_here(isa).ok()) << name(isa);
}

TEST_F(Gpu, PacksTheBytesTheHostPacks) {
  std::uint64_t seed = 0;
  int packed = 0;
  for (const WeightScheme& scheme : testing::all_schemes())
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {64, 128}, {65, 129}, {130, 480}, {63, 1000}}) {
      ++seed;
      const QuantTensor q =
          random_weight(scheme, n, k, seed, {.act_order = seed % 2 == 0, .prescale = seed % 3 == 0, .bias = true});
      if (!refusal(kGpuTileLayout, q.scheme, q.zeros.dtype, q.k).empty()) continue;
      ++packed;
      const auto there = pack(q, {.backend = Backend::cuda});
      ASSERT_TRUE(there.ok()) << there.status().message();
      EXPECT_EQ(there->backend(), Backend::cuda);
      const auto here = pack(q, {.layout = std::string(kGpuTileLayout.name)});
      ASSERT_TRUE(here.ok()) << here.status().message();
      const auto uploaded = upload(*here);
      ASSERT_TRUE(uploaded.ok()) << uploaded.status().message();
      for (const PackedWeight& weight : {*there, *uploaded}) {
        const auto bytes = fetch(weight.bytes().data(), weight.bytes().size());
        ASSERT_EQ(bytes.size(), here->bytes().size());
        ASSERT_EQ(std::memcmp(bytes.data(), here->bytes().data(), bytes.size()), 0)
            << scheme.name() << " [" << n << "," << k << "]";
        const auto back = unpack(weight);
        ASSERT_TRUE(back.ok()) << back.status().message();
        ASSERT_TRUE(*back == q) << scheme.name() << " [" << n << "," << k << "]";
        const auto downloaded = download(weight);
        ASSERT_TRUE(downloaded.ok()) << downloaded.status().message();
        ASSERT_EQ(downloaded->backend(), Backend::cpu);
        ASSERT_TRUE(std::ranges::equal(downloaded->bytes(), here->bytes()));
        ASSERT_EQ(downloaded->data().channel_sums, here->data().channel_sums);
      }
    }
  EXPECT_GT(packed, 50);
}

/// The workspace of a plan; empty where it needs none.
DeviceMemory workspace_of(const Plan& plan) {
  return plan.workspace_bytes() == 0 ? DeviceMemory()
                                     : on_device(std::vector<std::byte>(plan.workspace_bytes(), std::byte{0xff}));
}

/// The value; an exception, which fails the test with the reason, where there is none.
template <class T>
T must(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

/// A layer on the device, its input, and D of one run in the default stream.
class Layer {
 public:
  Layer(std::int64_t m, std::int64_t n, std::int64_t k, std::uint64_t seed)
      : m_(m),
        n_(n),
        k_(k),
        weight_(must(
            pack(random_weight({DType::u4, ZeroKind::integer, GroupShape::group(128), DType::f16}, n, k, seed, {.bias = true}),
                 {.backend = Backend::cuda}))),
        plan_(must(Plan::linear(weight_, {.a_dtype = DType::f16, .m_max = m, .epilogue = {.bias = true, .out = DType::f16}}))) {
    Tensor a(DType::f16, {m, k});
    for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(seed, static_cast<std::uint64_t>(i)));
    a_ = on_device(a.bytes);
    workspace_ = workspace_of(plan_);
    d_ = on_device(std::vector<std::byte>(d_bytes(), std::byte{0xff}));
    EXPECT_TRUE(run({}).ok());
    expected_ = fetch(d_.data(), d_bytes());
  }

  Status run(Stream stream) const {
    return plan_.run(weight_, ConstTensorView(a_.data(), DType::f16, {m_, k_}), TensorView(d_.data(), DType::f16, {m_, n_}), {},
                     std::span(workspace_.data(), workspace_.size()), stream);
  }
  /// Overwrites D before it is computed again.
  void clear(Stream stream) const {
    ASSERT_EQ(cudaMemsetAsync(d_.data(), 0xff, d_bytes(), static_cast<cudaStream_t>(stream.handle)), cudaSuccess);
  }
  bool is_right(Stream stream) const { return fetch(d_.data(), d_bytes(), stream) == expected_; }
  const Plan& plan() const { return plan_; }
  const PackedWeight& weight() const { return weight_; }

 private:
  std::size_t d_bytes() const { return static_cast<std::size_t>(m_ * n_ * 2); }

  std::int64_t m_, n_, k_;
  PackedWeight weight_;
  Plan plan_;
  DeviceMemory a_, d_, workspace_;
  std::vector<std::byte> expected_;
};

class CudaStream {
 public:
  CudaStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~CudaStream() { (void)cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  Stream get() const { return {stream_}; }
  cudaStream_t native() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Prefills distribute passes in bands of tokens, and pairs of CTAs share passes: a row's bits do not depend on that.
TEST_F(Gpu, ManyTokensHaveTheBitsOfFew) {
  if (const Status here = runs_here(Isa::sm90); !here.ok()) GTEST_SKIP() << here.message();
  constexpr std::int64_t kMany = 4500, kFew = 300, kN = 1096, kK = 640;  // 18 row blocks, the last one with 8 rows
  Tensor a(DType::f16, {kMany, kK});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(7, static_cast<std::uint64_t>(i)));
  const DeviceMemory acts = on_device(a.bytes);
  int kernels_run = 0;
  for (const KernelInfo& kernel : kernels()) {
    const bool floats = kernel.name.starts_with("linear_any_f16_any__cuda_sm90_wgmma");
    const bool codes = kernel.layout == "gpu_w8n64k128" && kernel.name.find("__cuda_sm90_wgmma") != std::string_view::npos;
    const bool integers = kernel.name.starts_with("linear_any_s8_");
    if (kernel.op != Op::linear || !(floats || codes)) continue;
    const Scheme scheme = must(Scheme::parse(floats ? "u4zg128" : integers ? "s8r_s8c" : "e4m3r_e4m3c"));
    const PackedWeight weight = must(pack(random_weight(scheme.weight, kN, kK, 9), {.kernel = std::string(kernel.name)}));
    const Plan plan = must(
        Plan::linear(weight, {.a_dtype = DType::f16, .m_max = kMany, .epilogue = {.out = DType::f16}, .act_scheme = scheme.act},
                     {.kernel = std::string(kernel.name)}));
    const DeviceMemory workspace = workspace_of(plan);
    const auto run = [&](std::int64_t first, std::int64_t m) {
      const std::size_t bytes = static_cast<std::size_t>(m * kN * 2);
      const DeviceMemory d = on_device(std::vector<std::byte>(bytes, std::byte{0xff}));
      const Status status =
          plan.run(weight, ConstTensorView(acts.data() + first * kK * 2, DType::f16, {m, kK}),
                   TensorView(d.data(), DType::f16, {m, kN}), {}, std::span(workspace.data(), workspace.size()), Stream{});
      EXPECT_TRUE(status.ok()) << status.message();
      return fetch(d.data(), bytes);
    };
    const std::vector<std::byte> many = run(0, kMany);
    for (std::int64_t first = 0; first < kMany; first += kFew) {
      const std::vector<std::byte> few = run(first, kFew);
      ASSERT_EQ(std::memcmp(few.data(), many.data() + first * kN * 2, few.size()), 0)
          << kernel.name << ", rows from " << first << " on";
    }
    ++kernels_run;
  }
  EXPECT_GT(kernels_run, 20);
}

/// Stream-K divides passes wherever a CTA's run of records ends and reduces the partial sums: equal to those of the undivided tile except
/// for their order, and the same in every run, in a workspace that is not cleared, and in a graph, whose runs have one ticket.
TEST_F(Gpu, StreamKAddsUpWhatItCuts) {
  if (const Status here = runs_here(Isa::sm90); !here.ok()) GTEST_SKIP() << here.message();
  struct Shape {
    std::int64_t m, n, k;
    DType out = DType::f16;
  };
  // One pass among many CTAs; parts of passes; whole rounds beside them; bands; passes of fewer rows, and of fewer tokens;
  // passes after one of a single row block, with a slow store: the warpgroups of a CTA are then as far apart as its ring allows.
  constexpr Shape kShapes[] = {{7, 200, 8192},     {64, 10240, 2048}, {300, 1096, 4096},
                               {1000, 8200, 1024}, {2100, 4096, 640}, {1920, 8200, 1024, DType::f32}};
  const CudaStream stream;
  int kernels_run = 0;
  for (const KernelInfo& kernel : kernels()) {
    const std::string cut(kernel.name);
    const std::size_t at = cut.find("_streamk_");
    if (kernel.op != Op::linear || at == std::string::npos) continue;
    const std::string uncut = std::string(cut).replace(at, 9, "_wgmma_");
    const bool e4m3 = cut.starts_with("linear_any_e4m3_"), exact = cut.starts_with("linear_any_s8_");
    const DType act = cut.starts_with("linear_any_bf16_")    ? DType::bf16
                      : cut.starts_with("linear_any_f16x2_") ? DType::f32
                                                             : DType::f16;
    const Scheme scheme = must(Scheme::parse(e4m3                                      ? "e4m3r_e4m3c"
                                             : exact                                   ? "s8zr_s8c"
                                             : cut.starts_with("linear_any_e4m3f16_")  ? "e4m3r_u4zg128"
                                             : cut.starts_with("linear_any_s8i16_any") ? "s8g128_u4zg128"
                                                                                       : "u4zg128"));
    ++kernels_run;
    for (const auto& [m, n, k, out] : kShapes) {
      SCOPED_TRACE(::testing::Message() << cut << " M=" << m << " N=" << n << " K=" << k);
      Tensor a(act, {m, k});
      for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(7, static_cast<std::uint64_t>(i)));
      const DeviceMemory acts = on_device(a.bytes);
      const PackedWeight weight = must(pack(random_weight(scheme.weight, n, k, 9), {.kernel = cut}));
      const std::size_t bytes = static_cast<std::size_t>(m * n * bits(out) / 8);
      const DeviceMemory d = on_device(std::vector<std::byte>(bytes, std::byte{0xff}));
      DeviceMemory workspace;
      const auto enqueue = [&](const Plan& plan) {
        EXPECT_EQ(cudaMemsetAsync(d.data(), 0xff, bytes, stream.native()), cudaSuccess);
        const Status status = plan.run(weight, ConstTensorView(acts.data(), act, {m, k}), TensorView(d.data(), out, {m, n}), {},
                                       std::span(workspace.data(), workspace.size()), stream.get());
        EXPECT_TRUE(status.ok()) << status.message();
      };
      const auto result = [&] {
        Tensor t(out, {m, n});
        t.bytes = fetch(d.data(), bytes, stream.get());
        return t;
      };
      const auto plan_with = [&](const std::string& name) {
        return must(Plan::linear(weight, {.a_dtype = act, .m_max = m, .epilogue = {.out = out}, .act_scheme = scheme.act},
                                 {.kernel = name}));
      };
      const Plan whole = plan_with(uncut), plan = plan_with(cut);
      workspace = workspace_of(whole);
      enqueue(whole);
      const Tensor expected = result();
      workspace = workspace_of(plan);
      enqueue(plan);
      const Tensor got = result();

      double squares = 0;
      for (std::int64_t i = 0; i < expected.numel(); ++i) squares += std::pow(expected.at(i), 2);
      const double rms = std::sqrt(squares / static_cast<double>(expected.numel()));
      ASSERT_GT(rms, 1e-4);
      // One rounding to f16, and another order of f32 sums; wgmma keeps 13 bits of sums of e4m3.
      const double slack = exact ? 0.0 : rms * (e4m3 ? 3e-2 : 1e-4);
      for (std::int64_t i = 0; i < expected.numel(); ++i)
        ASSERT_NEAR(got.at(i), expected.at(i), exact ? 0.0 : slack + std::abs(expected.at(i)) / 512)
            << "row " << i / n << " column " << i % n;

      for (int again = 0; again < 3; ++again) {
        enqueue(plan);
        ASSERT_TRUE(result().bytes == got.bytes) << "run " << again;
      }
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
      for (int i = 0; i < 3; ++i) enqueue(plan);
      ASSERT_EQ(cudaStreamEndCapture(stream.native(), &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      for (int replay = 0; replay < 5; ++replay) {
        ASSERT_EQ(cudaGraphLaunch(exec, stream.native()), cudaSuccess);
        EXPECT_TRUE(result().bytes == got.bytes) << "replay " << replay << " of a graph";
      }
      EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
      EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    }
  }
  EXPECT_GE(kernels_run, 20);
}

TEST_F(Gpu, TwoStreamsAtOnce) {
  const Layer layers[] = {{5, 1024, 2048, 1}, {17, 768, 4096, 2}};
  const CudaStream streams[2];
  for (int round = 0; round < 10; ++round) {
    for (std::size_t i : {0, 1}) {
      layers[i].clear(streams[i].get());
      for (int again = 0; again < 5; ++again) ASSERT_TRUE(layers[i].run(streams[i].get()).ok());
    }
    for (std::size_t i : {0, 1}) EXPECT_TRUE(layers[i].is_right(streams[i].get())) << "stream " << i;
  }
}

TEST_F(Gpu, TwoThreadsAtOnce) {
  const Layer layers[] = {{3, 512, 2048, 3}, {33, 640, 1024, 4}};
  std::atomic<int> wrong{0};
  const auto work = [&](const Layer& layer) {
    const CudaStream stream;
    for (int round = 0; round < 20; ++round) {
      layer.clear(stream.get());
      wrong += layer.run(stream.get()).ok() && layer.is_right(stream.get()) ? 0 : 1;
    }
  };
  std::thread other([&] { work(layers[1]); });
  work(layers[0]);
  other.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(Gpu, APlanIsCapturedInAGraph) {
  const Layer first(1, 1024, 1024, 5), second(8, 256, 4096, 6);
  const CudaStream stream;
  ASSERT_EQ(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status captured[] = {first.run(stream.get()), second.run(stream.get()), first.run(stream.get())};
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream.native(), &graph), cudaSuccess);
  for (const Status& status : captured) ASSERT_TRUE(status.ok()) << status.message();
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 3; ++replay) {
    first.clear(stream.get());
    second.clear(stream.get());
    ASSERT_EQ(cudaGraphLaunch(exec, stream.native()), cudaSuccess);
    EXPECT_TRUE(first.is_right(stream.get()));
    EXPECT_TRUE(second.is_right(stream.get()));
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

/// A square layer whose output is as large as its input, so that nothing vanishes or overflows in a long row of them.
QuantTensor square_layer(std::int64_t size, std::uint64_t seed) {
  QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16}, size, size, seed);
  for (std::uint8_t& code : q.codes)
    if (code == 0) code = 8;             // 0 for -8: the mean is 0 then
  constexpr float kDeviation = 0.0435f;  // of such weights: 4.18 of the codes, 0.0104 of random_weight's scales
  q.scale2 = 1.0f / (kDeviation * std::sqrt(static_cast<float>(size)));
  return q;
}

/// A kernel may start before the previous one has finished, if it waits before it touches what that one writes or reads. Layers that feed
/// each other through two buffers give other bits if one does not wait. Nor does it matter that each is told the weight of the next.
TEST_F(Gpu, LayersInARowWaitForEachOther) {
  constexpr int kLayers = 40;  // even: the last one writes the first buffer
  const CudaStream stream;
  for (std::int64_t size : {1024, 4096}) {
    const PackedWeight weights[] = {must(pack(square_layer(size, 1), {.backend = Backend::cuda})),
                                    must(pack(square_layer(size, 9), {.backend = Backend::cuda}))};
    for (std::int64_t m : {1, 8, 16})
      for (const char* kernel : {"", "linear_any_f16_any__cuda_sm80_m16n64k128"}) {  // the plan's choice, and one that is not
        if (*kernel != '\0' && !runs_here(Isa::sm80).ok()) continue;
        const Plan plan = must(
            Plan::linear(weights[0], {.a_dtype = DType::f16, .m_max = m, .epilogue = {.out = DType::f16}}, {.kernel = kernel}));
        SCOPED_TRACE(::testing::Message() << plan.kernel(m) << " M=" << m << " N=K=" << size);
        Tensor x(DType::f16, {m, size});
        for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, random_normal(3, static_cast<std::uint64_t>(i)));
        const DeviceMemory start = on_device(x.bytes);
        const DeviceMemory buffers[] = {on_device(x.bytes), on_device(x.bytes)};
        const DeviceMemory workspace = workspace_of(plan);
        const std::size_t bytes = x.bytes.size();
        const auto enqueue = [&](bool wait) {
          EXPECT_EQ(cudaMemcpyAsync(buffers[0].data(), start.data(), bytes, cudaMemcpyDeviceToDevice, stream.native()),
                    cudaSuccess);
          EXPECT_EQ(cudaMemsetAsync(buffers[1].data(), 0xff, bytes, stream.native()), cudaSuccess);  // NaN
          for (std::size_t layer = 0; layer < kLayers; ++layer) {
            const ConstTensorView from(buffers[layer % 2].data(), DType::f16, {m, size});
            const TensorView to(buffers[(layer + 1) % 2].data(), DType::f16, {m, size});
            Operands operands;
            if (!wait) operands.next = &weights[(layer + 1) % 2];
            const Status ran =
                plan.run(weights[layer % 2], from, to, operands, std::span(workspace.data(), workspace.size()), stream.get());
            EXPECT_TRUE(ran.ok()) << ran.message();
            if (wait) {
              EXPECT_TRUE(synchronize(stream.get()).ok());
            }
          }
        };
        const auto result = [&] { return fetch(buffers[0].data(), bytes, stream.get()); };

        enqueue(true);
        Tensor expected(DType::f16, {m, size});
        expected.bytes = result();
        for (std::int64_t i = 0; i < expected.numel(); ++i) ASSERT_TRUE(std::isfinite(expected.at(i))) << i;
        double squares = 0;  // real values, not zeros
        for (std::int64_t i = 0; i < expected.numel(); ++i) squares += std::pow(expected.at(i), 2);
        ASSERT_GT(squares / static_cast<double>(expected.numel()), 1e-4);

        enqueue(false);
        EXPECT_EQ(std::memcmp(result().data(), expected.bytes.data(), bytes), 0) << "in a stream";

        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
        enqueue(false);
        ASSERT_EQ(cudaStreamEndCapture(stream.native(), &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        for (int replay = 0; replay < 5; ++replay) {
          ASSERT_EQ(cudaGraphLaunch(exec, stream.native()), cudaSuccess);
          EXPECT_EQ(std::memcmp(result().data(), expected.bytes.data(), bytes), 0) << "replay " << replay << " of a graph";
        }
        EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      }
  }
}

/// Codes that TMA cannot read where they lie: the plan has a kernel for them, and integers add up to the same bits.
TEST_F(Gpu, UnalignedCodesGiveTheSameBits) {
  constexpr std::int64_t m = 7, n = 192, k = 256;
  const Scheme scheme = *Scheme::parse("s8r_s8c");
  const QuantTensor q = random_weight(scheme.weight, n, k, 3);
  const LinearSpec spec{.a_dtype = DType::s8, .m_max = m, .epilogue = {.out = DType::f32}, .act_scheme = scheme.act};
  const PackedWeight weight = must(pack(q, spec, {.backend = Backend::cuda}));
  const Plan plan = must(Plan::linear(weight, spec));
  std::vector<std::byte> codes(m * k + 16);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(i * 37);
  const std::vector<float> scales(m, 0.01f);
  const DeviceMemory scale = on_device(std::as_bytes(std::span(scales))), workspace = workspace_of(plan);
  const auto run = [&](std::size_t offset) {
    std::vector<std::byte> shifted(m * k + 16);
    std::memcpy(shifted.data() + offset, codes.data(), m * k);
    const DeviceMemory a = on_device(shifted), d = on_device(std::vector<std::byte>(4 * m * n));
    const Operands operands{.a_scale = ConstTensorView(scale.data(), DType::f32, {m})};
    const Status status =
        plan.run(weight, ConstTensorView(a.data() + offset, DType::s8, {m, k}), TensorView(d.data(), DType::f32, {m, n}),
                 operands, {const_cast<std::byte*>(workspace.data()), workspace.size()}, Stream{});
    EXPECT_TRUE(status.ok()) << status.message();
    return fetch(d.data(), 4 * m * n);
  };
  EXPECT_EQ(run(0), run(1));
}

TEST_F(Gpu, RunTellsHostFromDevice) {
  const Layer layer(1, 64, 128, 7);
  std::vector<std::uint16_t> a(128), d(64);
  const ConstTensorView a_view(a.data(), DType::f16, {1, 128});
  const TensorView d_view(d.data(), DType::f16, {1, 64});
  const Status without_stream = layer.plan().run(layer.weight(), a_view, d_view, {}, {});
  EXPECT_EQ(without_stream.code(), StatusCode::invalid_argument);
  EXPECT_NE(without_stream.message().find("pass a nibble::Stream"), std::string::npos) << without_stream.message();
  const auto q = unpack(layer.weight());
  const auto on_host = pack(*q, {.layout = std::string(kGpuTileLayout.name)});
  const Status other_memory = layer.plan().run(*on_host, a_view, d_view, {}, {}, Stream{});
  EXPECT_EQ(other_memory.code(), StatusCode::invalid_argument);
  EXPECT_NE(other_memory.message().find("this one is in host memory"), std::string::npos) << other_memory.message();
  Operands operands;
  operands.next = &*on_host;
  const Status next = layer.plan().run(layer.weight(), a_view, d_view, operands, {}, Stream{});
  EXPECT_EQ(next.code(), StatusCode::invalid_argument);
  EXPECT_NE(next.message().find("the next weight is in host memory"), std::string::npos) << next.message();
}

/// AWQ and GPTQ of every width, both kinds of GPTQ zero points, act-order, odd sizes and pointers, and a layer of the size of a real one.
TEST_F(Gpu, CheckpointTensorsAreBitExact) {
  if (const Status here = runs_here(Isa::sm80); !here.ok()) GTEST_SKIP() << here.message();
  using Format = CheckpointTensors::Format;
  constexpr std::int64_t kShapes[][2] = {{1, 1},     {8, 8},      {33, 100},   {130, 258},
                                         {136, 264}, {384, 2056}, {1000, 776}, {28672, 8192}};
  constexpr std::size_t kFence = 256;
  std::uint32_t turn = 0;
  for (const auto& [n, k] : kShapes)
    for (const int group : {0, 24, 32, 40, 128})
      for (const auto& [format, width] :
           {std::pair(Format::awq, 4), {Format::gptq, 4}, {Format::gptq, 8}, {Format::gptq, 2}, {Format::gptq, 3}}) {
        const bool awq = format == Format::awq, large = n * k > 2'000'000;
        if (group > k || (awq && n % 8 != 0) || (large && (group != 128 || width != 4))) continue;
        ++turn;
        const bool act_order = !awq && group != 0 && turn % 4 < 2;
        const testing::CheckpointWords words({.format = format,
                                              .bits = width,
                                              .zeros_minus_one = !awq && turn % 2 == 0,
                                              .scale = std::array{DType::f16, DType::bf16, DType::f32}[turn % 3],
                                              .n = n,
                                              .k = k,
                                              .group = group},
                                             act_order, turn);
        const std::size_t skew = turn % 5 == 0 ? 4 : 0;  // bytes: spoils the alignment of vectors
        std::vector<DeviceMemory> keep;
        const auto place = [&](const void* data, std::size_t bytes) -> const void* {
          std::vector<std::byte> shifted(skew + bytes);
          std::memcpy(shifted.data() + skew, data, bytes);
          return keep.emplace_back(on_device(shifted)).data() + skew;
        };
        CheckpointTensors tensors = words.shape;
        tensors.qweight = place(words.qweight.data(), 4 * words.qweight.size());
        tensors.qzeros = place(words.qzeros.data(), 4 * words.qzeros.size());
        tensors.scales = place(words.scales.bytes.data(), words.scales.bytes.size());
        if (act_order) tensors.g_idx = place(words.g_idx.data(), 4 * words.g_idx.size());
        for (const DType out : {DType::f16, DType::bf16, DType::f32})
          for (const bool transposed : {false, true}) {
            if (large && out != DType::f16) continue;
            SCOPED_TRACE(::testing::Message() << "case " << turn << (awq ? " awq" : " gptq") << width << " W[" << n << "," << k
                                              << "] group " << group << " to " << name(out) << (transposed ? " transposed" : ""));
            const std::size_t bytes = static_cast<std::size_t>(n * k * bits(out) / 8), before = kFence + skew;
            const DeviceMemory d = on_device(std::vector<std::byte>(before + bytes + kFence, std::byte{0xff}));
            const TensorView view(d.data() + before, out, {transposed ? k : n, transposed ? n : k});
            const Status status = dequantize(tensors, view, transposed);
            ASSERT_TRUE(status.ok()) << status.message();
            const std::vector<std::byte> all = fetch(d.data(), d.size());
            for (std::size_t i = 0; i < all.size(); i = i + 1 == before ? before + bytes : i + 1)
              ASSERT_EQ(all[i], std::byte{0xff}) << "wrote outside of W, byte " << i;
            Tensor got(out, {n * k}), expected(out, {1});
            std::memcpy(got.bytes.data(), all.data() + before, bytes);
            const std::size_t width_out = expected.bytes.size();
            for (std::int64_t i = 0; i < n * k; i += large ? 997 : 1) {  // of a large one a sample
              const std::int64_t row = transposed ? i % n : i / k, column = transposed ? i / n : i % k;
              expected.set(0, words.value(row, column));
              ASSERT_EQ(std::memcmp(expected.bytes.data(), got.bytes.data() + static_cast<std::size_t>(i) * width_out, width_out),
                        0)
                  << row << "," << column << " is " << got.at(i) << ", expected " << expected.at(0);
            }
          }
      }
  CheckpointTensors bad{.format = Format::gptq, .bits = 5, .n = 8, .k = 8};
  const DeviceMemory memory = on_device(std::vector<std::byte>(1024));
  bad.qweight = bad.qzeros = bad.scales = memory.data();
  const auto refused = [&](const CheckpointTensors& tensors, std::size_t offset) {
    return dequantize(tensors, TensorView(memory.data() + offset, DType::f16, {8, 8}), false).code() ==
           StatusCode::invalid_argument;
  };
  EXPECT_TRUE(refused(bad, 0)) << "5 bits";
  bad.bits = 4;
  EXPECT_FALSE(refused(bad, 0));
  EXPECT_TRUE(refused(bad, 1)) << "an output between elements";
  bad.qweight = memory.data() + 2;
  EXPECT_TRUE(refused(bad, 0)) << "words that begin inside of words";
}

/// Of a token of each kind: ordinary numbers, halves of codes, zeros, tiny and large ones, one side of 0 alone, NaN and infinity.
constexpr std::int64_t kKinds = 10;
float activation(std::int64_t kind, std::int64_t m, std::int64_t k, std::int64_t columns) {
  static const std::vector<float> kNoise = [] {
    std::vector<float> noise((1 << 18) + 7);  // an odd length
    for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = random_normal(17, i);
    return noise;
  }();
  const float x = kNoise[static_cast<std::size_t>(m * columns + k) % kNoise.size()];
  const bool here = k == m * 37 % columns;
  switch (kind) {
    case 1: return x * 1e-3f;
    case 2:  // the inverse of the scale is 1 where this is to be s8 (even tokens) or e4m3
      if (k == 0) return m % 2 == 0 ? 127.0f : 448.0f;
      return m % 2 == 0 ? std::clamp(std::floor(x * 30), -100.0f, 100.0f) + 0.5f
                        : std::clamp(std::floor(x * 100), -400.0f, 400.0f);
    case 3: return k % 2 == 0 ? 0.0f : -0.0f;
    case 4: return x * 1e-36f;
    case 5: return x * 1e4f;
    case 6: return std::abs(x) + 3.0f;
    case 7: return here ? std::numeric_limits<float>::quiet_NaN() : x;
    case 8: return here ? -std::numeric_limits<float>::infinity() : x;
    case 9: return here ? -std::numeric_limits<float>::quiet_NaN() : x * 20;
    default: return x;
  }
}

/// Codes, scales, zero points and sums, bit for bit, and nothing beside them: rows in a CTA of any size, several, parts of rows, and rows too
/// long for registers; gaps between rows, pointers off their alignment, pre-scales, limits.
TEST_F(Gpu, QuantizesActivationsAsTheHost) {
  std::vector<ActScheme> schemes{{DType::s8, GroupShape::channel(), ZeroKind::integer},
                                 {DType::s8, GroupShape::tensor(), ZeroKind::integer}};
  for (const std::int32_t group : {0, 32, 16, 20, 1000})
    schemes.push_back({DType::s8, GroupShape::group(group), ZeroKind::offset});
  for (const DType codes : {DType::s8, DType::e4m3})
    for (const GroupShape& group :
         {GroupShape::tensor(), GroupShape::channel(), GroupShape::group(16), GroupShape::group(32), GroupShape::group(64),
          GroupShape::group(128), GroupShape::group(256), GroupShape::group(24), GroupShape::group(1000), GroupShape::group(3)})
      schemes.push_back({codes, group});
  for (const std::int32_t group : {16, 32, 64, 128, 256, 24, 20, 1000})
    schemes.push_back({DType::s8, GroupShape::group(group), ZeroKind::integer});
  constexpr std::int64_t kShapes[][2] = {{1, 1},      {1, 4096},   {3, 100},    {7, 127},    {5, 129},    {64, 1000},
                                         {2, 8192},   {33, 2049},  {10, 14336}, {272, 4096}, {2300, 500}, {11, 40000},
                                         {4300, 250}, {4353, 257}, {20000, 64}, {50, 28672}, {7, 53248}};
  std::int64_t i = 0;
  for (const auto& [m, k] : kShapes)
    for (const ActScheme& scheme : schemes) {
      ++i;
      const DType type = std::array{DType::f32, DType::f16, DType::bf16}[static_cast<std::size_t>(i % 3)];
      const std::int64_t stride = k + (i % 4 == 0   ? 8
                                       : i % 4 == 1 ? 3
                                                    : 0),
                         offset = i % 5 < 2 ? 1 + i % 5 : 0,
                         pitch = k + (i % 6 < 2   ? (128 - k % 128) % 128
                                      : i % 6 < 4 ? 5
                                                  : 0),
                         groups = scheme.group.cols(k);
      SCOPED_TRACE(::testing::Message() << "case " << i << ": " << name(type) << " to " << Scheme{.act = scheme}.name() << ", "
                                        << m << "x" << k);
      Tensor a(type, {offset + m * stride}), factors(DType::f32, {k});
      for (std::int64_t row = 0; row < m; ++row)
        for (std::int64_t column = 0; column < stride; ++column)
          a.set(offset + row * stride + column,
                column < k ? activation((row + 7 * i) % kKinds, row, column, k) : std::numeric_limits<float>::quiet_NaN());
      for (std::int64_t column = 0; column < k; ++column)
        factors.set(column, 1.0f + 0.3f * random_normal(5, static_cast<std::uint64_t>(column)));
      const auto up = [](std::int64_t bytes) { return static_cast<std::size_t>((bytes + 511) / 256 * 256); };  // and a gap
      const std::size_t codes = 256, scales = codes + up(m * pitch), zeros = scales + up(4 * m * groups),
                        sums = zeros + up(4 * m * groups);
      const auto run = [&](const std::byte* from, const std::byte* by, std::byte* to, auto where) {
        ConstTensorView view(from + offset * bits(type) / 8, type, {m, k});
        view.strides[0] = stride;
        ActOutputs out{.codes = TensorView(to + codes, scheme.codes, {m, k})};
        out.codes.strides[0] = pitch;
        if (scheme.group.k != 0) {
          out.scales = TensorView(to + scales, DType::f32, {m, groups});
          if (i % 2 == 1) out.scales.strides = {1, m};
          if (scheme.zero != ZeroKind::none) {
            out.zeros = TensorView(to + zeros, scheme.zero == ZeroKind::offset ? DType::f32 : DType::s32, {m, groups});
            if (i % 4 < 2) out.zeros.strides = {1, m};
          }
        } else if (scheme.group == GroupShape::channel()) {
          out.scales = TensorView(to + scales, DType::f32, {m});
          if (scheme.zero != ZeroKind::none)
            out.zeros = TensorView(to + zeros, scheme.zero == ZeroKind::offset ? DType::f32 : DType::s32, {m});
        }
        if (scheme.codes == DType::s8 && i % 7 < 4) out.sums = TensorView(to + sums, DType::s32, {m});
        ActOptions options;
        if (i % 7 < 2) options.prescale = ConstTensorView(by, DType::f32, {k});
        if (i % 11 < 3) options.limit = 1.7f;
        if (scheme.group == GroupShape::tensor()) options.known = StaticActs{0.0123f, scheme.zero == ZeroKind::none ? 0 : -13};
        return quantize_activations(view, scheme, out, options, where);
      };
      std::vector<std::byte> expected(sums + up(4 * m), std::byte{0xee});
      const DeviceMemory there = on_device(expected), a_there = on_device(a.bytes), factors_there = on_device(factors.bytes);
      const Status here = run(a.bytes.data(), factors.bytes.data(), expected.data(), static_cast<Executor*>(nullptr));
      ASSERT_TRUE(here.ok()) << here.message();
      const Status ran = run(a_there.data(), factors_there.data(), there.data(), Stream{});
      ASSERT_TRUE(ran.ok()) << ran.message();
      std::vector<std::byte> got = fetch(there.data(), expected.size());
      for (std::size_t at = scales; at < zeros; at += 4) {  // a NaN is a NaN
        float x = 0, y = 0;
        std::memcpy(&x, got.data() + at, 4), std::memcpy(&y, expected.data() + at, 4);
        if (std::isnan(x) && std::isnan(y)) std::memcpy(got.data() + at, expected.data() + at, 4);
      }
      const auto first = std::ranges::mismatch(got, expected).in1 - got.begin();
      ASSERT_EQ(static_cast<std::size_t>(first), got.size())
          << "codes are from " << codes << " on, " << pitch << " apart, scales from " << scales << ", zeros " << zeros
          << ", sums " << sums;
    }
}

/// Activations that quantize_activations() made codes of, and the same ones quantized while running: the same bits from every kernel that
/// takes both.
TEST_F(Gpu, CodesThatWereMadeBeforeGiveTheBitsOfThoseMadeWhileRunning) {
  constexpr std::int64_t m = 37, n = 200, k = 1008;
  Tensor a(DType::f16, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(7, static_cast<std::uint64_t>(i)));
  const DeviceMemory acts = on_device(a.bytes);
  int compared = 0;
  for (const KernelInfo& kernel : kernels()) {
    const bool takes_codes =
        kernel.name.starts_with("linear_any_s8i16_any__cuda_") || kernel.name.starts_with("linear_any_s8_any__cuda_");
    if (!takes_codes || !runs_here(kernel.isa).ok()) continue;
    const std::string forced(kernel.name);
    for (const char* text : {"s8r_u4b8g128", "s8zr_u4zg64", "s8g128_u4zg128", "s8g32_u4b8g32", "s8g256_s8c", "s8zg64_u4zg128",
                             "s8r_s8c", "s8zr_u4zc", "s8or_u4zg128", "s8og32_u4og32", "s8og128_s8g256"})
      for (const bool act_order : {false, true}) {
        SCOPED_TRACE(::testing::Message() << forced << " " << text << (act_order ? ", act-order" : ""));
        const Scheme scheme = must(Scheme::parse(text));
        if (act_order && (scheme.weight.group.k == 0 || scheme.act.group.k != 0)) continue;
        const LinearSpec floats{.a_dtype = DType::f16, .m_max = m, .epilogue = {.out = DType::f32}, .act_scheme = scheme.act};
        LinearSpec given = floats;
        given.a_dtype = DType::s8;
        const auto weight = pack(random_weight(scheme.weight, n, k, 9, {.act_order = act_order}), {.kernel = forced});
        if (!weight.ok() || !Plan::linear(*weight, floats, {.kernel = forced}).ok()) continue;
        const std::int64_t groups = scheme.act.group.cols(k);
        const std::vector<std::byte> none(static_cast<std::size_t>(m * k), std::byte{0xee});
        const DeviceMemory codes = on_device(none), scales = on_device(none), zeros = on_device(none);
        const auto rule = [&](const DeviceMemory& memory, DType type) {
          return scheme.act.group.k == 0 ? TensorView(memory.data(), type, {m}) : TensorView(memory.data(), type, {m, groups});
        };
        ActOutputs out{.codes = TensorView(codes.data(), DType::s8, {m, k}), .scales = rule(scales, DType::f32)};
        Operands operands{.a_scale = out.scales};
        if (scheme.act.zero != ZeroKind::none)
          operands.a_zero = out.zeros = rule(zeros, scheme.act.zero == ZeroKind::offset ? DType::f32 : DType::s32);
        const ConstTensorView view(acts.data(), DType::f16, {m, k});
        const Status quantized = quantize_activations(view, scheme.act, out, {}, Stream{});
        ASSERT_TRUE(quantized.ok()) << quantized.message();
        const auto run = [&](const LinearSpec& spec, const ConstTensorView& from, const Operands& with) {
          const Plan plan = must(Plan::linear(*weight, spec, {.kernel = forced}));
          const DeviceMemory workspace = workspace_of(plan);
          const std::size_t bytes = static_cast<std::size_t>(m * n * 4);
          const DeviceMemory d = on_device(std::vector<std::byte>(bytes, std::byte{0xff}));
          const Status ran = plan.run(*weight, from, TensorView(d.data(), DType::f32, {m, n}), with,
                                      std::span(workspace.data(), workspace.size()), Stream{});
          EXPECT_TRUE(ran.ok()) << ran.message();
          return fetch(d.data(), bytes);
        };
        ASSERT_TRUE(run(given, out.codes, operands) == run(floats, view, {}));
        ++compared;
      }
  }
  EXPECT_GT(compared, 10);
}

/// Every kernel, each twice in a row, in one graph: it starts before the one before it has ended, and gives the bits that it gives alone.
TEST_F(Gpu, KernelsThatOverlapGiveTheBitsOfThoseAlone) {
  constexpr std::int64_t m = 129, few = 33, n = 200, k = 1000;
  struct Subject {
    std::string_view kernel;
    PackedWeight weight;
    Plan plan;
    DType a_dtype;
    DeviceMemory workspace, d[2];
    std::vector<std::byte> alone;
  };
  constexpr DType kTypes[] = {DType::f16, DType::bf16, DType::f32};
  std::map<DType, DeviceMemory> acts;
  for (const DType type : kTypes) {
    Tensor a(type, {m, k});
    for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(7, static_cast<std::uint64_t>(i)));
    acts[type] = on_device(a.bytes);
  }
  constexpr std::size_t kBytes = m * n * 2;
  const std::vector<std::byte> poison(kBytes, std::byte{0xff});
  const CudaStream stream;
  const auto run = [&](const Subject& s, std::int64_t rows, int turn) {
    return s.plan.run(s.weight, ConstTensorView(acts[s.a_dtype].data(), s.a_dtype, {rows, k}),
                      TensorView(s.d[turn].data(), DType::f16, {rows, n}), {}, std::span(s.workspace.data(), s.workspace.size()),
                      stream.get());
  };
  std::vector<Subject> subjects;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != Op::linear || kernel.backend != Backend::cuda || !runs_here(kernel.isa).ok()) continue;
    const std::string forced(kernel.name);
    if (forced.find("_experts_") != std::string::npos) continue;  // does not multiply by one weight
    const std::size_t before = subjects.size();
    for (const char* text : {"u4zg128", "s8g128_u4zg128", "s8zr_s8c", "e4m3r_e4m3c", "e4m3r_u4zg128", "f16", "bf16", "f32"})
      for (const DType type : kTypes) {
        if (subjects.size() != before) continue;
        const Scheme scheme = must(Scheme::parse(text));
        auto weight = pack(random_weight(scheme.weight, n, k, 9), {.kernel = forced});
        if (!weight.ok()) continue;
        auto plan =
            Plan::linear(*weight, {.a_dtype = type, .m_max = m, .epilogue = {.out = DType::f16}, .act_scheme = scheme.act},
                         {.kernel = forced});
        if (!plan.ok()) continue;
        DeviceMemory workspace = workspace_of(*plan);
        subjects.push_back({kernel.name,
                            *std::move(weight),
                            *std::move(plan),
                            type,
                            std::move(workspace),
                            {on_device(poison), on_device(poison)},
                            {}});
      }
    ASSERT_NE(subjects.size(), before) << forced << " takes none of these schemes";
    Subject& s = subjects.back();
    ASSERT_TRUE(run(s, few, 0).ok() && run(s, m, 1).ok()) << forced;
    s.alone = fetch(s.d[1].data(), kBytes, stream.get());
    if (kernel.batch_invariant) {
      EXPECT_EQ(std::memcmp(fetch(s.d[0].data(), kBytes).data(), s.alone.data(), few * n * 2), 0) << forced << ", fewer rows";
    }
  }
  ASSERT_EQ(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  bool captured = true;
  for (const Subject& s : subjects)
    for (const int turn : {0, 1}) captured = captured && run(s, m, turn).ok();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream.native(), &graph), cudaSuccess);
  ASSERT_TRUE(captured);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 3; ++replay) {  // a race may not show at once
    for (const Subject& s : subjects)
      for (const DeviceMemory& d : s.d) ASSERT_EQ(cudaMemsetAsync(d.data(), 0xff, kBytes, stream.native()), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream.native()), cudaSuccess);
    for (const Subject& s : subjects)
      for (const DeviceMemory& d : s.d)
        EXPECT_TRUE(fetch(d.data(), kBytes, stream.get()) == s.alone) << s.kernel << ", replay " << replay;
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(Gpu, VerifyRunsThere) {
  const QuantTensor q = random_weight({DType::u4, ZeroKind::integer, GroupShape::group(128), DType::f16}, 256, 1024, 9);
  for (DType act : {DType::f16, DType::bf16, DType::f32}) {
    VerifySpec spec{.linear = {.a_dtype = act, .m_max = 9}};
    spec.pack.backend = Backend::cuda;
    const auto report = verify_linear(q, spec);
    ASSERT_TRUE(report.ok()) << report.status().message();
    EXPECT_TRUE(report->passed) << report->failure;
    EXPECT_NE(report->kernel.find("__cuda_"), std::string::npos);
  }
}

}  // namespace
}  // namespace nibble
