// dequantize on the GPU: bit-exactness against the formats' definitions, and speed compared with a kernel that only moves the same bytes.
//
//   dequantize_check [RESULTS.json]     without a file: correctness only
//
// The reference below is written from the definitions alone, a bit at a time, and shares only the conversions of nibble/types.hpp with the
// kernels. Outputs are filled with NaN and surrounded by canaries.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/weights/dequantize.cuh"
#include "nibble/types.hpp"

namespace {

using nibble::DType;
using nibble::cuda::CheckpointFormat;
using nibble::cuda::CheckpointWeight;
using nibble::cuda::WeightOrder;

void check(cudaError_t e, const char* what, int line) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s at line %d: %s\n", what, line, cudaGetErrorString(e));
  std::exit(2);
}
#define CHECK(x) check((x), #x, __LINE__)

std::size_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }
const char* name_of(DType t) { return t == DType::f32 ? "f32" : t == DType::f16 ? "f16" : "bf16"; }
const char* name_of(WeightOrder o) { return o == WeightOrder::nk ? "nk" : "kn"; }
std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// A checkpoint's tensors on the host.
struct Case {
  CheckpointFormat format = CheckpointFormat::awq;
  int bits = 4;
  bool v1 = false;
  DType scale = DType::f16;
  std::int64_t n = 0, k = 0, group = 0;
  std::vector<std::uint32_t> qweight, qzeros;
  std::vector<std::uint32_t> scales;  // the bits of an element each
  std::vector<std::int32_t> g_idx;

  bool awq() const { return format == CheckpointFormat::awq; }
  std::int64_t group_size() const { return group == 0 ? k : group; }
  std::int64_t groups() const { return ceil_div(k, group_size()); }
  std::int64_t weight_words() const { return awq() ? k * (n / 8) : ceil_div(k * bits, 32) * n; }
  std::int64_t zero_row() const { return awq() ? n / 8 : ceil_div(n * bits, 32); }
  std::string text() const {
    char line[160];
    std::snprintf(line, sizeof line, "%s%d%s N=%lld K=%lld g=%lld scales %s%s", awq() ? "awq" : "gptq", bits, v1 ? " v1" : "",
                  static_cast<long long>(n), static_cast<long long>(k), static_cast<long long>(group), name_of(scale),
                  g_idx.empty() ? "" : " act-order");
    return line;
  }

  // nibble p of an AWQ word holds channel kOrder[p]
  static unsigned awq_code(std::uint32_t word, std::int64_t column) {
    constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int p = 0; p < 8; ++p)
      if (kOrder[p] == column % 8) return (word >> (4 * p)) & 15u;
    return 0;
  }
  // bit `at·b + i` of a stream is bit i of code `at`
  unsigned stream_code(const std::uint32_t* words, std::int64_t stride, std::int64_t at) const {
    unsigned code = 0;
    for (int i = 0; i < bits; ++i) {
      const std::int64_t bit = at * bits + i;
      code |= ((words[bit / 32 * stride] >> (bit % 32)) & 1u) << i;
    }
    return code;
  }
  float scale_at(std::int64_t i) const {
    const std::uint32_t b = scales[static_cast<std::size_t>(i)];
    if (scale == DType::f16) return nibble::to_f32(nibble::f16{static_cast<std::uint16_t>(b)});
    if (scale == DType::bf16) return nibble::to_f32(nibble::bf16{static_cast<std::uint16_t>(b)});
    return std::bit_cast<float>(b);
  }
  float value(std::int64_t row, std::int64_t col) const {
    const std::int64_t g = g_idx.empty() ? col / group_size() : g_idx[static_cast<std::size_t>(col)];
    unsigned u, z;
    if (awq()) {
      u = awq_code(qweight[static_cast<std::size_t>(col * (n / 8) + row / 8)], row);
      z = awq_code(qzeros[static_cast<std::size_t>(g * (n / 8) + row / 8)], row);
    } else {
      u = stream_code(qweight.data() + row, n, col);
      z = stream_code(qzeros.data() + g * zero_row(), 1, row);
      if (v1) z = (z + 1) % (1u << bits);
    }
    return static_cast<float>((static_cast<double>(u) - static_cast<double>(z)) * static_cast<double>(scale_at(g * n + row)));
  }
  std::vector<std::byte> scale_bytes() const {
    std::vector<std::byte> b(scales.size() * size_of(scale));
    for (std::size_t i = 0; i < scales.size(); ++i) std::memcpy(b.data() + i * size_of(scale), &scales[i], size_of(scale));
    return b;
  }
};

