// Correctness and speed of the kernels that multiply 8-bit codes by 8-bit codes. Needs a GPU.
//
//   w8a8_check check                          every launcher in every configuration against the formula of w8a8_task.hpp
//   w8a8_check bench [FILE.json [1,16,…]]     the kernel table's rows for tensor cores next to cuBLASLt, for these M
//   w8a8_check sums [FILE.json [1,16,…]]      fast and precise sums of e4m3: their times, and their errors against f64
//
// Integers have to give the formula's bits. Sums of e4m3 are compared with f64: kWgmmaBound and kFloatBound. Each configuration
// runs alone first; then all of them, each twice in a row, in one CUDA graph, where a kernel starts before the previous one has ended, and
// must give the bits that it gave alone.
//
// Method of the bench: timing.hpp; a call reads the weight's next copy. cuBLASLt multiplies the same codes, s8 to s32 and e4m3 to
// f16 with fast accumulation, without scales and zero points. Codes are of normal numbers: the GPU is limited by power, and zeros would be
// faster. With many tokens the GPU is warmed up first, and cuBLASLt and the best rows run interleaved: a cool GPU is faster than a hot
// one.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/sm90/gemm/w8a8.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/tasks/w8a8.hpp"
#include "layouts/layout.hpp"
#include "nibble/cuda.hpp"
#include "nibble/version.hpp"
#include "timing.hpp"
#include "w8a8_reference.hpp"

