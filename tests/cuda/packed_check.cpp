// Correctness and speed of the kernels that decode packed weights without tensor cores. Needs a GPU.
//
//   packed_check check [FILE.json] [--small]    pack_gpu_tile and dequantize_packed bit by bit, linear_simt against the oracle
//   packed_check bench [FILE.json]              linear_simt and dequantize_packed
//
// Method of the bench: a CUDA graph runs over rotating cold copies (≥ 400 MB in total, L2 is 60 MB); events around 10 replays; the
// median of 7. Random codes, Gaussian activations.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "core/row_decoder.hpp"
#include "kernels/cuda/tasks/linear_simt.hpp"
#include "kernels/cuda/weights/dequantize_packed.hpp"
#include "kernels/cuda/weights/pack.hpp"
#include "layouts/layout.hpp"
#include "plan/compare.hpp"
#include "random_weights.hpp"
#include "timing.hpp"

namespace nibble::cuda {
namespace {

/// Device memory that frees itself.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size) : size_(size) { REQUIRE(cudaMalloc(&data_, std::max<std::size_t>(size, 16))); }
  DeviceBytes(const void* from, std::size_t size) : DeviceBytes(size) {
    REQUIRE(cudaMemcpy(data_, from, size, cudaMemcpyHostToDevice));
  }
  template <class T>
  explicit DeviceBytes(const std::vector<T>& v) : DeviceBytes(v.data(), v.size() * sizeof(T)) {}
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::uint8_t* get() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_;
};
std::vector<std::byte> to_host(const DeviceBytes& d) {
  std::vector<std::byte> v(d.size());
  REQUIRE(cudaMemcpy(v.data(), d.get(), d.size(), cudaMemcpyDeviceToHost));
  return v;
}

/// Counts and prints.
struct Result {
  int cases = 0, failures = 0;
  double worst = 0;  // error of linear_simt over its bound

  void expect(bool ok, const std::string& name, const char* what) {
    ++cases;
    if (ok) return;
    ++failures;
    std::printf("FAIL %s: %s\n", name.c_str(), what);
  }
};

std::size_t size_of(DType type) { return static_cast<std::size_t>(bits(type) / 8); }

/// A weight packed on the host, there and on the device.
struct OnDevice {
  PackedWeightData packed;
  std::unique_ptr<DeviceBytes> records, perm, prescale;
  DeviceWeight weight;

  explicit OnDevice(const QuantTensor& q) {
    packed.layout = &kGpuTileLayout;
    packed.scheme = q.scheme;
    packed.n = q.n;
    packed.k = q.k;
    packed.zero_type = q.zeros.dtype;
    if (!q.g_idx.empty()) {
      packed.perm.resize(static_cast<std::size_t>(q.k));
      std::iota(packed.perm.begin(), packed.perm.end(), 0);
      std::ranges::stable_sort(packed.perm, {}, [&](std::int32_t k) { return q.g_idx[static_cast<std::size_t>(k)]; });
      perm = std::make_unique<DeviceBytes>(packed.perm);
    }
    if (!q.prescale.empty()) {
      std::vector<float> f(static_cast<std::size_t>(q.k));
      for (std::size_t i = 0; i < f.size(); ++i) f[i] = q.prescale.at(static_cast<std::int64_t>(i));
      prescale = std::make_unique<DeviceBytes>(f);
    }
    packed.bytes = Buffer(kGpuTileLayout.size(q.scheme, packed.zero_type, q.n, q.k));
    kGpuTileLayout.pack(q, packed, default_executor());
    records = std::make_unique<DeviceBytes>(packed.bytes.data(), packed.bytes.size());

    weight.records = records->get();
    weight.geometry = gpu_tile::geometry(q.scheme, packed.zero_type, q.n, q.k);
    weight.scale_type = q.scheme.scale;
    weight.zero_base = static_cast<float>(code_bias(q.scheme.codes));
    weight.zero = q.scheme.zero;
    if (q.scheme.zero == ZeroKind::integer) weight.zero_base -= static_cast<float>(gpu_tile::zero_bias(packed.zero_type));
    if (q.scheme.zero == ZeroKind::offset || q.scheme.zero == ZeroKind::real) weight.zero_type = packed.zero_type;
    weight.scale2 = q.scale2.value_or(1.0f);
    if (perm) weight.perm = reinterpret_cast<const std::int32_t*>(perm->get());
    if (prescale) weight.prescale = reinterpret_cast<const float*>(prescale->get());
  }
};

constexpr std::size_t kCanary = 256;

/// `size` bytes between canaries, all 0xff: NaN in every float type.
struct Guarded {
  DeviceBytes bytes;
  explicit Guarded(std::size_t size) : bytes(size + 2 * kCanary) { REQUIRE(cudaMemset(bytes.get(), 0xff, bytes.size())); }
  std::uint8_t* get() const { return bytes.get() + kCanary; }