std::uint32_t to_bits(float v, DType t) {
  if (t == DType::f16) return nibble::to_f16(v).bits;
  if (t == DType::bf16) return nibble::to_bf16(v).bits;
  return std::bit_cast<std::uint32_t>(v);
}
bool is_nan(std::uint32_t b, DType t) {
  if (t == DType::f16) return (b & 0x7fffu) > 0x7c00u;
  if (t == DType::bf16) return (b & 0x7fffu) > 0x7f80u;
  return (b & 0x7fffffffu) > 0x7f800000u;
}

std::mt19937_64 random_engine(20240607);

Case make_case(CheckpointFormat format, int bits, bool v1, DType scale, std::int64_t n, std::int64_t k, std::int64_t group,
               bool act_order, bool hard_scales) {
  Case c;
  c.format = format, c.bits = bits, c.v1 = v1, c.scale = scale, c.n = n, c.k = k, c.group = group;
  auto& r = random_engine;
  const auto fill = [&](std::vector<std::uint32_t>& words, std::int64_t count) {
    words.resize(static_cast<std::size_t>(count));
    for (auto& w : words) w = static_cast<std::uint32_t>(r());
  };
  fill(c.qweight, c.weight_words());
  fill(c.qzeros, c.groups() * c.zero_row());
  c.scales.resize(static_cast<std::size_t>(c.groups() * n));
  std::normal_distribution<float> normal(0.f, 0.01f);
  for (auto& s : c.scales) {
    s = to_bits(normal(r), scale);
    if (hard_scales && r() % 8 == 0) s = static_cast<std::uint32_t>(r()) & (scale == DType::f32 ? 0xffffffffu : 0xffffu);
    if (hard_scales && r() % 64 == 0) s = 0;                                            // zero
    if (hard_scales && r() % 64 == 0) s = scale == DType::f32 ? 0x80000001u : 0x8001u;  // the smallest subnormal, negative
  }
  if (act_order) {
    for (std::int64_t i = 0; i < k; ++i) c.g_idx.push_back(static_cast<std::int32_t>(i / c.group_size()));
    std::shuffle(c.g_idx.begin(), c.g_idx.end(), r);
  }
  return c;
}

constexpr std::size_t kArena = std::size_t{64} << 20;
constexpr std::size_t kFence = 512;

struct Arena {
  std::byte* base = nullptr;
  std::size_t used = 0;
  Arena() { CHECK(cudaMalloc(&base, kArena)); }
  void* put(const void* data, std::size_t bytes, std::size_t offset) {  // 256-byte aligned, then `offset` further
    used = (used + 255) / 256 * 256 + offset;
    if (used + bytes + 1024 > kArena) std::exit(3);
    std::byte* p = base + used;
    if (data != nullptr) CHECK(cudaMemcpy(p, data, bytes, cudaMemcpyHostToDevice));
    used += bytes;
    return p;
  }
};

int failures = 0;
long long runs = 0, elements = 0;
long long by_kernel[4] = {};  // rows, tile, gather, generic