namespace nibble::cuda {
namespace {

template <class T>
T* as(const DeviceMemory& memory) {
  return reinterpret_cast<T*>(memory.data());
}
/// Room for `count` elements; null when there are none.
template <class T>
DeviceMemory room(std::int64_t count) {
  return count == 0 ? DeviceMemory() : must(DeviceMemory::allocate(static_cast<std::size_t>(count) * sizeof(T)));
}

template <class... Args>
void print(fmt::format_string<Args...> text, Args&&... args) {
  std::fputs(fmt::format(text, std::forward<Args>(args)...).c_str(), stdout);
  std::fflush(stdout);
}

constexpr std::int64_t round_up(std::int64_t x, std::int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Scales that keep sums of some ten thousand products within f16.
constexpr float kActScale = 0.01f, kWeightScale = 0.002f;

// ---- check: operands

struct Kind {
  std::string_view name;
  bool integers = true;
  bool grouped = false;  // activations per 128 channels, weights per 128×128 block
  bool act_zeros = false, weight_zeros = false;
  bool known = false;  // a scale and a zero point for all tokens
  int together = 0;    // W8A8Task::together
};
constexpr int kPrecise = kPreciseChannels / gpu_w8::kChannels;
constexpr Kind kKinds[] = {{.name = "s8"},
                           {.name = "s8, zeros of activations", .act_zeros = true},
                           {.name = "s8, zeros of weights", .weight_zeros = true},
                           {.name = "s8, zeros of both", .act_zeros = true, .weight_zeros = true},
                           {.name = "s8, static, zeros of both", .act_zeros = true, .weight_zeros = true, .known = true},
                           {.name = "e4m3", .integers = false},
                           {.name = "e4m3, static", .integers = false, .known = true},
                           {.name = "e4m3, precise", .integers = false, .together = kPrecise},
                           {.name = "e4m3, groups and blocks", .integers = false, .grouped = true}};
constexpr int kBlockRows = 128;

struct Shape {
  std::int64_t m, n, k;
  std::int64_t extra;  // elements between the rows of D
};
// One of everything; odd ends; rows of D that are no whole vectors; more row blocks than SMs; bands of token tiles; a long K.
constexpr Shape kShapes[] = {{1, 64, 128, 0},     {3, 72, 256, 8},      {17, 200, 1000, 3},
                             {70, 333, 1500, 0},  {300, 520, 4096, 0},  {130, 2048, 2048, 8},
                             {1030, 648, 640, 0}, {2100, 264, 384, 16}, {16, 4096, 14336, 0}};

/// A task without an output, the memory it points to, and the expected result.
struct Operands {
  const Kind& kind;
  Shape shape;
  gpu_w8::Geometry geometry;
  std::int64_t pitch, groups;
  DeviceMemory plain, weight, acts, act_scales, act_zeros, act_sums, bias, value, spread;
  W8A8Task task;
  Expected expected;

  Operands(const Kind& the_kind, const Shape& the_shape)
      : kind(the_kind),
        shape(the_shape),
        geometry{.n = shape.n,
                 .k = shape.k,
                 .integers = kind.integers,
                 .has_zeros = kind.weight_zeros,
                 .block_rows = kind.grouped ? kBlockRows : 0},
        pitch(round_up(shape.k, 16)),
        groups(kind.grouped ? geometry.records() : 1) {
    make_weight();
    make_activations();
    bias = room<float>(shape.n);
    fill_scales(as<float>(bias), shape.n, 1.0f, 7);
    task.m = static_cast<int>(shape.m);
    task.together = kind.together;
    task.epilogue.bias = {bias.data(), DType::f32, 0};
    value = room<float>(shape.m * shape.n);
    spread = room<float>(kind.integers ? 0 : shape.m * shape.n);
    expected = {as<float>(value), as<float>(spread)};
    multiply_codes(task, plain.data(), expected);
    REQUIRE(cudaDeviceSynchronize());
  }

 private:
  void make_weight() {
    plain = room<std::byte>(shape.n * shape.k);
    weight = room<std::byte>(geometry.total_bytes());
    fill_codes(plain.data(), shape.n * shape.k, kind.integers, 1);
    pack_codes(plain.data(), geometry, weight.data());
    task.weight = {weight.data(), geometry};
    fill_scales(const_cast<float*>(task.weight.scales()), geometry.scale_count(), kWeightScale, 2);
    if (!kind.integers) return;
    auto* const sums = const_cast<std::int32_t*>(task.weight.sums());
    REQUIRE(cudaMemset(sums, 0, static_cast<std::size_t>(4 * geometry.padded_rows())));
    sum_codes(plain.data(), shape.k, shape.n, shape.k, sums);
    if (kind.weight_zeros) fill_zeros(const_cast<std::int32_t*>(task.weight.zeros()), geometry.padded_rows(), 3);
  }

  /// The gaps between rows hold codes too, which must not be summed.
  void make_activations() {
    acts = room<std::byte>(shape.m * pitch);
    fill_codes(acts.data(), shape.m * pitch, kind.integers, 4);
    task.acts.codes = acts.data();
    task.acts.pitch = pitch;
    task.acts.group = kind.grouped ? gpu_w8::kChannels : 0;
    if (kind.known) {
      task.acts.scale = kActScale;
      task.acts.zero = kind.act_zeros ? -13 : 0;
    } else {
      act_scales = room<float>(shape.m * groups);
      fill_scales(as<float>(act_scales), shape.m * groups, kActScale, 5);
      task.acts.scales = as<float>(act_scales);
      task.acts.scale_row = 1;
      task.acts.scale_group = shape.m;
      act_zeros = room<std::int32_t>(kind.act_zeros ? shape.m : 0);
      if (kind.act_zeros) fill_zeros(as<std::int32_t>(act_zeros), shape.m, 6);
      task.acts.zeros = as<std::int32_t>(act_zeros);
      task.acts.zero_row = 1;
    }
    act_sums = room<std::int32_t>(kind.weight_zeros ? shape.m : 0);
    if (kind.weight_zeros) sum_codes(acts.data(), pitch, shape.m, shape.k, as<std::int32_t>(act_sums));
    task.acts.sums = as<std::int32_t>(act_sums);
  }
};

// ---- check: subjects

/// wgmma keeps about 13 bits of sums of e4m3 and drops the rest for every 32 channels: bounds for 4096 channels or more.
constexpr float kWgmmaBound = 0.02f, kWgmmaBoundChannels = 4096;
/// The same with at most kPreciseChannels summed in tensor cores.
constexpr float kPreciseBound = 6e-3f;  // measured on an H200: 5.1e-3 at most, in one of 667,440 outputs of 1030×648×640
/// Sums in f32, those of mma.sync rounded toward zero.
constexpr float kFloatBound = 2e-3f;

struct Subject {
  std::string name;
  std::function<cudaError_t(const W8A8Task&, cudaStream_t)> launch;
  float spread;             // of its bound for e4m3
  bool may_refuse = false;  // for lack of shared memory
};

/// Configurations that linear_w8a8_sm90 is made for.
bool sensible(const W8A8Config& c, bool grouped) {
  const int groups = w8a8_groups(c.tokens, grouped);
  if (c.blocks * c.depth > groups || (c.blocks == 3 && groups != 3)) return false;
  if (c.depth > 1 && c.tokens > 32) return false;
  if (grouped && c.tokens == 256) return takes_tokens_as_rows(c, grouped);
  return c.blocks * (c.tokens / 8) % c.split == 0;
}

std::vector<W8A8Config> sm90_configs(bool grouped) {
  std::vector<W8A8Config> configs;
  for (int tokens : {16, 32, 64, 128, 256}) {
    for (int blocks : {1, 2, 3, 4})
      for (int depth : {1, 2, 4})
        for (int split : {1, 2, 4, 8}) {
          const W8A8Config c{.tokens = tokens, .blocks = blocks, .depth = depth, .split = split};
          if (sensible(c, grouped)) configs.push_back(c);
        }
  }
  return configs;
}

std::vector<Subject> subjects(const GpuInfo& gpu, bool grouped) {
  std::vector<Subject> all{{"simt", linear_w8a8_simt, kFloatBound}};
  if (gpu.has(Isa::sm80)) all.push_back({"sm80", linear_w8a8_sm80, kFloatBound});
  if (!gpu.has(Isa::sm90)) return all;
  for (const W8A8Config& c : sm90_configs(grouped)) {
    const auto launch = [c](const W8A8Task& task, cudaStream_t stream) { return linear_w8a8_sm90(task, c, stream); };
    all.push_back({fmt::format("sm90 tokens {} blocks {} depth {} split {}", c.tokens, c.blocks, c.depth, c.split), launch,
                   kWgmmaBound, c.split > 1});
  }
  return all;
}

// ---- check: a case

/// Counts failures, and ends the program when it cannot continue.
struct Tally {
  int runs = 0, failures = 0;

  void fail(const std::string& text) {
    print("FAIL {}\n", text);
    if (++failures < 20) return;
    print("and so on\n");
    std::exit(1);
  }
};

/// Waits with a time limit: if two kernels deadlock, the results of the others would be lost.
void finish(cudaStream_t stream, const std::string& what) {
  constexpr auto kPatience = std::chrono::seconds(20);
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) {
      print("FAIL {}: {}\n", what, cudaGetErrorString(state));
      std::_Exit(3);
    }
    if (std::chrono::steady_clock::now() - begin > kPatience) {
      print("FAIL {}: does not end\n", what);
      std::_Exit(3);
    }
    std::this_thread::yield();
  }
}

/// One task with one output type, by every subject.
class Case {
 public:
  Case(const Operands& operands, DType out, const std::vector<Subject>& subjects, cudaStream_t stream, Tally& tally)
      : o_(operands), out_(out), subjects_(subjects), stream_(stream), tally_(tally) {
    stride_ = o_.shape.n + o_.shape.extra;
    slot_bytes_ = round_up((o_.shape.m + 1) * stride_ * element_bytes(), 256);
    outputs_ = room<std::byte>(slot_bytes_ * slots());
    differences_ = room<Difference>(slots());
    poison();
  }

