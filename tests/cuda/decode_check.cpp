// Correctness and speed of the CUDA decode and GEMM kernels. Needs a GPU.
//
//   decode_check check [--small] [FILE.json]       correctness only; --small: sizes for compute-sanitizer
//   decode_check bench [FILE.json] [--split 1,2] [--smem BYTES] [--m 1,8] [--shape NxK] [--no-cublas]
//                      [--sm80 | --gemm80]       decode without TMA; GEMM for M = 32 … 1024
//
// Method of the bench: a CUDA graph runs the layer over rotating cold copies of the weight (≥ 400 MB in total, L2 is 60 MB); events
// around 10 replays; the median of 7. Gaussian activations, random codes: zeros would be faster, because the GPU is limited by power.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/row_decoder.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/decode_cost.hpp"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/gemm.hpp"
#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "random_weights.hpp"
#include "timing.hpp"

namespace nibble::cuda {
namespace {

/// Device memory that frees itself.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size) : size_(size) { REQUIRE(cudaMalloc(&data_, size)); }
  DeviceBytes(const void* from, std::size_t size) : DeviceBytes(size) {
    REQUIRE(cudaMemcpy(data_, from, size, cudaMemcpyHostToDevice));
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::uint8_t* get() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_;
};

/// A weight packed on the host, on the device.
struct OnDevice {
  PackedWeight packed;
  DeviceWeight weight;