/// Runs the case in every output type and order; `skew` moves every pointer by that many elements.
void run_case(Arena& arena, const Case& c, std::size_t skew = 0) {
  arena.used = 0;
  const auto scale_bytes = c.scale_bytes();
  CheckpointWeight w;
  w.format = c.format, w.bits = c.bits, w.zeros_minus_one = c.v1, w.scale = c.scale, w.n = c.n, w.k = c.k, w.group = c.group;
  w.qweight = arena.put(c.qweight.data(), 4 * c.qweight.size(), 4 * skew);
  w.qzeros = arena.put(c.qzeros.data(), 4 * c.qzeros.size(), 4 * skew);
  w.scales = arena.put(scale_bytes.data(), scale_bytes.size(), size_of(c.scale) * skew);
  if (!c.g_idx.empty()) w.g_idx = arena.put(c.g_idx.data(), 4 * c.g_idx.size(), 4 * skew);
  const std::size_t mark = arena.used;

  const std::size_t count = static_cast<std::size_t>(c.n * c.k);
  std::vector<float> expected(count);  // [N,K]
  for (std::int64_t i = 0; i < c.n; ++i)
    for (std::int64_t j = 0; j < c.k; ++j) expected[static_cast<std::size_t>(i * c.k + j)] = c.value(i, j);

  for (const DType out : {DType::f16, DType::bf16, DType::f32}) {
    for (const WeightOrder order : {WeightOrder::nk, WeightOrder::kn}) {
      arena.used = mark;
      const std::size_t bytes = count * size_of(out);
      auto* fenced = static_cast<std::byte*>(arena.put(nullptr, bytes + 2 * kFence, 0));
      std::byte* p = fenced + kFence + skew * size_of(out);
      const std::size_t before = static_cast<std::size_t>(p - fenced), total = bytes + 2 * kFence;
      CHECK(cudaMemset(fenced, 0xa5, total));
      CHECK(cudaMemset(p, 0xff, bytes));
      CHECK(static_cast<cudaError_t>(nibble::cuda::dequantize(w, p, out, order, nullptr)));
      CHECK(cudaDeviceSynchronize());
      std::vector<std::byte> host(total);
      CHECK(cudaMemcpy(host.data(), fenced, total, cudaMemcpyDeviceToHost));

      const char* kernel = nibble::cuda::dequantize_kernel(w, p, out, order);
      ++by_kernel[kernel[0] == 'r' ? 0 : kernel[0] == 't' ? 1 : kernel[1] == 'a' ? 2 : 3];
      long long wrong = 0;
      std::string first;
      for (std::size_t i = 0; i < total; ++i) {
        if (i == before) i += bytes;
        if (host[i] != std::byte{0xa5} && wrong++ == 0) first = "canary at byte " + std::to_string(i);
      }
      const std::uint32_t poison = out == DType::f32 ? 0xffffffffu : 0xffffu;
      for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t got = 0;
        std::memcpy(&got, host.data() + before + i * size_of(out), size_of(out));
        const std::int64_t major = static_cast<std::int64_t>(i);
        const std::int64_t row = order == WeightOrder::nk ? major / c.k : major % c.n;
        const std::int64_t col = order == WeightOrder::nk ? major % c.k : major / c.n;
        const std::uint32_t want = to_bits(expected[static_cast<std::size_t>(row * c.k + col)], out);
        const bool good = is_nan(want, out) ? is_nan(got, out) && got != poison : got == want;
        if (good || wrong++ != 0) continue;
        char text[120];
        std::snprintf(text, sizeof text, "W[%lld,%lld] is %08x, expected %08x", static_cast<long long>(row),
                      static_cast<long long>(col), got, want);
        first = text;
      }
      ++runs;
      elements += static_cast<long long>(count);
      if (wrong == 0) continue;
      if (++failures <= 20)
        std::printf("FAIL %s -> %s %s skew %zu (%s): %lld wrong, first %s\n", c.text().c_str(), name_of(out), name_of(order),
                    skew, kernel, wrong, first.c_str());
    }
  }
}