  void run() {
    run_alone();
    for (int replay = 0; replay < kReplays; ++replay) run_in_graph();
    if (exec_ != nullptr) REQUIRE(cudaGraphExecDestroy(exec_));
  }

 private:
  static constexpr int kTurns = 2;    // of a subject in the graph
  static constexpr int kReplays = 3;  // repeated, because a race may not show at once

  std::int64_t element_bytes() const { return out_ == DType::f32 ? 4 : 2; }
  std::int64_t slots() const { return static_cast<std::int64_t>(subjects_.size()) * (1 + kTurns); }
  /// The output of subject i: turn −1 alone, 0 and 1 in the graph.
  std::int64_t slot(std::size_t i, int turn) const {
    return turn < 0 ? static_cast<std::int64_t>(i)
                    : static_cast<std::int64_t>(subjects_.size()) + static_cast<std::int64_t>(i) * kTurns + turn;
  }
  std::byte* output(std::int64_t at) const { return outputs_.data() + at * slot_bytes_; }
  Difference* difference(std::int64_t at) const { return as<Difference>(differences_) + at; }

  std::string name() const {
    return fmt::format("{} -> {}, M {} N {} K {}", o_.kind.name, nibble::name(out_), o_.shape.m, o_.shape.n, o_.shape.k);
  }
  std::string name(std::size_t i) const { return fmt::format("{}, {}", name(), subjects_[i].name); }
  W8A8Task task(std::int64_t at) const {
    W8A8Task task = o_.task;
    task.epilogue.out = out_;
    task.epilogue.d = output(at);
    task.epilogue.d_stride = stride_;
    return task;
  }
  Bound bound(std::size_t i) const {
    if (o_.kind.integers) return {};
    float spread = subjects_[i].spread;
    if (spread == kWgmmaBound)
      spread =
          o_.kind.together > 0 ? kPreciseBound : spread * std::max(1.0f, static_cast<float>(o_.shape.k) / kWgmmaBoundChannels);
    return {.spread = spread, .relative = out_ == DType::f32 ? 1e-6f : 0x1.01p-11f, .absolute = 1e-5f};
  }

  /// All ones: NaN in every type.
  void poison() const {
    REQUIRE(cudaMemset(outputs_.data(), 0xff, outputs_.size()));
    const std::vector<Difference> none(static_cast<std::size_t>(slots()));
    must(copy_to_device(differences_.data(), none.data(), none.size() * sizeof(Difference)));
    REQUIRE(cudaDeviceSynchronize());
  }
  std::vector<Difference> found() const {
    REQUIRE(cudaDeviceSynchronize());
    std::vector<Difference> found(static_cast<std::size_t>(slots()));
    must(copy_from_device(found.data(), differences_.data(), found.size() * sizeof(Difference)));
    return found;
  }

  void run_alone() {
    runs_.assign(subjects_.size(), false);
    for (std::size_t i = 0; i < subjects_.size(); ++i) {
      const W8A8Task t = task(slot(i, -1));
      const cudaError_t launched = subjects_[i].launch(t, stream_);
      if (launched != cudaSuccess) {
        (void)cudaGetLastError();
        if (launched != cudaErrorInvalidConfiguration || !subjects_[i].may_refuse)
          tally_.fail(fmt::format("{}: {}", name(i), cudaGetErrorString(launched)));
        continue;
      }
      runs_[i] = true;
      ++tally_.runs;
      finish(stream_, name(i));
      compare(t, o_.expected, bound(i), difference(slot(i, -1)));
    }
    const std::vector<Difference> all = found();
    for (std::size_t i = 0; i < subjects_.size(); ++i)
      if (const Difference& d = all[static_cast<std::size_t>(slot(i, -1))]; d.count != 0)
        tally_.fail(fmt::format("{}: {} of {} are wrong, first {}", name(i), d.count, o_.shape.m * o_.shape.n,
                                describe(slot(i, -1), static_cast<std::int64_t>(d.first))));
  }

  void capture() {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (std::size_t i = 0; i < subjects_.size(); ++i)
      for (int turn = 0; turn < kTurns && runs_[i]; ++turn) REQUIRE(subjects_[i].launch(task(slot(i, turn)), stream_));
    REQUIRE(cudaStreamEndCapture(stream_, &graph));
    REQUIRE(cudaGraphInstantiate(&exec_, graph, 0));
    REQUIRE(cudaGraphDestroy(graph));
  }

