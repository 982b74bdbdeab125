// Correctness and speed of the kernels that quantize activations. Needs a GPU.
//
//   quantize_check check                the GPU's codes, scales, zeros and sums against the host's, bit by bit
//   quantize_check bench [FILE.json]    GB/s from 1 MB to 1 GB, and µs of 1 … 64 tokens
//
// Method of the bench: timing.hpp; each call has its own activations and its own codes. Bytes are those of activations, codes and scales,
// once. A call waits for the one before it, so the time of few tokens is that of a step in a sequence.
#include <cuda_runtime_api.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "nibble/cuda.hpp"
#include "nibble/quantize.hpp"
#include "timing.hpp"

namespace nibble::cuda {
namespace {

// ---- cases

struct Case {
  DType type = DType::f16;
  ActScheme scheme;
  std::int64_t m = 1, k = 1;
  std::int64_t extra = 0;    // elements between the rows of A
  std::int64_t offset = 0;   // of A, in elements: spoils its alignment
  std::int64_t padding = 0;  // bytes between rows of codes; `padded`: written as zeros
  bool padded = false;
  bool prescaled = false, limited = false, summed = false, columns = false;  // columns: scales of a group lie together
  int first_kind = 0;                                                        // of rows

  std::string name() const {
    std::string text = std::string(nibble::name(type)) + " -> " + std::string(nibble::name(scheme.codes));
    text += scheme.group == GroupShape::tensor() ? " static"
            : scheme.group.k != 0                ? " g" + std::to_string(scheme.group.k)
                                                 : " token";
    if (scheme.zero != ZeroKind::none) text += " zero points";
    text += " " + std::to_string(m) + "x" + std::to_string(k) + " +" + std::to_string(extra) + " @" + std::to_string(offset) +
            " codes +" + std::to_string(padding);
    for (const auto& [flag, word] : {std::pair{padded, " padded"},
                                     {prescaled, " prescaled"},
                                     {limited, " limited"},
                                     {summed, " sums"},
                                     {columns, " columns"}})
      if (flag) text += word;
    return text;
  }
};

/// Rows of every kind: ordinary ones, ties, zeros, tiny values, and NaN or infinity, which affect only their row.
constexpr int kKinds = 10;
float activation(int kind, std::int64_t m, std::int64_t k, std::int64_t columns) {
  static const std::vector<float> kNoise = [] {
    std::vector<float> noise((1 << 18) + 7);  // an odd length
    for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = random_normal(17, i);
    return noise;
  }();
  const float x = kNoise[static_cast<std::size_t>(m * columns + k) % kNoise.size()];
  const std::int64_t somewhere = (m * 37) % columns;
  switch (kind) {
    case 1: return x * 1e-3f;
    case 2:  // the inverse is 1 where this is to be s8 (even tokens) or e4m3
      if (k == 0) return m % 2 == 0 ? 127.0f : 448.0f;
      return m % 2 == 0 ? std::clamp(std::floor(x * 30), -100.0f, 100.0f) + 0.5f
                        : std::clamp(std::floor(x * 100), -400.0f, 400.0f);
    case 3: return k % 2 == 0 ? 0.0f : -0.0f;
    case 4: return x * 1e-36f;
    case 5: return x * 1e4f;
    case 6: return std::abs(x) + 3.0f;  // one side of 0 alone
    case 7: return k == somewhere ? std::numeric_limits<float>::quiet_NaN() : x;
    case 8: return k == somewhere ? -std::numeric_limits<float>::infinity() : x;
    case 9: return k == somewhere ? -std::numeric_limits<float>::quiet_NaN() : x * 20;
    default: return x;
  }
}

std::vector<std::byte> activations(const Case& c) {
  const std::int64_t stride = c.k + c.extra;
  Tensor a(c.type, {c.offset + c.m * stride});
  for (std::int64_t m = 0; m < c.m; ++m)
    for (std::int64_t k = 0; k < stride; ++k)
      a.set(c.offset + m * stride + k, k < c.k ? activation(static_cast<int>((m + c.first_kind) % kKinds), m, k, c.k)
                                               : std::numeric_limits<float>::quiet_NaN());
  return a.bytes;
}

/// Outputs in one piece of memory, host's or device's, all 0xee before.
struct Layout {
  std::int64_t pitch, groups, codes, scales, zeros, sums, bytes;