/// Words of tests/golden/format_vectors.json. Scale 1 and zero 0 make W the codes themselves.
void run_golden(Arena& arena) {
  const auto expect = [&](const char* name, const Case& c, const std::vector<float>& values) {  // values in [K,N] order
    for (std::int64_t k = 0; k < c.k; ++k)
      for (std::int64_t n = 0; n < c.n; ++n)
        if (c.value(n, k) != values[static_cast<std::size_t>(k * c.n + n)] && ++failures <= 20)
          std::printf("FAIL golden %s: the reference gives %g at n=%lld k=%lld, not %g\n", name,
                      static_cast<double>(c.value(n, k)), static_cast<long long>(n), static_cast<long long>(k),
                      static_cast<double>(values[static_cast<std::size_t>(k * c.n + n)]));
    run_case(arena, c);
  };
  Case c;
  c.n = 8, c.k = 1;
  c.qweight = {0x75316420u}, c.qzeros = {0}, c.scales.assign(8, 0x3c00u);
  expect("awq_gemm_seq", c, {0, 1, 2, 3, 4, 5, 6, 7});

  c = {};
  c.n = 16, c.k = 4;
  c.qweight = {0xdd360649u, 0x1bfb4577u, 0x64aecc5fu, 0x1bb8088du, 0xb2d4d830u, 0x4dadca41u, 0xfd83ac12u, 0x619a7d32u};
  c.qzeros = {0x44d25316u, 0xdc141db2u};
  c.scales.assign(16, 0x3800u);  // 0.5
  const int q[4][16] = {{9, 6, 4, 3, 6, 13, 0, 13, 7, 11, 7, 15, 5, 11, 4, 1},
                        {15, 14, 5, 10, 12, 4, 12, 6, 13, 8, 8, 11, 8, 11, 0, 1},
                        {0, 4, 3, 13, 8, 2, 13, 11, 1, 13, 4, 10, 10, 13, 12, 4},
                        {2, 3, 1, 8, 12, 13, 10, 15, 2, 10, 3, 9, 13, 1, 7, 6}};
  const int z[16] = {6, 2, 1, 13, 3, 4, 5, 4, 2, 4, 11, 1, 13, 12, 1, 13};
  std::vector<float> w;
  for (const auto& row : q)
    for (int i = 0; i < 16; ++i) w.push_back(0.5f * static_cast<float>(row[i] - z[i]));
  expect("awq_gemm", c, w);

  const auto column = [&](const char* name, int bits, std::vector<std::uint32_t> words, std::vector<float> codes) {
    Case g;
    g.format = CheckpointFormat::gptq, g.bits = bits, g.n = 1, g.k = 32;
    g.qweight = std::move(words), g.qzeros = {0}, g.scales = {0x3c00u};
    expect(name, g, codes);
  };
  column("gptq_w2", 2, {0x90b34e6fu, 0x5e48515cu},
         {3, 3, 2, 1, 2, 3, 0, 1, 3, 0, 3, 2, 0, 0, 1, 2, 0, 3, 1, 1, 1, 0, 1, 1, 0, 2, 0, 1, 2, 3, 1, 1});
  column("gptq_w3", 3, {0xa32f5a8au, 0x44ee71cbu, 0x7750034au},
         {2, 1, 2, 5, 5, 6, 3, 1, 3, 4, 6, 5, 4, 3, 4, 3, 6, 5, 3, 2, 4, 4, 2, 2, 3, 0, 0, 0, 5, 6, 5, 3});
  column("gptq_w4", 4, {0xfb2f6fa7u, 0x48542af5u, 0xcf3637dfu, 0x9456a279u},
         {7, 10, 15, 6, 15, 2, 11, 15, 5, 15, 10, 2, 4, 5, 8, 4, 15, 13, 7, 3, 6, 3, 15, 12, 9, 7, 2, 10, 6, 5, 4, 9});
  column("gptq_w8", 8, {0xc830a1c2u, 0x3b09fb22u, 0x3a7e9acau, 0x4edddbfdu, 0x57373b52u, 0x0c1599fau, 0x84ddc492u, 0x2d5e488fu},
         {194, 161, 48, 200, 34,  251, 9,  59, 202, 154, 126, 58,  253, 219, 221, 78,
          82,  59,  55, 87,  250, 153, 21, 12, 146, 196, 221, 132, 143, 72,  94,  45});

  // z = [7,0,5,9,1,15,3,8] as v2 and as v1 writes it (masked): with codes of 0, W = −z.
  c = {};
  c.format = CheckpointFormat::gptq, c.n = 8, c.k = 8;
  c.qweight.assign(8, 0), c.scales.assign(8, 0x3c00u);
  std::vector<float> negative;
  for (int k = 0; k < 8; ++k)
    for (const int zero : {7, 0, 5, 9, 1, 15, 3, 8}) negative.push_back(static_cast<float>(-zero));
  c.qzeros = {0x83f19507u};
  expect("gptq_qzeros v2", c, negative);
  c.qzeros = {0x72e084f6u}, c.v1 = true;
  expect("gptq_qzeros v1", c, negative);
}