  void run_in_graph() {
    if (exec_ == nullptr) capture();
    const std::int64_t first = slot(0, 0);
    REQUIRE(cudaMemset(output(first), 0xff, static_cast<std::size_t>(slot_bytes_ * (slots() - first))));
    REQUIRE(cudaDeviceSynchronize());
    REQUIRE(cudaGraphLaunch(exec_, stream_));
    finish(stream_, fmt::format("{}, all kernels in a graph", name()));
    for (std::size_t i = 0; i < subjects_.size(); ++i)
      for (int turn = 0; turn < kTurns && runs_[i]; ++turn)
        compare_words(output(slot(i, -1)), output(slot(i, turn)), slot_bytes_ / 4, difference(slot(i, turn)));
    const std::vector<Difference> all = found();
    for (std::size_t i = 0; i < subjects_.size(); ++i)
      for (int turn = 0; turn < kTurns; ++turn)
        if (const Difference& d = all[static_cast<std::size_t>(slot(i, turn))]; d.count != 0 && runs_[i]) {
          std::int64_t at = static_cast<std::int64_t>(d.first) * 4 / element_bytes();
          if (element(slot(i, -1), at) == element(slot(i, turn), at)) ++at;  // the other half of the word
          tally_.fail(fmt::format("{}: in a graph, turn {}: {} words are not as alone, first {}; alone {:.9g}", name(i), turn,
                                  d.count, describe(slot(i, turn), at), element(slot(i, -1), at)));
          runs_[i] = false;  // reported once
        }
  }

  double element(std::int64_t at, std::int64_t i) const {
    if (out_ == DType::f32) return fetch<float>(output(at), i);
    return to_f32(fetch<f16>(output(at), i));
  }
  template <class T>
  static T fetch(const void* from, std::int64_t i) {
    T value;
    must(copy_from_device(&value, static_cast<const T*>(from) + i, sizeof value));
    return value;
  }
  /// Prints element i of an output: its place, its value and the expected value.
  std::string describe(std::int64_t at, std::int64_t i) const {
    const std::int64_t m = i / stride_, n = i % stride_;
    const char* const beyond = m >= o_.shape.m ? " past M" : n >= o_.shape.n ? " past N" : "";
    const std::string is = fmt::format("D[{},{}]{} (row {} of block {}) is {:.9g}", m, n, beyond, n % gpu_w8::kRows,
                                       n / gpu_w8::kRows, element(at, i));
    if (*beyond != '\0') return is;
    const std::int64_t e = m * o_.shape.n + n;
    std::string text = fmt::format("{}, should be {:.9g}", is, fetch<float>(o_.expected.value, e));
    if (!o_.kind.integers) text += fmt::format(" (spread {:.3g})", fetch<float>(o_.expected.spread, e));
    return text;
  }

  const Operands& o_;
  DType out_;
  const std::vector<Subject>& subjects_;
  cudaStream_t stream_;
  Tally& tally_;
  std::int64_t stride_, slot_bytes_;
  DeviceMemory outputs_, differences_;
  std::vector<bool> runs_;  // by subject: it has launched
  cudaGraphExec_t exec_ = nullptr;
};

int check() {
  const GpuInfo gpu = must(this_gpu());
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Tally all;
  for (const Kind& kind : kKinds) {
    const std::vector<Subject> who = subjects(gpu, kind.grouped);
    Tally tally{.failures = all.failures};
    for (const Shape& shape : kShapes) {
      const Operands operands(kind, shape);
      for (DType out : {DType::f16, DType::f32}) Case(operands, out, who, stream, tally).run();
    }
    print("{}: {} kernels, {} runs, {} failures\n", kind.name, who.size(), tally.runs, tally.failures - all.failures);
    all = {.runs = all.runs + tally.runs, .failures = tally.failures};
  }
  REQUIRE(cudaStreamDestroy(stream));
  print("w8a8_check: {} runs, {} failures\n", all.runs, all.failures);
  return all.failures == 0 ? 0 : 1;
}

// ---- bench: layers

struct BenchKind {
  std::string_view name;
  ActScheme act;
  WeightScheme weight;
  int together = 0;  // W8A8Task::together
};
constexpr WeightScheme per_channel(DType codes) { return {codes, ZeroKind::none, GroupShape::channel(), DType::f32}; }
/// Kinds with the same codes are neighbours and share their weights' memory.
const std::array<std::vector<BenchKind>, 2> kBenchKinds{
    {{{"s8", {DType::s8}, per_channel(DType::s8)},
      {"s8 zero points", {DType::s8, GroupShape::channel(), ZeroKind::integer}, per_channel(DType::s8)}},
     {{"e4m3", {DType::e4m3}, per_channel(DType::e4m3)},
      {"e4m3 precise", {DType::e4m3}, per_channel(DType::e4m3), kPrecise},
      {"e4m3 g128",
       {DType::e4m3, GroupShape::group(gpu_w8::kChannels)},
       {DType::e4m3, ZeroKind::none, GroupShape::block(kBlockRows, gpu_w8::kChannels), DType::f32}}}}};

struct Size {
  std::int64_t n, k;
};
constexpr Size kLlama[] = {{4096, 4096},  {6144, 4096},  {8192, 8192},  {10240, 8192},
                           {4096, 14336}, {28672, 4096}, {8192, 28672}, {57344, 8192}};  // bench/shapes/decode.txt

/// Codes of a layer's activations and of copies of its weight.
struct Layer {
  Size size;
  bool integers;
  std::vector<PackedWeightData> weights;
  DeviceMemory acts, act_scales, act_zeros, d;

