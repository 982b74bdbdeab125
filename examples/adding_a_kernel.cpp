// A kernel family, whole: the code that runs, the row that describes it, the table it is listed in, and the proof that it is right.
// docs/adding.md explains it part by part. It is written against the headers of src/, as the families in src/kernels/ are.
//
// The kernel multiplies little. Codes of up to 4 bits have at most 16 values, so it first adds up the activations that meet the same code
// and then multiplies the sums of a group, 16 of them, rather than its channels:
//
//   D[m,n] = Σ_groups s · Σ_codes (value(code) − z) · Σ_{k in group, q[n,k] = code} a[m,k]
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "epilogue/epilogue.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/prepare/prepare.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/reference.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace buckets {
namespace {

// docs: begin run
constexpr int kTokens = 4;  // that share a pass over the codes: tile.m of the row
constexpr int kRows = 16;   // output channels of a task
constexpr int kCodes = 16;

/// Element i of an array of scales or zero points, which the plain layout may leave unaligned.
float number(const std::byte* array, DType type, std::int64_t i) {
  const std::byte* at = array + i * bits(type) / 8;
  const auto load = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return to_f32(value);
  };
  if (type == DType::f32) return load(0.0f);
  if (type == DType::f16) return load(f16{});
  if (type == DType::bf16) return load(bf16{});
  return code_value(type, static_cast<std::uint8_t>(*at));
}

/// A tile of kHeight tokens, prepared: the activations of a channel side by side. Times row n of W, into sums.
template <int kHeight>
void multiply(const PackedWeightData& w, std::int64_t n, const float* a, float* sums) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(w.bytes.data()) + n * w.k;
  const std::byte* scales = w.bytes.data() + w.n * w.k;
  const std::int64_t rows = w.scheme.group.rows(w.n), groups = w.groups(), group = w.group_size();
  const std::byte* zeros = scales + storage_bytes(w.scheme.scale, static_cast<std::uint64_t>(rows * groups));
  const std::int64_t first = (w.scheme.group.n == 0 ? 0 : n / w.scheme.group.n) * groups;

  std::fill_n(sums, kHeight, 0.0f);
  for (std::int64_t g = 0; g < groups; ++g) {
    float met[kCodes][kHeight] = {};  // the sum of the activations of each code
    for (std::int64_t k = g * group; k < std::min(w.k, (g + 1) * group); ++k)
      for (int r = 0; r < kHeight; ++r) met[codes[k]][r] += a[k * kHeight + r];
    const float scale = number(scales, w.scheme.scale, first + g);
    const float zero = w.zero_type == DType::none ? 0.0f : number(zeros, w.zero_type, first + g);
    float sum[kHeight] = {};
    for (int code = 0; code < 1 << bits(w.scheme.codes); ++code) {
      const float value = code_value(w.scheme.codes, static_cast<std::uint8_t>(code)) - zero;
      for (int r = 0; r < kHeight; ++r) sum[r] += value * met[code][r];
    }
    for (int r = 0; r < kHeight; ++r) sums[r] += sum[r] * scale;
  }
  for (int r = 0; r < kHeight; ++r) sums[r] *= w.scale2.value_or(1.0f);
}
constexpr std::array kMultiply{multiply<1>, multiply<2>, multiply<3>, multiply<4>};
static_assert(kMultiply.size() == kTokens);

Status run(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const std::int64_t m = args.a.dim(0);
  args.executor->parallel_for((w.n + kRows - 1) / kRows, [&](std::int64_t task) {
    const std::int64_t n0 = task * kRows, count = std::min<std::int64_t>(kRows, w.n - n0);
    for (std::int64_t m0 = 0; m0 < m; m0 += kTokens) {
      const std::int64_t height = std::min<std::int64_t>(kTokens, m - m0);
      float column[kTokens], tile[kTokens][kRows];
      for (std::int64_t n = 0; n < count; ++n) {
        kMultiply[static_cast<std::size_t>(height - 1)](w, n0 + n, reinterpret_cast<const float*>(args.prepared) + m0 * w.k,
                                                        column);
        for (std::int64_t r = 0; r < height; ++r) tile[r][n] = column[r];
      }
      for (std::int64_t r = 0; r < height; ++r)
        epilogue::store_row(*args.epilogue, args.operands, tile[r], m0 + r, n0, count, args.d);
    }
  });
  return {};
}
// docs: end run

// docs: begin row
Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "adds floats, the activations are to be quantized to {}", name(p.act_scheme.codes));
  if (info(p.scheme.codes).kind == DTypeKind::floating || bits(p.scheme.codes) > 4)
    return error(StatusCode::unsupported, "takes integer codes of up to 4 bits, not {}", name(p.scheme.codes));
  if (p.scheme.zero != ZeroKind::none && p.scheme.zero != ZeroKind::integer)
    return error(StatusCode::unsupported, "takes integer zero points, the weight's are floats ({})", p.scheme.name());
  return {};
}