  /// The contents after a kernel; reports overwritten canaries.
  std::vector<std::byte> finish(cudaError_t launched, const std::string& name, Result& result) const {
    const cudaError_t finished = cudaDeviceSynchronize();
    if (launched != cudaSuccess || finished != cudaSuccess) {
      result.expect(false, name, cudaGetErrorString(launched != cudaSuccess ? launched : finished));
      if (finished != cudaSuccess) std::exit(3);
    }
    std::vector<std::byte> all = to_host(bytes);
    const auto untouched = [](std::byte b) { return b == std::byte{0xff}; };
    result.expect(
        std::all_of(all.begin(), all.begin() + kCanary, untouched) && std::all_of(all.end() - kCanary, all.end(), untouched),
        name, "wrote outside its output");
    return {all.begin() + kCanary, all.end() - kCanary};
  }
};

void check_pack(const QuantTensor& q, const OnDevice& w, const std::string& name, Result& result) {
  const DeviceBytes codes(q.codes), scales(q.scales.bytes), zeros(q.zeros.bytes);
  const Guarded records(w.packed.bytes.size());
  const cudaError_t e = pack_gpu_tile(w.weight.geometry, q.scheme, q.zeros.dtype, codes.get(), scales.get(), zeros.get(),
                                      w.weight.perm, records.get(), nullptr);
  const std::vector<std::byte> got = records.finish(e, name + " pack", result);
  result.expect(std::memcmp(got.data(), w.packed.bytes.data(), got.size()) == 0, name, "pack: other bytes than on the host");
}

/// `pad` elements between rows, which must not change.
void check_dequantize(const QuantTensor& q, const OnDevice& w, DType out, bool transposed, std::int64_t pad,
                      const std::string& name, Result& result) {
  const std::int64_t rows = transposed ? q.k : q.n, columns = transposed ? q.n : q.k, stride = columns + pad;
  const std::string what = name + " dequantize to " + std::string(nibble::name(out)) + (transposed ? " [K,N]" : " [N,K]");
  Tensor expected(out, {rows, stride});
  std::fill(expected.bytes.begin(), expected.bytes.end(), std::byte{0xff});
  const RowDecoder decoder(q);
  std::vector<float> row(static_cast<std::size_t>(q.k));
  for (std::int64_t n = 0; n < q.n; ++n) {
    decoder.decode(n, row.data());
    for (std::int64_t k = 0; k < q.k; ++k)
      expected.set(transposed ? k * stride + n : n * stride + k, row[static_cast<std::size_t>(k)]);
  }
  const Guarded d(expected.bytes.size());
  const cudaError_t e = dequantize_packed(w.weight, d.get(), out, stride, transposed, nullptr);
  result.expect(d.finish(e, what, result) == expected.bytes, what, "other bits than QuantTensor::value");
}

/// x[rows, stride] of Gaussian numbers; NaN beyond K.
Tensor activations(DType type, std::int64_t rows, std::int64_t k, std::int64_t stride) {
  Tensor x(type, {rows, stride});
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t i = 0; i < stride; ++i)
      x.set(r * stride + i, i < k ? random_normal(11, static_cast<std::uint64_t>(r * k + i)) : std::nanf(""));
  return x;
}