  Layer(const Size& the_size, DType codes, std::int64_t most_m) : size(the_size), integers(codes == DType::s8) {
    std::int64_t bytes = 0;
    for (const BenchKind& kind : kBenchKinds[integers ? 0 : 1])
      bytes = std::max(bytes, gpu_w8::geometry(kind.weight, size.n, size.k).total_bytes());
    for (int copy = 0; copy < copies_of(static_cast<double>(bytes)); ++copy) {
      PackedWeightData& w = weights.emplace_back();
      w.layout = &kGpuW8Layout;
      w.n = size.n;
      w.k = size.k;
      w.bytes = as_buffer(room<std::byte>(bytes));
      const std::int64_t all_codes = size.n * size.k;  // whole records: in whatever order
      fill_codes(w.bytes.data(), all_codes, integers, static_cast<std::uint32_t>(copy));
      fill_scales(reinterpret_cast<float*>(w.bytes.data() + all_codes), (bytes - all_codes) / 4, kWeightScale, 100);
      const gpu_w8::Geometry geometry = gpu_w8::geometry(kBenchKinds[0][0].weight, size.n, size.k);
      auto* const sums = reinterpret_cast<std::int32_t*>(w.bytes.data() + geometry.sums_offset());
      if (integers) fill_zeros(sums, geometry.padded_rows(), 104);  // any values do for timing
    }
    const std::int64_t groups = size.k / gpu_w8::kChannels;
    acts = room<std::byte>(most_m * size.k);
    act_scales = room<float>(most_m * groups);
    act_zeros = room<std::int32_t>(most_m);
    d = room<std::int32_t>(most_m * size.n);  // of any type
    fill_codes(acts.data(), most_m * size.k, integers, 101);
    fill_scales(as<float>(act_scales), most_m * groups, kActScale, 102);
    fill_zeros(as<std::int32_t>(act_zeros), most_m, 103);
    REQUIRE(cudaDeviceSynchronize());
  }

  int copies() const { return static_cast<int>(weights.size()); }
  static double settle_ms(std::int64_t m) { return m >= 256 ? 100.0 : 0.0; }

  /// Replays of all copies that take a millisecond or more.
  int replays(std::int64_t m) const {
    constexpr double kBytesPerUs = 4.2e6, kOperationsPerUs = 1.2e9, kEnoughUs = 1000;
    const auto products = static_cast<double>(size.n * size.k);
    const double us = copies() * std::max(products / kBytesPerUs, 2.0 * products * static_cast<double>(m) / kOperationsPerUs);
    return static_cast<int>(std::clamp(kEnoughUs / us, 1.0, 10.0));
  }
};

// ---- bench: rows of the kernel table

Problem problem_of(const Layer& layer, const BenchKind& kind, std::int64_t m) {
  Problem p{.m = m, .n = layer.size.n, .k = layer.size.k, .scheme = kind.weight};
  p.layout = kGpuW8Layout.name;
  p.memory = Backend::cuda;
  p.a_dtype = kind.act.codes;
  p.epilogue.out = DType::f16;
  p.act_scheme = kind.act;
  return p;
}

/// The configuration that a row of sm_90 launches.
W8A8Config config_of(const Kernel& row) {
  const int blocks = row.tile.n / gpu_w8::kRows;
  const int split = row.variant == "streamk" ? kStreamK : row.variant == "wgmma" ? 1 : row.variant.back() - '0';
  return {.tokens = row.tile.m, .blocks = blocks, .depth = w8a8_sm90_depth(row.tile.m, blocks), .split = split};
}

/// Rows for tensor cores, without those whose tiles have most of their tokens past M, or that read weights many times over.
bool worth_timing(const Kernel& row, const BenchKind& kind, std::int64_t m) {
  if (row.op != Op::linear || row.isa == Isa::simt || (kind.together > 0 && row.isa != Isa::sm90)) return false;
  const int tokens = row.tile.m;
  if (tokens == 0) return true;  // it chooses by itself
  return (tokens == 16 || tokens < 2 * m) && (tokens >= 128 || m <= 8 * tokens);
}

double time_row(const Kernel& row, Layer& layer, const BenchKind& kind, std::int64_t m, const Problem& problem,
                double settle_ms) {
  const bool grouped = kind.act.group.k != 0;
  EpilogueSpec epilogue;
  epilogue.out = DType::f16;
  StepArgs args;
  args.a = ConstTensorView(layer.acts.data(), kind.act.codes, {m, layer.size.k});
  args.d = TensorView(layer.d.data(), DType::f16, {m, layer.size.n});
  args.epilogue = &epilogue;
  args.act_scheme = kind.act;
  args.operands.a_scale = ConstTensorView(as<float>(layer.act_scales), {m});
  if (grouped) {
    args.operands.a_scale = ConstTensorView(as<float>(layer.act_scales), {m, layer.size.k / gpu_w8::kChannels});
    args.operands.a_scale.strides = {1, m};  // as the quantizer writes them: scales of a group are contiguous
  }
  args.operands.a_zero = ConstTensorView(as<std::int32_t>(layer.act_zeros), {m});
  const std::size_t scratch_bytes = row.workspace == nullptr ? 0 : row.workspace(row, problem);
  const DeviceMemory scratch = room<std::byte>(static_cast<std::int64_t>(scratch_bytes) + 256);
  args.scratch = std::span(scratch.data(), scratch_bytes);
  return time_us(
      layer.copies(),
      [&](int copy, cudaStream_t stream) {
        args.weight = &layer.weights[static_cast<std::size_t>(copy)];
        args.stream = Stream{stream};
        if (kind.together == 0) return must(row.run(row, args));
        W8A8Task task = w8a8_task(args);
        task.together = kind.together;
        REQUIRE(linear_w8a8_sm90(task, config_of(row), stream));
      },
      layer.replays(m), settle_ms);
}

// ---- bench: cuBLASLt

/// Loaded at run time.
class CublasLt {
 public:
  CublasLt() {
    for (const char* file : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      library_ = dlopen(file, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr && find_all() && create_(&handle_) == CUBLAS_STATUS_SUCCESS) return;
      handle_ = nullptr;  // the library is newer than the driver
    }
    print("no cuBLASLt\n");
  }
  explicit operator bool() const { return handle_ != nullptr; }
  std::size_t version() const { return version_(); }