  explicit OnDevice(const QuantTensor& q)
      : packed(must(upload(must(nibble::pack(q, {.layout = std::string(kGpuTileLayout.name)}))))),
        weight(device_weight(packed.data())) {}
};

std::uint16_t to_16(float v, DType type) { return type == DType::f16 ? to_f16(v).bits : to_bf16(v).bits; }
float from_16(std::uint16_t v, DType type) { return type == DType::f16 ? to_f32(f16{v}) : to_f32(bf16{v}); }
int size_of(DType type) { return type == DType::f32 ? 4 : 2; }

/// x[rows, stride] of Gaussian numbers; NaN past K.
std::vector<std::uint16_t> activations(int rows, std::int64_t k, std::int64_t stride, DType type) {
  std::vector<std::uint16_t> x(static_cast<std::size_t>(rows * stride), 0x7fff);
  for (int r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < k; ++i)
      x[static_cast<std::size_t>(r * stride + i)] = to_16(random_normal(11, static_cast<std::uint64_t>(r * k + i)), type);
  return x;
}

/// For the current device.
Result<DecodeConfig> configured(const gpu_tile::Geometry& weight, const DecodeConfig& asked) {
  NIBBLE_ASSIGN_OR_RETURN(const RingRoom room, ring_room());
  return configure_decode(weight, 0, room, asked);
}

using Run = std::function<cudaError_t(const LinearTask&)>;

template <int kTokens>
cudaError_t run_sm90(const LinearTask& task) {
  const Result<DecodeConfig> config = configured(task.weight.geometry, {.tokens = kTokens});
  return config.ok() ? linear_decode_sm90(task, *config, nullptr) : cudaErrorInvalidConfiguration;
}
cudaError_t run_sm80(const LinearTask& task) { return linear_decode_sm80(task, nullptr); }
cudaError_t run_gemm80(const LinearTask& task) { return linear_gemm_sm80(task, nullptr); }

/// A kernel to check, its configuration and its tolerance.
struct Subject {
  const char* name;
  Run run;
  bool only_sm90;
  bool rounds_weights;  // to the activations' type
  std::vector<int> m;   // the first is the largest; rows of the others are compared with its rows
};
const std::vector<int> kDecodeM{33, 1, 2, 7, 8, 9, 16, 17, 33};
const std::vector<int> kGemmM{129, 1, 8, 17, 32, 33, 64, 65, 100, 128, 129};

struct CheckResult {
  int cases = 0, failures = 0;
  double worst = 0;  // error over tolerance
};

/// All of D from the device, canaries included.
std::vector<std::uint8_t> run_once(const Run& run, LinearTask task, const char* name, CheckResult& result) {
  constexpr std::size_t kCanary = 256;
  const std::size_t bytes = static_cast<std::size_t>(task.m * task.epilogue.d_stride * size_of(task.epilogue.out));
  DeviceBytes d(bytes + 2 * kCanary);
  REQUIRE(cudaMemset(d.get(), 0xff, d.size()));  // NaN in every type
  task.epilogue.d = d.get() + kCanary;
  const cudaError_t launched = run(task);
  const cudaError_t finished = cudaDeviceSynchronize();
  if (launched != cudaSuccess || finished != cudaSuccess) {
    std::printf("FAIL %s m=%d: %s / %s\n", name, task.m, cudaGetErrorString(launched), cudaGetErrorString(finished));
    if (finished != cudaSuccess) std::exit(3);
    ++result.failures;
  }
  std::vector<std::uint8_t> out(d.size());
  REQUIRE(cudaMemcpy(out.data(), d.get(), d.size(), cudaMemcpyDeviceToHost));
  for (std::size_t i = 0; i < kCanary; ++i)
    if (out[i] != 0xff || out[out.size() - 1 - i] != 0xff) {
      std::printf("FAIL %s m=%d: wrote outside D\n", name, task.m);
      ++result.failures;
      break;
    }
  return {out.begin() + kCanary, out.end() - kCanary};
}

float element(const std::vector<std::uint8_t>& d, std::size_t i, DType type) {
  if (type == DType::f32) {
    float v;
    std::memcpy(&v, d.data() + 4 * i, 4);
    return v;
  }
  std::uint16_t v;
  std::memcpy(&v, d.data() + 2 * i, 2);
  return from_16(v, type);
}

void check_weight(const Subject& subject, const QuantTensor& q, DType a_dtype, DType out, bool with_bias, int extra_stride,
                  CheckResult& result) {
  const OnDevice w(q);
  const auto most = static_cast<std::size_t>(subject.m.front());
  const std::string name = q.scheme.name() + " " + std::to_string(q.n) + "x" + std::to_string(q.k) +
                           (a_dtype == DType::f16 ? " f16" : " bf16") +
                           (out == DType::f32   ? "->f32"
                            : out == DType::f16 ? "->f16"
                                                : "->bf16");
  const std::int64_t x_stride = q.k + extra_stride, d_stride = q.n + 3;
  const std::vector<std::uint16_t> x = activations(subject.m.front(), q.k, x_stride, a_dtype);
  const DeviceBytes x_device(x.data(), x.size() * 2);
  std::vector<float> bias(static_cast<std::size_t>(q.n));
  for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = random_normal(5, i);
  const DeviceBytes bias_device(bias.data(), bias.size() * 4);

  // The reference, for sampled columns.
  std::vector<std::int64_t> columns;
  const std::int64_t step = std::max<std::int64_t>(1, q.n / 48);
  for (std::int64_t n = 0; n < q.n; n += step) columns.push_back(n);
  columns.push_back(q.n - 1);
  const RowDecoder decoder(q);
  std::vector<double> expected(columns.size() * most);
  std::vector<float> row(static_cast<std::size_t>(q.k));
  for (std::size_t c = 0; c < columns.size(); ++c) {
    decoder.decode(columns[c], row.data());
    for (int m = 0; m < subject.m.front(); ++m) {
      double sum = with_bias ? bias[static_cast<std::size_t>(columns[c])] : 0.0;
      for (std::int64_t k = 0; k < q.k; ++k)
        sum += static_cast<double>(row[static_cast<std::size_t>(k)]) *
               from_16(x[static_cast<std::size_t>(m * x_stride + k)], a_dtype);
      expected[c * most + static_cast<std::size_t>(m)] = sum;
    }
  }

  // For few numbers the rounding of the output does not average out.
  const double few = columns.size() < 16 ? 2.0 : 1.0;
  const double rounding = out == DType::f32 ? 1e-5 : out == DType::f16 ? 3e-4 : 2.5e-3;
  const double tolerance = few * (subject.rounds_weights ? std::max(rounding, a_dtype == DType::f16 ? 5e-4 : 4e-3) : rounding);
  std::vector<std::uint8_t> first_rows;
  for (int m : subject.m) {
    LinearTask task{.weight = w.weight, .m = m, .a_dtype = a_dtype, .x = x_device.get(), .x_stride = x_stride};
    task.epilogue.out = out;
    task.epilogue.d_stride = d_stride;
    if (with_bias) task.epilogue.bias = {bias_device.get(), DType::f32, 0};
    const std::vector<std::uint8_t> d = run_once(subject.run, task, name.c_str(), result);
    ++result.cases;
    double error2 = 0, norm2 = 0;
    for (std::size_t c = 0; c < columns.size(); ++c)
      for (int r = 0; r < m; ++r) {
        const double want = expected[c * most + static_cast<std::size_t>(r)];
        const double got = element(d, static_cast<std::size_t>(r * d_stride + columns[c]), out);
        error2 += (got - want) * (got - want);
        norm2 += want * want;
      }
    const double error = std::sqrt(error2 / norm2);
    result.worst = std::max(result.worst, error / tolerance);
    if (!(error <= tolerance)) {
      std::printf("FAIL %s m=%d: relative error %.3g\n", name.c_str(), m, error);
      ++result.failures;
    }
    for (int r = 0; r < m; ++r)
      for (std::int64_t n = 0; n < d_stride; ++n) {
        const bool nan = std::isnan(element(d, static_cast<std::size_t>(r * d_stride + n), out));
        if (nan != (n >= q.n)) {
          std::printf("FAIL %s m=%d: element (%d, %lld) %s\n", name.c_str(), m, r, static_cast<long long>(n),
                      nan ? "was not written" : "is past N");
          ++result.failures;
          r = m;
          break;
        }
      }
    if (first_rows.empty()) {
      first_rows = d;
    } else if (std::memcmp(first_rows.data(), d.data(), d.size()) != 0) {  // rows of every M, and the same M again
      std::printf("FAIL %s m=%d: other bits than with m=%d\n", name.c_str(), m, subject.m.front());
      ++result.failures;
    }
  }
}

CheckResult check(const Subject& subject, bool all) {
  CheckResult result;
  const auto scheme = [](DType codes, ZeroKind zero, GroupShape group, DType scale) {
    return WeightScheme{codes, zero, group, scale};
  };
  std::vector<WeightScheme> schemes;
  for (GroupShape group : {GroupShape::group(128), GroupShape::group(64), GroupShape::group(32), GroupShape::channel()}) {
    schemes.push_back(scheme(DType::u4b8, ZeroKind::none, group, DType::f16));
    schemes.push_back(scheme(DType::u4, ZeroKind::integer, group, DType::bf16));
    schemes.push_back(scheme(DType::u4, ZeroKind::offset, group, DType::f16));
    schemes.push_back(scheme(DType::s8, ZeroKind::none, group, DType::f32));
    schemes.push_back(scheme(DType::u8, ZeroKind::integer, group, DType::f16));
  }
  schemes.push_back(scheme(DType::u4, ZeroKind::real, GroupShape::group(64), DType::f16));
  schemes.push_back(scheme(DType::u8, ZeroKind::offset, GroupShape::group(256), DType::f16));
  schemes.push_back(scheme(DType::u3, ZeroKind::integer, GroupShape::group(32), DType::f16));
  schemes.push_back(scheme(DType::u8b128, ZeroKind::none, GroupShape::block(16, 128), DType::f32));
  int i = 0;
  for (const WeightScheme& s : schemes)
    for (auto [n, k] : {std::pair{1, 1}, {64, 128}, {190, 1000}, {777, 2051}, {1024, 4096}}) {
      if (!all && n * k > 200'000) continue;
      const DType a_dtype = ++i % 2 ? DType::f16 : DType::bf16;
      const DType out = i % 3 == 0 ? DType::f32 : a_dtype;
      check_weight(subject, testing::random_weight(s, n, k, 3), a_dtype, out, i % 4 == 0, i % 5 == 0 ? 8 : i % 5, result);
    }
  QuantTensor shuffled = testing::random_weight(schemes[0], 190, 1024, 3);  // act-order
  for (std::int32_t k = 0; k < 1024; ++k) shuffled.g_idx.push_back(k % 8);
  check_weight(subject, shuffled, DType::f16, DType::f16, false, 0, result);
  if (!all) return result;
  for (auto [n, k] : {std::pair{4096, 4096}, {6144, 4096}, {8256, 2048}, {4096, 14336}})
    check_weight(subject, testing::random_weight(schemes[0], n, k, 3), DType::f16, DType::f16, false, 0, result);
  check_weight(subject, testing::random_weight(schemes[0], 1024, 28672, 3), DType::f16, DType::f16, false, 0, result);
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------- bench

/// cuBLAS, if the machine has it; loaded at run time.
class Cublas {
 public:
  Cublas() {
    void* library = dlopen("libcublas.so.13", RTLD_NOW);
    if (library == nullptr) {
      std::printf("no cuBLAS: %s\n", dlerror());
      return;
    }
    create_ = reinterpret_cast<decltype(&cublasCreate_v2)>(dlsym(library, "cublasCreate_v2"));
    set_stream_ = reinterpret_cast<decltype(&cublasSetStream_v2)>(dlsym(library, "cublasSetStream_v2"));
    set_workspace_ = reinterpret_cast<decltype(&cublasSetWorkspace_v2)>(dlsym(library, "cublasSetWorkspace_v2"));
    gemm_ = reinterpret_cast<decltype(gemm_)>(dlsym(library, "cublasGemmEx"));
    if (create_(&handle_) != CUBLAS_STATUS_SUCCESS) handle_ = nullptr;
  }
  explicit operator bool() const { return handle_ != nullptr; }
  void gemm(const void* w, const void* x, void* d, int m, int n, int k, cudaStream_t stream) {
    const float one = 1.0f, zero = 0.0f;
    set_stream_(handle_, stream);
    set_workspace_(handle_, workspace_.get(), workspace_.size());
    const cublasStatus_t s = gemm_(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n, m, k, &one, w, CUDA_R_16F, k, x, CUDA_R_16F, k, &zero, d,
                                   CUDA_R_16F, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (s != CUBLAS_STATUS_SUCCESS) std::printf("cublasGemmEx: %d\n", static_cast<int>(s));
  }

 private:
  cublasHandle_t handle_ = nullptr;
  decltype(&cublasCreate_v2) create_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace_ = nullptr;
  cublasStatus_t (*gemm_)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                          cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                          cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
  DeviceBytes workspace_{std::size_t{32} << 20};
};

struct BenchOptions {
  DecodeConfig config;
  std::vector<int> splits{0};  // 0: as configured
  std::vector<int> m{1, 8, 16, 32};
  std::vector<std::pair<int, int>> shapes{{4096, 4096},  {6144, 4096},  {8192, 8192},  {10240, 8192},
                                          {4096, 14336}, {28672, 4096}, {8192, 28672}, {57344, 8192}};
  bool cublas = true;
  bool sm80 = false, gemm80 = false;
  bool small = false;
  int bits = 4;
  DType a_dtype = DType::f16;
  bool zeros = false;  // AWQ's: a byte a group
};

void bench_shape(const BenchOptions& options, int n, int k, Cublas* cublas, nlohmann::json& rows) {
  // Random codes, scales around 0.01: packed weights need no QuantTensor to be timed.
  WeightScheme scheme;
  if (options.bits == 8) scheme.codes = DType::u8b128;
  if (options.zeros) scheme.zero = ZeroKind::integer;
  const gpu_tile::Geometry geo = gpu_tile::geometry(scheme, options.zeros ? DType::u8 : DType::none, n, k);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(geo.total_bytes()));
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t r = random();
    std::memcpy(bytes.data() + i, &r, 8);
  }
  for (int tile = 0; tile < geo.tiles(); ++tile)
    for (int record = 0; record < geo.records(); ++record)
      for (int row = 0; row < gpu_tile::kRows; ++row) {
        const std::uint16_t scale = to_f16(0.01f * (0.5f + static_cast<float>((row * 37 + record) % 64) / 64)).bits;
        std::memcpy(bytes.data() + geo.record(tile, record) + geo.scale_offset(0) + 2 * row, &scale, 2);
      }
  const int copies = copies_of(static_cast<double>(bytes.size()));
  const std::size_t pitch = (bytes.size() + 255) / 256 * 256;
  const DeviceBytes weights(pitch * static_cast<std::size_t>(copies));
  for (int i = 0; i < copies; ++i)
    REQUIRE(cudaMemcpy(weights.get() + pitch * static_cast<std::size_t>(i), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  const int most = *std::ranges::max_element(options.m);
  const std::vector<std::uint16_t> x = activations(most, k, k, options.a_dtype);
  const DeviceBytes x_device(x.data(), x.size() * 2);
  const DeviceBytes d(static_cast<std::size_t>(n) * static_cast<std::size_t>(most) * 2);

  for (int turn = 0; turn < static_cast<int>(options.m.size() * options.splits.size()); ++turn) {
    const int m = options.m[static_cast<std::size_t>(turn) / options.splits.size()];
    LinearTask task{.m = m, .a_dtype = options.a_dtype, .x = x_device.get(), .x_stride = k};
    task.epilogue.out = options.a_dtype;
    task.epilogue.d = d.get();
    task.epilogue.d_stride = n;
    task.weight.geometry = geo;
    task.weight.zero = options.zeros ? ZeroKind::integer : ZeroKind::none;
    task.weight.zero_base = options.zeros ? 0.0f : options.bits == 8 ? 128.0f : 8.0f;
    DecodeConfig config = options.config;
    config.tokens = m == 1 ? 1 : m <= 8 ? 8 : kDecodeTokens;
    config.split = options.splits[static_cast<std::size_t>(turn) % options.splits.size()];
    const double floor = (static_cast<double>(bytes.size()) + 2.0 * m * (n + k)) / 4.47e6;
    nlohmann::json row = {{"n", n}, {"k", k}, {"m", m}, {"bits", options.bits}, {"copies", copies}, {"floor_us", floor}};
    const bool sm90 = !options.sm80 && !options.gemm80;
    if (sm90) {
      const Result<DecodeConfig> chosen = configured(geo, config);
      if (!chosen.ok()) {
        std::printf("%6d x %6d m=%2d: %s\n", n, k, m, chosen.status().message().c_str());
        continue;
      }
      config = *chosen;
      row["split"] = config.split;
      row["grid"] = config.grid;
      row["stages"] = config.stages;
      row["smem"] = config.smem;
      row["launches"] = (m + config.tokens - 1) / config.tokens;
    }
    const double us = time_us(copies, [&](int i, cudaStream_t stream) {
      LinearTask t = task;
      t.weight.records = weights.get() + pitch * static_cast<std::size_t>(i);
      REQUIRE(sm90             ? linear_decode_sm90(t, config, stream)
              : options.gemm80 ? linear_gemm_sm80(t, stream)
                               : linear_decode_sm80(t, stream));
    });
    row["us"] = us;
    row["bandwidth"] = (static_cast<double>(bytes.size()) + 2.0 * m * (n + k)) / us * 1e-6;
    std::printf("%6d x %6d m=%2d  %7.2f us  floor %6.2f  %4.2f TB/s", n, k, m, us, floor, row["bandwidth"].get<double>());
    if (options.gemm80)
      std::printf("  %3.0f TFLOP/s", 2e-6 * m * n * k / us);
    else
      std::printf("  split %d grid %d stages %d smem %d tokens %d", config.split, config.grid, config.stages, config.smem,
                  config.tokens);
    rows.push_back(row);
    if (cublas == nullptr) {
      std::printf("\n");
    } else {
      const std::size_t dense = static_cast<std::size_t>(n) * static_cast<std::size_t>(k) * 2;
      const int dense_copies = copies_of(static_cast<double>(dense));
      static std::unique_ptr<DeviceBytes> w;
      static std::pair<int, int> of;
      if (!w || of != std::pair{n, k}) {
        w.reset();
        w = std::make_unique<DeviceBytes>(dense * static_cast<std::size_t>(dense_copies));
        std::vector<std::uint16_t> block(1 << 20);
        for (std::size_t i = 0; i < block.size(); ++i) block[i] = to_f16(0.02f * random_normal(3, i)).bits;
        for (std::size_t at = 0; at < w->size(); at += block.size() * 2)
          REQUIRE(cudaMemcpy(w->get() + at, block.data(), std::min(block.size() * 2, w->size() - at), cudaMemcpyHostToDevice));
        of = {n, k};
      }
      const double cublas_us = time_us(dense_copies, [&](int i, cudaStream_t stream) {
        cublas->gemm(w->get() + dense * static_cast<std::size_t>(i), x_device.get(), d.get(), m, n, k, stream);
      });
      rows.back()["cublas_fp16_us"] = cublas_us;
      std::printf("  cublas fp16 %7.2f\n", cublas_us);
    }
    std::fflush(stdout);
  }
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  std::string file;
  BenchOptions options;
  for (int i = 2; i < argc; ++i) {
    const std::string a = argv[i];
    const auto number = [&] { return std::atoi(argv[++i]); };
    if (a == "--split") {
      options.splits.clear();
      for (char* p = std::strtok(argv[++i], ","); p != nullptr; p = std::strtok(nullptr, ","))
        options.splits.push_back(std::atoi(p));
    } else if (a == "--smem")
      options.config.smem = number();
    else if (a == "--bits")
      options.bits = number();
    else if (a == "--bf16")
      options.a_dtype = DType::bf16;
    else if (a == "--zeros")
      options.zeros = true;
    else if (a == "--no-cublas")
      options.cublas = false;
    else if (a == "--small")
      options.small = true;
    else if (a == "--sm80")
      options.sm80 = true;
    else if (a == "--gemm80") {
      options.gemm80 = true;
      options.m = {32, 64, 128, 256, 1024};
    } else if (a == "--m") {
      options.m.clear();
      for (char* p = std::strtok(argv[++i], ","); p != nullptr; p = std::strtok(nullptr, ",")) options.m.push_back(std::atoi(p));
    } else if (a == "--shape") {
      int n = 0, k = 0;
      if (std::sscanf(argv[++i], "%dx%d", &n, &k) == 2) options.shapes = {{n, k}};
    } else {
      file = a;
    }
  }
  cudaDeviceProp device;
  REQUIRE(cudaGetDeviceProperties(&device, 0));
  int clock = 0;
  cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0);
  nlohmann::json out = {{"device", device.name}, {"sms", device.multiProcessorCount}, {"max_clock_mhz", clock / 1000}};
  int failures = 0;
  if (mode == "check") {
    const Subject subjects[] = {{"sm90 16 tokens", run_sm90<kDecodeTokens>, true, false, kDecodeM},
                                {"sm90 8 tokens", run_sm90<8>, true, false, kDecodeM},
                                {"sm90 1 token", run_sm90<1>, true, false, kDecodeM},
                                {"sm80", run_sm80, false, false, kDecodeM},
                                {"gemm sm80", run_gemm80, false, true, kGemmM}};
    for (const Subject& subject : subjects) {
      const char* const name = subject.name;
      if (subject.only_sm90 && device.major != 9) {
        std::printf("%s: skipped, %s is of compute capability %d.%d\n", name, device.name, device.major, device.minor);
        continue;
      }
      const CheckResult r = check(subject, !options.small);
      std::printf("%s: %d cases, %d failures, worst error %.2f of its tolerance\n", name, r.cases, r.failures, r.worst);
      out["check"][name] = {{"cases", r.cases}, {"failures", r.failures}, {"worst", r.worst}};
      failures += r.failures;
    }
  } else {
    std::unique_ptr<Cublas> cublas;
    if (options.cublas) {
      cublas = std::make_unique<Cublas>();
      if (!*cublas) cublas.reset();
    }
    out["rows"] = nlohmann::json::array();
    for (auto [n, k] : options.shapes) bench_shape(options, n, k, cublas.get(), out["rows"]);
  }
  if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) { return nibble::cuda::run(argc, argv); }