void check_linear(const QuantTensor& q, const OnDevice& w, DType act, DType out, std::int64_t pad, bool with_bias,
                  const std::vector<int>& tokens, const std::string& base, Result& result) {
  const int m_max = std::ranges::max(tokens);
  const std::int64_t x_stride = q.k + pad, d_stride = q.n + 3;
  const Tensor x = activations(act, m_max, q.k, x_stride);
  const DeviceBytes x_device(x.bytes);
  ConstTensorView a(x.bytes.data(), act, {m_max, q.k});
  a.strides[0] = x_stride;
  Tensor bias(DType::f16, {q.n});
  for (std::int64_t n = 0; n < q.n; ++n) bias.set(n, random_normal(5, static_cast<std::uint64_t>(n)));
  const DeviceBytes bias_device(bias.bytes);
  const EpilogueSpec spec{.bias = with_bias, .activation = with_bias ? Activation::silu : Activation::none, .out = out};
  Operands args{.bias = ConstTensorView(bias.bytes.data(), bias.dtype, {q.n})};

  std::vector<std::int64_t> columns;  // a sample, because the oracle is slow
  for (std::int64_t n = 0; n < q.n; n += std::max<std::int64_t>(1, q.n / 40)) columns.push_back(n);
  columns.push_back(q.n - 1);
  const auto expected = reference::linear(reference::arrays_of(q), a, spec, args, columns);

  args.bias.data = bias_device.get();
  std::vector<std::byte> first;  // of m_max
  for (const int m : tokens) {
    const std::string name = base + " linear " + std::string(nibble::name(act)) + "->" + std::string(nibble::name(out)) +
                             (with_bias ? " bias silu" : "") + " M=" + std::to_string(m);
    const Guarded d(static_cast<std::size_t>(m * d_stride) * size_of(out));
    TensorView view(d.get(), out, {m, q.n});
    view.strides[0] = d_stride;
    const LinearTask task{.weight = w.weight,
                          .m = m,
                          .a_dtype = act,
                          .x = x_device.get(),
                          .x_stride = x_stride,
                          .epilogue = epilogue::element(spec, args, view, w.weight.scale2)};
    Tensor got(out, {m, d_stride});
    got.bytes = d.finish(linear_simt(task, nullptr), name, result);
    const Comparison c = compare(got, columns, std::span(expected).first(static_cast<std::size_t>(m) * columns.size()));
    result.worst = std::max(result.worst, c.worst_ratio);
    result.expect(c.failures == 0, name, "further from the oracle than its bound");
    bool written = true;
    for (std::int64_t i = 0; i < got.numel(); ++i) written &= std::isnan(got.at(i)) == (i % d_stride >= q.n);
    result.expect(written, name, "an element of D is missing, or one past N is not");
    if (first.empty()) first = got.bytes;
    result.expect(std::memcmp(first.data(), got.bytes.data(), got.bytes.size()) == 0, name, "other bits than with more rows");
  }
}

void check_weight(const QuantTensor& q, int i, const std::vector<int>& tokens, Result& result) {
  const OnDevice w(q);
  std::string name =
      q.scheme.name() + " " + std::string(nibble::name(q.scheme.scale)) + " " + std::to_string(q.n) + "x" + std::to_string(q.k);
  if (w.perm) name += " act-order";
  if (w.prescale) name += " prescale";
  if (q.scale2) name += " scale2";
  check_pack(q, w, name, result);
  const DType floats[] = {DType::f32, DType::f16, DType::bf16};
  for (const DType out : floats)
    for (const bool transposed : {false, true}) {
      const std::int64_t columns = transposed ? q.n : q.k;
      check_dequantize(q, w, out, transposed, i % 2 == 0 ? (8 - columns % 8) % 8 : 1, name, result);  // aligned rows, or not
    }
  const DType act = floats[i % 3], out = floats[(i / 3 + i) % 3];
  check_linear(q, w, act, out, i % 4 == 0 ? 0 : i % 4 == 1 ? 4 : i % 4, i % 5 == 0, tokens, name, result);
}