  explicit Layout(const Case& c) {
    const auto up = [](std::int64_t v) { return (v + 255) / 256 * 256; };
    pitch = c.k + c.padding;
    groups = c.scheme.group.cols(c.k);
    codes = 256;
    scales = up(codes + c.m * pitch) + 256;
    zeros = up(scales + 4 * c.m * groups) + 256;
    sums = up(zeros + 4 * c.m) + 256;
    bytes = up(sums + 4 * c.m) + 256;
  }
  ActOutputs outputs(std::byte* at, const Case& c) const {
    ActOutputs out;
    out.codes = TensorView(at + codes, c.scheme.codes, {c.m, c.k});
    out.codes.strides[0] = pitch;
    if (c.scheme.group != GroupShape::tensor()) {
      out.scales =
          c.scheme.group.k == 0 ? TensorView(at + scales, DType::f32, {c.m}) : TensorView(at + scales, DType::f32, {c.m, groups});
      if (c.columns && c.scheme.group.k != 0) out.scales.strides = {1, c.m};
      if (c.scheme.zero != ZeroKind::none) out.zeros = TensorView(at + zeros, DType::s32, {c.m});
    }
    if (c.summed) out.sums = TensorView(at + sums, DType::s32, {c.m});
    return out;
  }
};

/// The call of a plan: codes past K become 0.
Status quantize_padded(const Case& c, const ConstTensorView& a, const ActOutputs& out, const ActOptions& options) {
  QuantizeTask task{.a = a.data, .type = a.dtype, .a_stride = a.stride(0), .m = c.m, .k = c.k};
  task.prescale = static_cast<const float*>(options.prescale.data);
  if (options.limit) task.limit = *options.limit;
  task.codes_type = c.scheme.codes;
  task.zero_points = c.scheme.zero != ZeroKind::none;
  task.known = options.known.has_value();
  if (task.known) task.scale = options.known->scale, task.zero = options.known->zero;
  task.group = c.scheme.group.k;
  task.codes = out.codes.data;
  task.pitch = task.columns = out.codes.stride(0);
  task.scales = static_cast<float*>(out.scales.data);
  task.scale_row = out.scales.stride(0);
  task.scale_group = out.scales.stride(1);
  task.zeros = static_cast<std::int32_t*>(out.zeros.data);
  task.zero_row = 1;
  task.sums = static_cast<std::int32_t*>(out.sums.data);
  task.sum_row = 1;
  return launch_quantize_acts(task, {});
}

DeviceMemory on_device(const std::vector<std::byte>& bytes) {
  DeviceMemory memory = must(DeviceMemory::allocate(std::max<std::size_t>(bytes.size(), 16)));
  if (!bytes.empty()) must(copy_to_device(memory.data(), bytes.data(), bytes.size()));
  return memory;
}

/// Reports the first difference, and the number of differing bytes.
bool equal(const Case& c, const Layout& layout, const std::vector<std::byte>& host, std::vector<std::byte>& device) {
  const auto word = [](const std::vector<std::byte>& v, std::int64_t at) {
    std::uint32_t w = 0;
    std::memcpy(&w, v.data() + at, 4);
    return w;
  };
  for (std::int64_t i = 0; i < c.m * layout.groups; ++i) {  // a NaN is a NaN
    const std::int64_t at = layout.scales + 4 * i;
    if (std::isnan(std::bit_cast<float>(word(host, at))) && std::isnan(std::bit_cast<float>(word(device, at))))
      std::memcpy(device.data() + at, host.data() + at, 4);
  }
  if (host == device) return true;
  std::size_t first = 0, count = 0;
  for (std::size_t i = host.size(); i-- > 0;)
    if (host[i] != device[i]) first = i, ++count;
  const auto at = static_cast<std::int64_t>(first);
  std::printf("FAIL %s: %zu bytes differ, first ", c.name().c_str(), count);
  const auto bytes = [&](const char* what) {
    std::printf("%s: host 0x%02x, GPU 0x%02x\n", what, std::to_integer<int>(host[first]), std::to_integer<int>(device[first]));
  };
  const auto number = [&](const char* what, std::int64_t begin, bool is_float) {
    const std::int64_t i = (at - begin) / 4, where = begin + 4 * i;
    if (is_float)
      std::printf("%s %lld (token %lld): host %.9g, GPU %.9g\n", what, static_cast<long long>(i),
                  static_cast<long long>(c.columns ? i % c.m : i / layout.groups),
                  static_cast<double>(std::bit_cast<float>(word(host, where))),
                  static_cast<double>(std::bit_cast<float>(word(device, where))));
    else
      std::printf("%s of token %lld: host %d, GPU %d\n", what, static_cast<long long>(i),
                  static_cast<std::int32_t>(word(host, where)), static_cast<std::int32_t>(word(device, where)));
  };
  if (at >= layout.codes && at < layout.codes + c.m * layout.pitch) {
    const std::int64_t m = (at - layout.codes) / layout.pitch, k = (at - layout.codes) % layout.pitch;
    std::printf("code of token %lld (kind %lld) channel %lld, ", static_cast<long long>(m),
                static_cast<long long>((m + c.first_kind) % kKinds), static_cast<long long>(k));
    bytes(k >= c.k ? "past K" : "inside");
  } else if (at >= layout.scales && at < layout.scales + 4 * c.m * layout.groups) {
    number("scale", layout.scales, true);
  } else if (at >= layout.zeros && at < layout.zeros + 4 * c.m) {
    number("zero", layout.zeros, false);
  } else if (at >= layout.sums && at < layout.sums + 4 * c.m) {
    number("sum", layout.sums, false);
  } else {
    bytes("outside of all outputs");
  }
  return false;
}

bool run_case(const Case& c) {
  const Layout layout(c);
  const std::vector<std::byte> a = activations(c);
  std::vector<std::byte> prescale(c.prescaled ? static_cast<std::size_t>(4 * c.k) : 0);
  for (std::size_t k = 0; 4 * k < prescale.size(); ++k) {
    const float factor = 1.0f + 0.3f * random_normal(5, k);
    std::memcpy(prescale.data() + 4 * k, &factor, 4);
  }
  ActOptions options;
  if (c.limited) options.limit = 1.7f;
  if (c.scheme.group == GroupShape::tensor()) options.known = StaticActs{0.0123f, c.scheme.zero != ZeroKind::none ? -13 : 0};
  const auto view = [&](const std::byte* data) {
    ConstTensorView v(data + c.offset * bits(c.type) / 8, c.type, {c.m, c.k});
    v.strides[0] = c.k + c.extra;
    return v;
  };
  const auto with_prescale = [&](const std::byte* data) {
    ActOptions complete = options;
    if (c.prescaled) complete.prescale = ConstTensorView(data, DType::f32, {c.k});
    return complete;
  };

  std::vector<std::byte> host(static_cast<std::size_t>(layout.bytes), std::byte{0xee}), result = host;
  const DeviceMemory a_device = on_device(a), prescale_device = on_device(prescale), out_device = on_device(host);
  must(quantize_activations(view(a.data()), c.scheme, layout.outputs(host.data(), c), with_prescale(prescale.data())));
  if (c.padded)
    for (std::int64_t m = 0; m < c.m; ++m)
      std::memset(host.data() + layout.codes + m * layout.pitch + c.k, 0, static_cast<std::size_t>(c.padding));
  const ActOutputs out = layout.outputs(out_device.data(), c);
  const ConstTensorView a_view = view(a_device.data());
  must(c.padded ? quantize_padded(c, a_view, out, with_prescale(prescale_device.data()))
                : quantize_activations(a_view, c.scheme, out, with_prescale(prescale_device.data()), Stream{}));
  must(copy_from_device(result.data(), out_device.data(), result.size()));
  return equal(c, layout, host, result);
}

std::vector<ActScheme> schemes() {
  std::vector<ActScheme> list;
  for (DType codes : {DType::s8, DType::e4m3}) {
    for (int group : {0, 32, 64, 128, 256, 8, 24, 1000})
      list.push_back({codes, group == 0 ? GroupShape::channel() : GroupShape::group(group)});
    list.push_back({codes, GroupShape::tensor()});
  }
  list.push_back({DType::s8, GroupShape::channel(), ZeroKind::integer});
  list.push_back({DType::s8, GroupShape::tensor(), ZeroKind::integer});
  return list;
}

int check() {
  struct Shape {
    std::int64_t m, k;
  };
  // Each path of the launcher: a row in a CTA of any size, several, parts of rows, a row too long for registers; odd ends.
  constexpr Shape kShapes[] = {{1, 1},      {1, 4096},   {3, 100},    {7, 127},    {5, 129},    {64, 1000},
                               {2, 8192},   {33, 2049},  {10, 14336}, {272, 4096}, {2300, 500}, {11, 40000},
                               {4300, 250}, {4353, 257}, {50, 28672}, {7, 53248}};
  int cases = 0, failures = 0;
  for (const Shape& shape : kShapes)
    for (const ActScheme& scheme : schemes())
      for (DType type : {DType::f32, DType::f16, DType::bf16}) {
        const int i = ++cases;
        Case c{.type = type, .scheme = scheme, .m = shape.m, .k = shape.k};
        c.first_kind = i * 7 % kKinds;
        c.extra = i % 4 == 0 ? 8 : i % 4 == 1 ? 3 : 0;
        c.offset = i % 5 == 0 ? 1 : i % 5 == 1 ? 2 : 0;
        c.padding = i % 3 == 0 ? (128 - c.k % 128) % 128 : i % 3 == 1 ? 5 : 0;
        c.padded = i % 2 == 0;
        c.prescaled = i % 7 < 2;
        c.limited = i % 11 < 3;
        c.summed = scheme.codes == DType::s8 && i % 3 != 0;
        c.columns = i % 2 == 1;
        if (!run_case(c) && ++failures == 20) {
          std::printf("and so on\n");
          return 1;
        }
      }
  std::printf("quantize_check: %d cases, %d failures\n", cases, failures);
  return failures == 0 ? 0 : 1;
}

// ---- bench

struct Kind {
  const char* name;
  ActScheme scheme;
};
const Kind kSchemes[] = {{"s8 token", {DType::s8}},
                         {"s8 token zero points", {DType::s8, GroupShape::channel(), ZeroKind::integer}},
                         {"s8 static", {DType::s8, GroupShape::tensor()}},
                         {"e4m3 token", {DType::e4m3}},
                         {"e4m3 g128", {DType::e4m3, GroupShape::group(128)}}};

nlohmann::json bench_one(const Kind& kind, DType type, std::int64_t m, std::int64_t k, const std::vector<std::byte>& noise,
                         double peak) {
  const Case c{.type = type, .scheme = kind.scheme, .m = m, .k = k, .columns = true};
  const Layout layout(c);
  const auto in = static_cast<std::size_t>(m * k * bits(type) / 8);
  const double bytes = static_cast<double>(in) + static_cast<double>(m * k) +
                       (kind.scheme.group == GroupShape::tensor() ? 0.0 : 4.0 * static_cast<double>(m * layout.groups));
  constexpr int kMostCopies = 8192;  // of the least 100 MB in total, still more than L2
  const int copies = std::min(copies_of(bytes), kMostCopies);
  const DeviceMemory a = must(DeviceMemory::allocate(in * static_cast<std::size_t>(copies)));
  const auto out_bytes = static_cast<std::size_t>(layout.bytes);
  const DeviceMemory out = must(DeviceMemory::allocate(out_bytes * static_cast<std::size_t>(copies)));
  for (std::size_t at = 0; at < a.size(); at += noise.size())
    must(copy_to_device(a.data() + at, noise.data(), std::min(noise.size(), a.size() - at)));
  ActOptions options;
  if (kind.scheme.group == GroupShape::tensor()) options.known = StaticActs{0.02f, 0};
  const double us = time_us(
      copies,
      [&](int i, cudaStream_t stream) {
        const auto copy = static_cast<std::size_t>(i);
        must(quantize_activations(ConstTensorView(a.data() + copy * in, type, {m, k}), kind.scheme,
                                  layout.outputs(out.data() + copy * out_bytes, c), options, Stream{stream}));
      },
      bytes > 100e6 || copies > 1000 ? 2 : 10);
  const double gbytes = 1e-3 * bytes / us;
  std::printf("%-22s %-4s %7lld x %-6lld %9.2f us %7.0f GB/s %5.1f %%\n", kind.name, std::string(name(type)).c_str(),
              static_cast<long long>(m), static_cast<long long>(k), us, gbytes, 100 * gbytes / peak);
  std::fflush(stdout);
  return {{"scheme", kind.name}, {"act", name(type)}, {"m", m}, {"k", k}, {"us", us}, {"gbytes_per_s", gbytes}};
}

int bench(const char* file) {
  GpuReadProbe probe = must(GpuReadProbe::make());
  const double peak = must(probe.measure());
  probe = GpuReadProbe();
  std::printf("%s reads %.0f GB/s\n", must(this_gpu()).name.c_str(), peak);
  nlohmann::json results = nlohmann::json::array();
  Tensor noise16(DType::bf16, {1 << 22}), noise32(DType::f32, {1 << 22});
  for (std::int64_t i = 0; i < noise16.numel(); ++i) {
    const float x = random_normal(23, static_cast<std::uint64_t>(i));
    noise16.set(i, x);
    noise32.set(i, x);
  }
  for (const Kind& kind : kSchemes)
    for (std::int64_t k : {4096, 14336})
      for (std::int64_t m : {1, 4, 16, 64}) results.push_back(bench_one(kind, DType::bf16, m, k, noise16.bytes, peak));
  for (const Kind& kind : kSchemes)
    for (std::int64_t k : {4096, 14336})
      for (std::int64_t megabytes : {1, 4, 16, 64, 256, 1024})
        results.push_back(bench_one(kind, DType::bf16, (megabytes << 20) / (2 * k), k, noise16.bytes, peak));
  for (std::int64_t k : {1024, 8192, 28672, 53248})
    results.push_back(bench_one(kSchemes[0], DType::bf16, (256 << 20) / (2 * k), k, noise16.bytes, peak));
  for (std::int64_t k : {4096, 14336})
    results.push_back(bench_one(kSchemes[0], DType::f32, (256 << 20) / (4 * k), k, noise32.bytes, peak));
  if (file == nullptr) return 0;
  const nlohmann::json all = {{"gpu", must(this_gpu()).name}, {"read_gbytes_per_s", peak}, {"results", results}};
  std::ofstream(file) << all.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace nibble::cuda

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "check") return nibble::cuda::check();
  if (mode == "bench") return nibble::cuda::bench(argc > 2 ? argv[2] : nullptr);
  std::fprintf(stderr, "usage: quantize_check check | bench [FILE.json]\n");
  return 2;
}