/// For each weight and tile of tokens an addition, which waits for the last one of the same code; for each group 16 products.
double cost_us(const Kernel& self, const Problem& p) {
  constexpr double kAddNs = 1.8, kProductsNs = 170;  // choose_and_run() prints what they come to beside what it takes
  const std::int64_t tiles = (p.m + self.tile.m - 1) / self.tile.m;
  const std::int64_t adds = tiles * p.n * p.k, groups = tiles * p.n * p.scheme.group.cols(p.k);
  return 1e-3 * (kAddNs * static_cast<double>(adds) + kProductsNs * static_cast<double>(groups)) / p.machine.threads;
}

constexpr std::array kKernels{Kernel{.backend = Backend::cpu,
                                     .isa = Isa::baseline,
                                     .op = Op::linear,
                                     .out = "any",
                                     .act = "f32",
                                     .weight = "any",
                                     .layout = "plain",
                                     .variant = "buckets",
                                     .tile = {.m = kTokens},
                                     .summary = "adds activations by the code they meet, multiplies the sums",
                                     .form = ActForm::f32,  // of activations: kernels/cpu/prepare/prepare.hpp
                                     .accepts = accepts,
                                     .cost_us = cost_us,
                                     .run = run}};
// docs: end row

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace buckets

// docs: begin table
/// In place of src/kernels/registry.cpp, where a family is one name in this list. A step that prepares activations and the reference
/// are all that the new one needs beside it.
std::span<const Kernel> kernel_table() {
  static const KernelTable kTable({buckets::kernels(), cpu::prepare_kernels(), reference::kernels()});
  return kTable.rows();
}
// docs: end table

namespace {

// docs: begin verify
/// The conformance tests in small: every scheme the row takes, on random sizes, with act-order, a pre-scale, a bias and an epilogue.
int verify(const Kernel& kernel) {
  int checked = 0;
  for (const WeightScheme& scheme : testing::all_schemes())
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      const auto random = [&](std::uint64_t i, std::uint64_t most) {
        return 1 + static_cast<std::int64_t>(random_bits(seed, i) % most);
      };
      const QuantTensor q = testing::random_weight(scheme, random(0, 50), random(1, 300), seed,
                                                   {.act_order = seed % 2 == 0, .prescale = seed == 3, .bias = true});
      if (!kernel.accepts(kernel, {.n = q.n, .k = q.k, .scheme = scheme}).ok()) continue;
      const VerifySpec spec{.linear = {.a_dtype = seed == 1 ? DType::f16 : DType::f32,
                                       .m_max = random(2, 9),
                                       .epilogue = {.bias = true, .activation = Activation::silu, .out = DType::f32}},
                            .seed = seed,
                            .plan = {.kernel = std::string(kernel.name)}};
      const auto report = verify_linear(q, spec);
      if (!report || !report->passed || report->kernel != kernel.name) {
        std::printf("%s: %s\n", scheme.name().c_str(), report ? report->failure.c_str() : report.status().message().c_str());
        return -1;
      }
      ++checked;
    }
  return checked;
}
// docs: end verify

// docs: begin choice
/// The kernel is not named here: the plan takes the fastest of the rows that read the weight's layout.
Status choose_and_run() {
  constexpr std::int64_t m = 8, n = 512, k = 1024;
  const QuantTensor q = testing::random_weight({}, n, k, 1);  // u4b8g128
  const std::vector<float> a(m * k, 1.0f);
  std::vector<float> d(m * n);
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, {.layout = "plain"}));
  NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::linear(weight, {.m_max = m}));
  const Explanation explanation = plan.explain();
  for (const Explanation::Candidate& c : explanation.buckets.back().candidates)
    std::printf("%s: %s\n", std::string(c.kernel).c_str(),
                c.accepted ? fmt::format("{:.0f} µs predicted", c.cost_us).c_str() : c.refusal.c_str());

  std::vector<std::byte> workspace(plan.workspace_bytes());
  double best_us = std::numeric_limits<double>::infinity();
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    NIBBLE_RETURN_IF_ERROR(plan.run(weight, ConstTensorView(a.data(), {m, k}), TensorView(d.data(), {m, n}), {}, workspace));
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    best_us = std::min(best_us, took.count());
  }
  std::printf("%s: %.0f µs at best of five\n", std::string(plan.kernel(m)).c_str(), best_us);
  return plan.kernel(m) == kernel_table().front().name ? Status() : error(StatusCode::internal, "another kernel was chosen");
}
// docs: end choice

}  // namespace
}  // namespace nibble

int main() {
  using namespace nibble;
  const Kernel& kernel = kernel_table().front();
  const int checked = verify(kernel);
  if (checked <= 0) return 1;
  std::printf("%d layers are within their bounds\n", checked);
  if (const Status status = choose_and_run(); !status) {
    std::printf("%s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