Result check(bool small) {
  Result result;
  std::vector<WeightScheme> schemes = testing::all_schemes();
  for (const DType codes : {DType::u4, DType::u8})
    for (const ZeroKind zero : {ZeroKind::offset, ZeroKind::real, ZeroKind::integer})
      for (const int group : {32, 64}) schemes.push_back({codes, zero, GroupShape::group(group), DType::f16});
  schemes.push_back({DType::u4, ZeroKind::offset, GroupShape::group(64), DType::f32});
  schemes.push_back({DType::u4, ZeroKind::real, GroupShape::group(64), DType::f32});
  schemes.push_back({DType::u8b128, ZeroKind::none, GroupShape::block(16, 128), DType::f32});
  schemes.push_back({DType::u4b8, ZeroKind::none, GroupShape::group(256), DType::f16});
  using Shapes = std::vector<std::pair<std::int64_t, std::int64_t>>;
  const Shapes shapes =
      small ? Shapes{{1, 1}, {70, 260}, {33, 131}} : Shapes{{1, 1}, {64, 128}, {72, 264}, {190, 1000}, {33, 131}, {777, 2051}};
  const std::vector<int> tokens = small ? std::vector<int>{5, 1, 2} : std::vector<int>{33, 1, 2, 7, 17, 33};
  int i = 0;
  for (const WeightScheme& scheme : schemes)
    for (const auto& [n, k] : shapes) {
      ++i;
      QuantTensor q = testing::random_weight(scheme, n, k, 3, {.act_order = i % 4 == 1, .prescale = i % 7 == 2});
      if (i % 3 == 2) q.scale2 = 0.7f;
      if (!gpu_tile::refusal(scheme, q.zeros.dtype, k).empty()) continue;
      check_weight(q, i, tokens, result);
    }
  if (small) return result;
  // Grids of one wave and of several, every number of tokens a CTA, and long sums.
  for (const auto& [n, k] : Shapes{{4096, 4096}, {9000, 512}, {1024, 14336}}) {
    const QuantTensor q = testing::random_weight({DType::u4, ZeroKind::integer, GroupShape::group(128), DType::f16}, n, k, 3);
    check_linear(q, OnDevice(q), ++i % 2 == 0 ? DType::f32 : DType::f16, DType::f32, 0, false, {17, 1, 2, 3, 4, 5, 8, 16},
                 q.scheme.name() + " " + std::to_string(n) + "x" + std::to_string(k), result);
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------- bench

/// Cold copies of a weight of random codes and scales around 0.01: no QuantTensor is needed to time it.
struct ColdWeight {
  DeviceWeight weight;
  std::size_t pitch;
  int copies;
  std::unique_ptr<DeviceBytes> bytes;

  ColdWeight(int n, int k, int code_bits) {
    weight.geometry = {.n = n, .k = k, .bits = code_bits};
    weight.zero_base = code_bits == 4 ? 8.0f : 128.0f;
    const gpu_tile::Geometry& geo = weight.geometry;
    std::vector<std::uint8_t> host(static_cast<std::size_t>(geo.total_bytes()));
    for (std::size_t i = 0; i + 8 <= host.size(); i += 8) {
      const std::uint64_t r = random_bits(1, i);
      std::memcpy(host.data() + i, &r, 8);
    }
    for (int tile = 0; tile < geo.tiles(); ++tile)
      for (int record = 0; record < geo.records(); ++record)
        for (int row = 0; row < gpu_tile::kRows; ++row) {
          const std::uint16_t scale = to_f16(0.01f * (0.5f + static_cast<float>((row * 37 + record) % 64) / 64)).bits;
          std::memcpy(host.data() + geo.record(tile, record) + geo.scale_offset(0) + 2 * row, &scale, 2);
        }
    copies = copies_of(static_cast<double>(host.size()));
    pitch = (host.size() + 255) / 256 * 256;
    bytes = std::make_unique<DeviceBytes>(pitch * static_cast<std::size_t>(copies));
    for (int i = 0; i < copies; ++i) REQUIRE(cudaMemcpy(at(i), host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  std::uint8_t* at(int copy) const { return bytes->get() + pitch * static_cast<std::size_t>(copy); }
  DeviceWeight copy(int i) const {
    DeviceWeight w = weight;
    w.records = at(i);
    return w;
  }
};

void bench_linear(int n, int k, int code_bits, nlohmann::json& rows) {
  const ColdWeight cold(n, k, code_bits);
  for (const DType act : {DType::f32, DType::f16})
    for (const int m : {1, 4, 16}) {
      const Tensor x = activations(act, m, k, k);
      const DeviceBytes x_device(x.bytes), d(static_cast<std::size_t>(m) * static_cast<std::size_t>(n) * size_of(act));
      const TensorView view(d.get(), act, {m, n});
      const double us = time_us(cold.copies, [&](int i, cudaStream_t stream) {
        REQUIRE(linear_simt({.weight = cold.copy(i),
                             .m = m,
                             .a_dtype = act,
                             .x = x_device.get(),
                             .x_stride = k,
                             .epilogue = epilogue::element({.out = act}, {}, view, 1.0f)},
                            stream));
      });
      const double moved =
          static_cast<double>(cold.weight.geometry.total_bytes()) + static_cast<double>(m * size_of(act)) * (n + k);
      const double flops = 2.0 * m * n * k;
      std::printf("linear_simt %5d x %5d %d-bit %s m=%2d  %8.2f us  %5.2f TB/s  %5.1f Tflop/s\n", n, k, code_bits,
                  std::string(name(act)).c_str(), m, us, moved / us * 1e-6, flops / us * 1e-6);
      std::fflush(stdout);
      rows.push_back({{"kernel", "linear_simt"},
                      {"n", n},
                      {"k", k},
                      {"bits", code_bits},
                      {"act", name(act)},
                      {"m", m},
                      {"us", us},
                      {"tb_per_s", moved / us * 1e-6},
                      {"tflops", flops / us * 1e-6}});
    }
}

void bench_dequantize(int n, int k, int code_bits, nlohmann::json& rows) {
  const ColdWeight cold(n, k, code_bits);
  for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
    const std::size_t written = static_cast<std::size_t>(n) * static_cast<std::size_t>(k) * size_of(out);
    const double moved = static_cast<double>(cold.weight.geometry.total_bytes()) + static_cast<double>(written);
    const DeviceBytes d(written);
    // A copy that moves as many bytes: it reads half of them and writes half.
    const auto half = static_cast<std::size_t>(moved / 2) / 256 * 256;
    const DeviceBytes from(half), to(half);
    const double copy_us = time_us(2, [&](int i, cudaStream_t stream) {
      REQUIRE(cudaMemcpyAsync(i == 0 ? to.get() : from.get(), i == 0 ? from.get() : to.get(), half, cudaMemcpyDeviceToDevice,
                              stream));
    });
    for (const bool transposed : {false, true}) {
      const double us = time_us(cold.copies, [&](int i, cudaStream_t stream) {
        REQUIRE(dequantize_packed(cold.copy(i), d.get(), out, transposed ? n : k, transposed, stream));
      });
      std::printf("dequantize_packed %5d x %5d %d-bit -> %s %s  %8.2f us  %5.2f TB/s  copy %8.2f us  %3.0f %% of it\n", n, k,
                  code_bits, std::string(name(out)).c_str(), transposed ? "[K,N]" : "[N,K]", us, moved / us * 1e-6, copy_us,
                  100 * copy_us / us);
      std::fflush(stdout);
      rows.push_back({{"kernel", "dequantize_packed"},
                      {"n", n},
                      {"k", k},
                      {"bits", code_bits},
                      {"out", name(out)},
                      {"order", transposed ? "kn" : "nk"},
                      {"us", us},
                      {"tb_per_s", moved / us * 1e-6},
                      {"copy_us", copy_us}});
    }
  }
}

int run(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check";
  std::string file;
  bool small = false;
  for (int i = 2; i < argc; ++i) {
    if (std::string(argv[i]) == "--small")
      small = true;
    else
      file = argv[i];
  }
  cudaDeviceProp device;
  REQUIRE(cudaGetDeviceProperties(&device, 0));
  nlohmann::json out = {{"device", device.name}};
  int failures = 0;
  if (mode == "check") {
    const Result r = check(small);
    std::printf("%d checks, %d failures; linear_simt's worst error is %.2f of its bound\n", r.cases, r.failures, r.worst);
    out["check"] = {{"cases", r.cases}, {"failures", r.failures}, {"worst", r.worst}};
    failures = r.failures;
  } else {
    out["rows"] = nlohmann::json::array();
    for (const auto& [n, k] : {std::pair{4096, 4096}, {8192, 8192}, {28672, 4096}}) bench_linear(n, k, 4, out["rows"]);
    bench_linear(8192, 8192, 8, out["rows"]);
    for (const auto& [n, k] : {std::pair{8192, 8192}, {28672, 8192}}) bench_dequantize(n, k, 4, out["rows"]);
    bench_dequantize(8192, 8192, 8, out["rows"]);
  }
  if (!file.empty()) std::ofstream(file) << out.dump(1) << "\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) { return nibble::cuda::run(argc, argv); }