void run_correctness(Arena& arena) {
  run_golden(arena);
  const std::int64_t even[][2] = {{8, 8}, {64, 64}, {128, 256}, {136, 264}, {104, 96}, {256, 1024}, {1000, 776}, {384, 2056}};
  const std::int64_t odd[][2] = {{1, 1}, {7, 33}, {33, 100}, {130, 258}, {260, 523}, {100, 384}};
  const std::int64_t groups[] = {0, 32, 64, 128, 40, 24};
  const DType scales[] = {DType::f16, DType::bf16, DType::f32};
  int turn = 0;
  const auto all = [&](std::int64_t n, std::int64_t k) {
    for (const std::int64_t g : groups) {
      if (g > k) continue;
      for (int kind = 0; kind < 5; ++kind) {  // awq4, gptq4, gptq8, gptq2, gptq3
        const bool awq = kind == 0;
        if (awq && n % 8 != 0) continue;
        const int bits = kind <= 1 ? 4 : kind == 2 ? 8 : kind == 3 ? 2 : 3;
        for (int act = 0; act < (awq || g == 0 ? 1 : 2); ++act, ++turn)
          run_case(arena, make_case(awq ? CheckpointFormat::awq : CheckpointFormat::gptq, bits, !awq && turn % 2 == 1,
                                    scales[turn % 3], n, k, g, act == 1, turn % 4 != 0));
      }
    }
  };
  for (const auto& [n, k] : even) all(n, k);
  for (const auto& [n, k] : odd) all(n, k);
  for (int kind = 0; kind < 2; ++kind)
    run_case(arena,
             make_case(kind == 0 ? CheckpointFormat::awq : CheckpointFormat::gptq, 4, kind == 1, DType::f16, 128, 512, 128, false,
                       true),
             1);

  // Refusals name the reason, and launch nothing.
  CheckpointWeight w;
  w.n = 8, w.k = 8, w.qweight = w.qzeros = w.scales = arena.base;
  const auto refused = [&](const CheckpointWeight& bad, void* out, DType type) {
    if (nibble::cuda::dequantize_refusal(bad, out, type) == nullptr ||
        nibble::cuda::dequantize(bad, out, type, WeightOrder::nk, nullptr) != cudaErrorInvalidValue) {
      ++failures;
      std::printf("FAIL: arguments that should be refused were not\n");
    }
  };
  if (nibble::cuda::dequantize_refusal(w, arena.base, DType::f16) != nullptr)
    ++failures, std::printf("FAIL: refused good ones\n");
  refused(w, arena.base + 1, DType::f16);
  refused(w, nullptr, DType::f16);
  refused(w, arena.base, DType::s8);
  CheckpointWeight bad = w;
  bad.n = 12;
  refused(bad, arena.base, DType::f16);
  bad = w, bad.bits = 8;
  refused(bad, arena.base, DType::f16);
  bad = w, bad.format = CheckpointFormat::gptq, bad.bits = 5;
  refused(bad, arena.base, DType::f16);
  bad = w, bad.qweight = arena.base + 2;
  refused(bad, arena.base, DType::f16);
}

// --- speed --------------------------------------------------------------------------------------------------------------------

/// Reads `in` once and writes `out` once, in 16-byte accesses: a block reads 256·Loads neighbouring vectors, then writes its share.
template <int Loads, bool Streaming>
__global__ void __launch_bounds__(256)
    copy_like(const uint4* in, std::int64_t in_vectors, uint4* out, std::int64_t out_vectors, std::int64_t share) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * 256 * Loads + threadIdx.x;
  uint4 v[Loads];