  /// µs of the algorithm that it recommends; none where it has none.
  std::optional<double> time(const Layer& layer, std::int64_t m) {
    const bool integers = layer.integers;
    const cudaDataType_t in = integers ? CUDA_R_8I : CUDA_R_8F_E4M3, out = integers ? CUDA_R_32I : CUDA_R_16F;
    const auto [n, k] = layer.size;
    // It is column-major: Dᵀ[N,M] = W · xᵀ.
    const Owned<cublasLtMatmulDesc_t> operation = make_operation(integers);
    const Owned<cublasLtMatrixLayout_t> w = make_layout(in, k, n), x = make_layout(in, k, m), d = make_layout(out, n, m);
    const Owned<cublasLtMatmulPreference_t> preference = make_preference();
    cublasLtMatmulHeuristicResult_t best{};
    int count = 0;
    const cublasStatus_t asked =
        heuristic_(handle_, operation.get(), w.get(), x.get(), d.get(), d.get(), preference.get(), 1, &best, &count);
    if (asked != CUBLAS_STATUS_SUCCESS || count == 0) return std::nullopt;
    const std::int32_t integer_one = 1, integer_zero = 0;
    const float float_one = 1.0f, float_zero = 0.0f;
    const void* const alpha = integers ? static_cast<const void*>(&integer_one) : &float_one;
    const void* const beta = integers ? static_cast<const void*>(&integer_zero) : &float_zero;
    return time_us(
        layer.copies(),
        [&](int copy, cudaStream_t stream) {
          const std::byte* codes = layer.weights[static_cast<std::size_t>(copy)].bytes.data();
          check(matmul_(handle_, operation.get(), alpha, codes, w.get(), layer.acts.data(), x.get(), beta, layer.d.data(),
                        d.get(), layer.d.data(), d.get(), &best.algo, workspace_.data(), workspace_.size(), stream),
                "cublasLtMatmul");
        },
        layer.replays(m), Layer::settle_ms(m));
  }

 private:
  template <class Handle>
  using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, cublasStatus_t (*)(Handle)>;

  static void check(cublasStatus_t status, const char* what) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    std::fprintf(stderr, "%s: status %d\n", what, static_cast<int>(status));
    std::exit(3);
  }

  template <class Function>
  bool find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    return function != nullptr;
  }
  bool find_all() {
    return find("cublasLtGetVersion", version_) && find("cublasLtCreate", create_) &&
           find("cublasLtMatmulDescCreate", operation_create_) && find("cublasLtMatmulDescDestroy", operation_destroy_) &&
           find("cublasLtMatmulDescSetAttribute", operation_set_) && find("cublasLtMatrixLayoutCreate", layout_create_) &&
           find("cublasLtMatrixLayoutDestroy", layout_destroy_) && find("cublasLtMatmulPreferenceCreate", preference_create_) &&
           find("cublasLtMatmulPreferenceDestroy", preference_destroy_) &&
           find("cublasLtMatmulPreferenceSetAttribute", preference_set_) && find("cublasLtMatmulAlgoGetHeuristic", heuristic_) &&
           find("cublasLtMatmul", matmul_);
  }

  Owned<cublasLtMatmulDesc_t> make_operation(bool integers) {
    cublasLtMatmulDesc_t operation = nullptr;
    check(operation_create_(&operation, integers ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F, integers ? CUDA_R_32I : CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const std::int8_t fast = 1;
    check(operation_set_(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed), "TRANSA");
    if (!integers) check(operation_set_(operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "FAST_ACCUM");
    return {operation, operation_destroy_};
  }
  Owned<cublasLtMatrixLayout_t> make_layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns) {
    cublasLtMatrixLayout_t layout = nullptr;
    check(layout_create_(&layout, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), rows),
          "cublasLtMatrixLayoutCreate");
    return {layout, layout_destroy_};
  }
  Owned<cublasLtMatmulPreference_t> make_preference() {
    cublasLtMatmulPreference_t preference = nullptr;
    check(preference_create_(&preference), "cublasLtMatmulPreferenceCreate");
    const std::uint64_t bytes = workspace_.size();
    check(preference_set_(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes), "MAX_WORKSPACE_BYTES");
    return {preference, preference_destroy_};
  }

  void* library_ = nullptr;
  cublasLtHandle_t handle_ = nullptr;
  DeviceMemory workspace_ = room<std::byte>(std::int64_t{64} << 20);
  decltype(&cublasLtGetVersion) version_ = nullptr;
  decltype(&cublasLtCreate) create_ = nullptr;
  decltype(&cublasLtMatmulDescCreate) operation_create_ = nullptr;
  decltype(&cublasLtMatmulDescDestroy) operation_destroy_ = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) operation_set_ = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create_ = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy_ = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create_ = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy_ = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set_ = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic_ = nullptr;
  decltype(&cublasLtMatmul) matmul_ = nullptr;
};

// ---- bench: all of it

/// The times of a kind's rows for one shape and M.
struct Rows {
  const BenchKind* kind = nullptr;
  Problem problem;
  const Kernel* best = nullptr;
  double best_us = 0.0;
};
double time_row(const Kernel& row, Layer& layer, const Rows& rows, std::int64_t m, double settle_ms) {
  for (PackedWeightData& w : layer.weights) w.scheme = rows.kind->weight;
  return time_row(row, layer, *rows.kind, m, rows.problem, settle_ms);
}
Rows time_rows(Layer& layer, const BenchKind& kind, std::int64_t m) {
  Rows rows{.kind = &kind, .problem = problem_of(layer, kind, m)};
  for (const Kernel& row : kernel_table()) {
    if (row.backend != Backend::cuda || !worth_timing(row, kind, m) || !row.accepts(row, rows.problem).ok()) continue;
    const double us = time_row(row, layer, rows, m, Layer::settle_ms(m) / 2);
    if (rows.best == nullptr || us < rows.best_us) rows.best = &row, rows.best_us = us;
  }
  return rows;
}

/// The times of cuBLASLt, if there is one, and of each kind's best row: interleaved, the median of three where times depend on what ran
/// before. 0: cuBLASLt has none.
double take_turns(CublasLt* cublas, Layer& layer, std::vector<Rows>& kinds, std::int64_t m) {
  const int turns = Layer::settle_ms(m) > 0.0 ? 3 : 1;
  std::vector<std::vector<double>> us(kinds.size() + 1);
  for (int turn = 0; turn < turns; ++turn) {
    us.back().push_back(cublas != nullptr && *cublas ? cublas->time(layer, m).value_or(0.0) : 0.0);
    for (std::size_t i = 0; i < kinds.size(); ++i)
      if (kinds[i].best != nullptr) us[i].push_back(time_row(*kinds[i].best, layer, kinds[i], m, Layer::settle_ms(m)));
  }
  const auto median = [](std::vector<double>& of) {
    if (of.empty()) return 0.0;
    std::ranges::sort(of);
    return of[of.size() / 2];
  };
  for (std::size_t i = 0; i < kinds.size(); ++i) kinds[i].best_us = median(us[i]);
  return median(us.back());
}

/// The exit code.
int write(const char* file, const nlohmann::json& all) {
  if (file == nullptr) return 0;
  std::ofstream out(file);
  out << all.dump(1) << "\n";
  out.close();
  if (out) return 0;
  std::fprintf(stderr, "w8a8_check: cannot write %s; is its folder there, and is there room?\n", file);
  return 1;
}

int bench(const char* file, const std::vector<std::int64_t>& ms) {
  CublasLt cublas;
  nlohmann::json all = {{"device", must(this_gpu()).name}, {"version", NIBBLE_VERSION}, {"rows", nlohmann::json::array()}};
  if (const char* commit = std::getenv("NIBBLE_COMMIT"); commit != nullptr) all["commit"] = commit;
  if (cublas) all["cublaslt_version"] = cublas.version();
  for (const Size& size : kLlama)
    for (const auto& of_codes : kBenchKinds) {
      Layer layer(size, of_codes[0].act.codes, std::ranges::max(ms));
      for (std::int64_t m : ms) {
        std::vector<Rows> kinds;
        for (const BenchKind& kind : of_codes) kinds.push_back(time_rows(layer, kind, m));
        const double peer_us = take_turns(&cublas, layer, kinds, m);
        for (const Rows& rows : kinds) {
          const std::string best(rows.best == nullptr ? "" : rows.best->name);
          print("{:14} {:6} x {:6} M {:5}  {:9.2f} us  cuBLASLt {}  {}\n", rows.kind->name, size.n, size.k, m, rows.best_us,
                peer_us > 0.0 ? fmt::format("{:9.2f}", peer_us) : "        –", best);
          all["rows"].push_back({{"kind", rows.kind->name},
                                 {"n", size.n},
                                 {"k", size.k},
                                 {"m", m},
                                 {"copies", layer.copies()},
                                 {"best", best},
                                 {"best_us", rows.best_us},
                                 {"cublaslt_us", peer_us > 0.0 ? nlohmann::json(peer_us) : nlohmann::json()}});
        }
      }
    }
  return write(file, all);
}