#pragma unroll
  for (int i = 0; i < Loads; ++i) {
    const std::int64_t at = first + i * 256;
    v[i] = at < in_vectors ? (Streaming ? __ldcs(in + at) : in[at]) : make_uint4(0, 0, 0, 0);
  }
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * share, end = min(begin + share, out_vectors);
  for (std::int64_t base = begin + threadIdx.x; base < end; base += 256 * Loads) {
#pragma unroll
    for (int i = 0; i < Loads; ++i) {
      const std::int64_t at = base + i * 256;
      if (at >= end) break;
      if (Streaming)
        __stcs(out + at, v[i]);
      else
        out[at] = v[i];
    }
  }
}

/// The same traffic with a thread for every output vector; neighbours share the vector they read.
__global__ void __launch_bounds__(256)
    copy_spread(const uint4* in, std::int64_t in_vectors, uint4* out, std::int64_t out_vectors, float ratio) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (at >= out_vectors) return;
  const auto from = static_cast<std::int64_t>(static_cast<double>(at) * static_cast<double>(ratio));
  __stcs(out + at, in[min(from, in_vectors - 1)]);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// Microseconds a call: the median of 9 batches of 24 back-to-back calls, each on the next set.
template <class F>
double time_us(F call) {
  constexpr int kBatch = 24;
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<double> times;
  int set = 0;
  for (int batch = 0; batch < 11; ++batch) {
    CHECK(cudaEventRecord(begin));
    for (int i = 0; i < kBatch; ++i) call(set++);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaGetLastError());
    float ms = 0;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (batch >= 2) times.push_back(1e3 * static_cast<double>(ms) / kBatch);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  return median(times);
}

struct Row {
  std::string format, order, out, kernel;
  std::int64_t n, k;
  double bytes_in, bytes_out, us, copy_us;
};

/// One layer in several copies, f16 or other output in both orders, and the copies that move the same bytes.
void time_layer(std::vector<Row>& rows, CheckpointFormat format, int bits, std::int64_t n, std::int64_t k, bool act_order,
                DType out, const char* label) {
  constexpr std::int64_t kGroup = 128;
  const Case c = make_case(format, bits, format == CheckpointFormat::gptq, DType::f16, n, k, kGroup, act_order, false);
  const auto scale_bytes = c.scale_bytes();
  const auto align = [](std::size_t b) { return (b + 255) / 256 * 256; };
  const std::size_t weight_at = 0, zero_at = align(4 * c.qweight.size()), scale_at = zero_at + align(4 * c.qzeros.size());
  const std::size_t index_at = scale_at + align(scale_bytes.size());
  const std::size_t in_bytes = index_at + align(4 * c.g_idx.size());
  const std::size_t out_bytes = static_cast<std::size_t>(n * k) * size_of(out);
  const int sets =
      static_cast<int>(std::max<std::size_t>(2, ceil_div(std::int64_t{400} << 20, static_cast<std::int64_t>(in_bytes))));
  const int out_sets =
      static_cast<int>(std::max<std::size_t>(2, ceil_div(std::int64_t{400} << 20, static_cast<std::int64_t>(out_bytes))));
  std::byte *in = nullptr, *outs = nullptr;
  CHECK(cudaMalloc(&in, in_bytes * static_cast<std::size_t>(sets)));
  CHECK(cudaMalloc(&outs, out_bytes * static_cast<std::size_t>(out_sets)));
  CHECK(cudaMemcpy(in + weight_at, c.qweight.data(), 4 * c.qweight.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(in + zero_at, c.qzeros.data(), 4 * c.qzeros.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(in + scale_at, scale_bytes.data(), scale_bytes.size(), cudaMemcpyHostToDevice));
  if (act_order) CHECK(cudaMemcpy(in + index_at, c.g_idx.data(), 4 * c.g_idx.size(), cudaMemcpyHostToDevice));
  for (int i = 1; i < sets; ++i)
    CHECK(cudaMemcpy(in + in_bytes * static_cast<std::size_t>(i), in, in_bytes, cudaMemcpyDeviceToDevice));
  const auto in_of = [&](int set) { return in + in_bytes * static_cast<std::size_t>(set % sets); };
  const auto out_of = [&](int set) { return outs + out_bytes * static_cast<std::size_t>(set % out_sets); };
  const auto weight = [&](int set) {
    CheckpointWeight w;
    const std::byte* p = in_of(set);
    w.format = c.format, w.bits = c.bits, w.zeros_minus_one = c.v1, w.scale = c.scale, w.n = n, w.k = k, w.group = kGroup;
    w.qweight = p + weight_at, w.qzeros = p + zero_at, w.scales = p + scale_at;
    w.g_idx = act_order ? p + index_at : nullptr;
    return w;
  };
  const auto copy = [&]<int Loads, bool Streaming>() {
    const auto in_vectors = static_cast<std::int64_t>(in_bytes / 16), out_vectors = static_cast<std::int64_t>(out_bytes / 16);
    const std::int64_t blocks = ceil_div(in_vectors, 256 * Loads), share = ceil_div(out_vectors, blocks);
    return time_us([&](int set) {
      copy_like<Loads, Streaming><<<static_cast<unsigned>(blocks), 256>>>(
          reinterpret_cast<const uint4*>(in_of(set)), in_vectors, reinterpret_cast<uint4*>(out_of(set)), out_vectors, share);
    });
  };
  const auto spread = [&] {
    const auto in_vectors = static_cast<std::int64_t>(in_bytes / 16), out_vectors = static_cast<std::int64_t>(out_bytes / 16);
    const float ratio = static_cast<float>(in_vectors) / static_cast<float>(out_vectors);
    return time_us([&](int set) {
      copy_spread<<<static_cast<unsigned>(ceil_div(out_vectors, 256)), 256>>>(
          reinterpret_cast<const uint4*>(in_of(set)), in_vectors, reinterpret_cast<uint4*>(out_of(set)), out_vectors, ratio);
    });
  };
  const auto best_copy = [&] {
    return std::min({spread(), copy.operator()<1, false>(), copy.operator()<1, true>(), copy.operator()<4, false>(),
                     copy.operator()<4, true>()});
  };
  const double copy_before = best_copy();
  std::vector<Row> mine;
  for (const WeightOrder order : {WeightOrder::nk, WeightOrder::kn}) {
    const double us = time_us([&](int set) {
      CHECK(static_cast<cudaError_t>(nibble::cuda::dequantize(weight(set), out_of(set), out, order, nullptr)));
    });
    mine.push_back({label, name_of(order), name_of(out), nibble::cuda::dequantize_kernel(weight(0), outs, out, order), n, k,
                    static_cast<double>(in_bytes), static_cast<double>(out_bytes), us, 0});
    // A sample of the result, at every size of index a layer has.
    std::vector<std::byte> host(out_bytes);
    CHECK(cudaMemset(outs, 0xff, out_bytes));
    CHECK(static_cast<cudaError_t>(nibble::cuda::dequantize(weight(0), outs, out, order, nullptr)));
    CHECK(cudaMemcpy(host.data(), outs, out_bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 500000; ++i) {
      const auto row = static_cast<std::int64_t>(random_engine() % static_cast<std::uint64_t>(n));
      const auto col = static_cast<std::int64_t>(random_engine() % static_cast<std::uint64_t>(k));
      const std::int64_t at = order == WeightOrder::nk ? row * k + col : col * n + row;
      std::uint32_t got = 0;
      std::memcpy(&got, host.data() + static_cast<std::size_t>(at) * size_of(out), size_of(out));
      if (got != to_bits(c.value(row, col), out) && ++failures <= 20)
        std::printf("FAIL %s at full size, %s: W[%lld,%lld]\n", c.text().c_str(), name_of(order), static_cast<long long>(row),
                    static_cast<long long>(col));
    }
  }
  const double copy_us = std::min(copy_before, best_copy());
  for (Row& row : mine) {
    row.copy_us = copy_us;
    std::printf("%-9s %6lldx%-6lld %s %-4s %-7s %8.2f us  copy %8.2f us  %5.1f %%  %6.0f GB/s\n", label,
                static_cast<long long>(n), static_cast<long long>(k), row.order.c_str(), row.out.c_str(), row.kernel.c_str(),
                row.us, row.copy_us, 100 * row.copy_us / row.us, (row.bytes_in + row.bytes_out) / row.us / 1e3);
    rows.push_back(row);
  }
  CHECK(cudaFree(in));
  CHECK(cudaFree(outs));
}

void write_json(const char* path, const std::vector<Row>& rows) {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  int driver = 0, runtime = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  std::FILE* f = std::fopen(path, "w");
  if (f == nullptr) std::exit(4);
  std::fprintf(
      f,
      "{\n  \"device\": \"%s\",\n  \"sms\": %d,\n  \"l2_bytes\": %d,\n  \"driver\": %d,\n  \"runtime\": %d,\n"
      "  \"group\": 128,\n  \"scales\": \"f16\",\n  \"method\": \"median of 9 batches of 24 launches over rotating buffers; "
      "copy_us is the fastest of five copy-like kernels, before or after\",\n"
      "  \"correctness\": {\"runs\": %lld, \"elements\": %lld, \"failures\": %d, \"rows\": %lld, \"tile\": %lld, "
      "\"gather\": %lld, \"generic\": %lld},\n  \"results\": [\n",
      device.name, device.multiProcessorCount, device.l2CacheSize, driver, runtime, runs, elements, failures, by_kernel[0],
      by_kernel[1], by_kernel[2], by_kernel[3]);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    std::fprintf(f,
                 "    {\"format\": \"%s\", \"n\": %lld, \"k\": %lld, \"order\": \"%s\", \"out\": \"%s\", \"kernel\": \"%s\", "
                 "\"bytes_in\": %.0f, \"bytes_out\": %.0f, \"us\": %.3f, \"copy_us\": %.3f, \"of_copy\": %.4f}%s\n",
                 r.format.c_str(), static_cast<long long>(r.n), static_cast<long long>(r.k), r.order.c_str(), r.out.c_str(),
                 r.kernel.c_str(), r.bytes_in, r.bytes_out, r.us, r.copy_us, r.copy_us / r.us, i + 1 < rows.size() ? "," : "");
  }
  std::fprintf(f, "  ]\n}\n");
  std::fclose(f);
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device: skipped\n");
    return 77;
  }
  {
    Arena arena;
    run_correctness(arena);
    CHECK(cudaFree(arena.base));
  }
  std::printf("%lld runs, %lld elements, %d failures; rows %lld, tile %lld, gather %lld, generic %lld\n", runs, elements,
              failures, by_kernel[0], by_kernel[1], by_kernel[2], by_kernel[3]);
  if (argc > 1) {
    std::vector<Row> rows;
    constexpr std::int64_t kLayers[][2] = {{4096, 4096}, {8192, 8192}, {28672, 8192}};
    for (const auto& [n, k] : kLayers) {
      time_layer(rows, CheckpointFormat::awq, 4, n, k, false, DType::f16, "awq4");
      time_layer(rows, CheckpointFormat::gptq, 4, n, k, false, DType::f16, "gptq4");
      time_layer(rows, CheckpointFormat::gptq, 8, n, k, false, DType::f16, "gptq8");
      time_layer(rows, CheckpointFormat::gptq, 4, n, k, true, DType::f16, "gptq4-act");
    }
    for (const DType out : {DType::bf16, DType::f32}) {
      time_layer(rows, CheckpointFormat::awq, 4, 8192, 8192, false, out, "awq4");
      time_layer(rows, CheckpointFormat::gptq, 4, 8192, 8192, false, out, "gptq4");
    }
    write_json(argv[1], rows);
  }
  std::printf(failures == 0 ? "PASS\n" : "FAIL\n");
  return failures == 0 ? 0 : 1;
}