// ---- sums

constexpr Size kLongRows[] = {{8192, 8192}, {8192, 28672}};
/// Fast sums, and precise ones with so many channels in tensor cores at a time.
const std::vector<BenchKind> kSums = [] {
  std::vector<BenchKind> kinds;
  for (const auto& [name, together] : {std::pair("fast", 0), std::pair("1024", 8), std::pair("512", 4), std::pair("256", 2)})
    kinds.push_back({name, {DType::e4m3}, per_channel(DType::e4m3), together});
  return kinds;
}();

/// ‖D − exact‖ / ‖exact‖ of a task that writes f32 or bf16.
double relative_l2(const Operands& operands, const W8A8Config& config, int together, DType out) {
  const std::int64_t count = operands.shape.m * operands.shape.n;
  const DeviceMemory d = room<float>(count);
  W8A8Task task = operands.task;
  task.together = together;
  task.epilogue.out = out;
  task.epilogue.d = d.data();
  task.epilogue.d_stride = operands.shape.n;
  REQUIRE(linear_w8a8_sm90(task, config, nullptr));
  REQUIRE(cudaDeviceSynchronize());
  std::vector<float> got(static_cast<std::size_t>(count)), exact(got.size());
  must(copy_from_device(got.data(), d.data(), got.size() * (out == DType::f32 ? 4 : 2)));
  must(copy_from_device(exact.data(), operands.value.data(), exact.size() * sizeof(float)));
  double moved = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double is = out == DType::f32 ? got[i] : to_f32(reinterpret_cast<const bf16*>(got.data())[i]);
    moved += (is - exact[i]) * (is - exact[i]), norm += double{exact[i]} * exact[i];
  }
  return std::sqrt(moved / norm);
}

int sums(const char* file, const std::vector<std::int64_t>& ms) {
  nlohmann::json all = {{"device", must(this_gpu()).name},
                        {"version", NIBBLE_VERSION},
                        {"channels", kPreciseChannels},
                        {"errors", nlohmann::json::array()},
                        {"rows", nlohmann::json::array()}};
  if (const char* commit = std::getenv("NIBBLE_COMMIT"); commit != nullptr) all["commit"] = commit;
  const Kind plain{.name = "e4m3", .integers = false};
  for (const Size& size : kLongRows) {
    const Operands operands(plain, {.m = 64, .n = 1024, .k = size.k, .extra = 0});
    for (const W8A8Config& config : {W8A8Config{.tokens = 64, .blocks = 1}, W8A8Config{.tokens = 256, .blocks = 2}})
      for (const BenchKind& kind : kSums) {
        const double f32 = relative_l2(operands, config, kind.together, DType::f32);
        const double bf16 = relative_l2(operands, config, kind.together, DType::bf16);
        print("K {:6}  {:3} tokens  {:>4}  relative L2 {:.2e} in f32, {:.2e} in bf16\n", size.k, config.tokens, kind.name, f32,
              bf16);
        all["errors"].push_back({{"k", size.k}, {"tokens", config.tokens}, {"sums", kind.name}, {"f32", f32}, {"bf16", bf16}});
      }
  }
  for (const Size& size : kLongRows) {
    Layer layer(size, DType::e4m3, std::ranges::max(ms));
    for (std::int64_t m : ms) {
      std::vector<Rows> kinds;
      for (const BenchKind& kind : kSums) kinds.push_back(time_rows(layer, kind, m));
      take_turns(nullptr, layer, kinds, m);
      for (const Rows& rows : kinds) {
        const std::string best(rows.best == nullptr ? "" : rows.best->name);
        print("{:6} x {:6} M {:5}  {:>4}  {:9.2f} us  {:+5.1f} %  {}\n", size.n, size.k, m, rows.kind->name, rows.best_us,
              100 * (rows.best_us / kinds.front().best_us - 1), best);
        all["rows"].push_back(
            {{"n", size.n}, {"k", size.k}, {"m", m}, {"sums", rows.kind->name}, {"best", best}, {"best_us", rows.best_us}});
      }
    }
  }
  return write(file, all);
}

/// "1,16" as numbers; empty for anything else.
std::vector<std::int64_t> parse_ms(std::string_view text) {
  std::vector<std::int64_t> ms;
  for (const char *at = text.data(), *const end = at + text.size();; ++at) {
    std::int64_t m = 0;
    const auto [stop, error] = std::from_chars(at, end, m);
    if (error != std::errc() || m < 1 || (stop != end && *stop != ',')) return {};
    ms.push_back(m);
    if ((at = stop) == end) return ms;
  }
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return nibble::cuda::check();
  const auto ms = nibble::cuda::parse_ms(argc > 3 ? argv[3] : "1,16,32,64,128,256,512,1024,4096");
  if (mode == "bench" && !ms.empty()) return nibble::cuda::bench(argc > 2 ? argv[2] : nullptr, ms);
  if (mode == "sums" && !ms.empty()) return nibble::cuda::sums(argc > 2 ? argv[2] : nullptr, ms);
  std::fprintf(stderr, "usage: w8a8_check check | bench [FILE.json [M,M,...]] | sums [FILE.json [M,M,...]]\n");
  return 2;
}
