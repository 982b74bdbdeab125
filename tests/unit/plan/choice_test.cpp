// Replays the planner over the layers that were measured on an H100, an H200 and a Xeon (with AMX, without it, with AVX2 and AVX-VNNI alone), with
// every kernel that takes them: which kernel would it choose, was that one measured, and how much slower than the fastest was it? Needs none of
// them. The limits are a ratchet: they may only go down.
// Costs are fitted to surveys without the layers of bench/shapes/survey-left-out.txt, by which a choice is judged.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/kernel.hpp"
#include "nibble/device.hpp"
#include "plan/choose.hpp"
#include "survey.hpp"

namespace nibble {
namespace {

using testing::SurveyedLayer, testing::surveyed_layers;

struct Limits {
  const char* file;
  std::size_t unmeasured;  // choices without a measurement
  double median, worst;    // of the regret: how much slower than the fastest measured kernel the chosen one is
  double most = 1;         // of the regret: of 95 layers of 100
  double far = 1;          // of the predicted time of the choice: |predicted / measured − 1|, in the median
};
std::ostream& operator<<(std::ostream& out, const Limits& limits) { return out << limits.file; }

bool left_out(const Problem& p) {
  static const std::set<std::pair<std::int64_t, std::int64_t>> kLayers = [] {
    std::set<std::pair<std::int64_t, std::int64_t>> layers;
    std::ifstream in(NIBBLE_SOURCE_DIR "/bench/shapes/survey-left-out.txt");
    for (std::string line; std::getline(in, line);) {
      std::istringstream words(line);
      if (std::int64_t n = 0, k = 0; words >> n >> k) layers.emplace(n, k);
    }
    return layers;
  }();
  return kLayers.contains({p.n, p.k});
}

class Choice : public ::testing::TestWithParam<Limits> {};

TEST_P(Choice, IsMeasuredAndNearTheFastest) {
  const Limits& limits = GetParam();
  std::vector<std::string> unmeasured;
  std::vector<std::pair<double, std::string>> regrets;
  std::vector<double> judged;  // of layers that no cost is fitted to
  std::vector<double> far;
  for (const SurveyedLayer& layer : surveyed_layers(NIBBLE_SOURCE_DIR "/bench/results/" + std::string(limits.file))) {
    const nibble::Choice choice = choose_kernel(layer.problem, {}, true);
    ASSERT_NE(choice.kernel, nullptr) << text_of(refusals(layer.problem, judge_all(layer.problem, {}, true)));
    const auto fastest = std::ranges::min_element(layer.us, {}, [](const auto& entry) { return entry.second; });
    const auto chosen = layer.us.find(choice.kernel->name);
    const std::string where = fmt::format("{} N={} K={} M={}: {}, the fastest is {}", layer.scheme, layer.problem.n,
                                          layer.problem.k, layer.problem.m, choice.kernel->name, fastest->first);
    if (chosen == layer.us.end())
      unmeasured.push_back(where);
    else {
      regrets.emplace_back(chosen->second / fastest->second - 1, where);
      far.push_back(std::abs(choice.cost_us / chosen->second - 1));
    }
    if (chosen != layer.us.end() && left_out(layer.problem)) judged.push_back(regrets.back().first);
  }
  ASSERT_FALSE(regrets.empty());
  std::ranges::sort(regrets, std::greater());
  const double median = regrets[regrets.size() / 2].first, worst = regrets.front().first,
               most = regrets[regrets.size() / 20].first;
  fmt::print("{}: {} layers, {} choices not measured; slower than the fastest by {:.1f} % in the median, {:.1f} % at worst\n",
             limits.file, unmeasured.size() + regrets.size(), unmeasured.size(), 100 * median, 100 * worst);
  std::ranges::sort(judged);
  if (!judged.empty())
    fmt::print("  of {} layers that no cost is fitted to: {:.1f} % in the median, {:.1f} % in 95 of 100, {:.1f} % at worst\n",
               judged.size(), 100 * judged[judged.size() / 2], 100 * judged[judged.size() * 95 / 100], 100 * judged.back());
  for (const std::string& where : unmeasured) fmt::print("  not measured  {}\n", where);
  for (const auto& [regret, where] : regrets)
    if (regret > 0.05) fmt::print("  {:5.1f} %       {}\n", 100 * regret, where);
  EXPECT_LE(unmeasured.size(), limits.unmeasured);
  EXPECT_LE(median, limits.median);
  EXPECT_LE(worst, limits.worst);
  EXPECT_LE(most, limits.most);
  std::ranges::sort(far);
  fmt::print("  predicted times are {:.0f} % off in the median\n", 100 * far[far.size() / 2]);
  EXPECT_LE(far[far.size() / 2], limits.far);
}

// The CPU was shared with others: times of the same kernel differ by up to a half. Of convolutions one choice is not measured: 256 → 64
// channels in batches of 32 go to a row that is newer than the measurements.
// The layers of AMX and of AVX-512 were measured before kernels read several streams of weights: of few tokens they took longer than is
// predicted now.
INSTANTIATE_TEST_SUITE_P(
    Measured, Choice,
    ::testing::Values(
        Limits{"h100/survey-wna16.json", 0, 0.001, 0.14}, Limits{"h100/survey-groups.json", 0, 0.001, 0.078},
        Limits{"h100/survey-online.json", 0, 0.001, 0.155}, Limits{"h100/survey-online-tokens.json", 0, 0.001, 0.163},
        Limits{"h200/survey-wna16.json", 0, 0.001, 0.106}, Limits{"h200/survey-int8.json", 0, 0.001, 0.18},
        Limits{"h200/survey-fp8.json", 0, 0.001, 0.132}, Limits{"h200/survey-fp8-blocks.json", 0, 0.001, 0.27},
        Limits{"h200/survey-groups.json", 0, 0.001, 0.151}, Limits{"h200/survey-online.json", 0, 0.001, 0.11},
        Limits{"h200/survey-online-tokens.json", 0, 0.001, 0.181}, Limits{"h100/survey-online-folds.json", 0, 0.001, 0.065},
        Limits{"h200/survey-online-folds.json", 0, 0.001, 0.061}, Limits{"h100/shards.json", 0, 0.001, 0.065},
        Limits{"h200/shards.json", 0, 0.001, 0.121}, Limits{"h200/gemm-qwen.json", 0, 0.001, 0.01},
        Limits{"h200/survey-8bit.json", 0, 0.001, 0.09}, Limits{"h200/gemm-deepseek.json", 0, 0.001, 0.081},
        Limits{"h200/conv-kernels.json", 1, 0.002, 0.185}, Limits{"h100/conv-kernels.json", 1, 0.005, 0.111},
        Limits{"h200/survey-f32.json", 0, 0.001, 0.323}, Limits{"h200/survey-f32-groups.json", 0, 0.001, 0.083},
        Limits{"cpu-survey-amx.json", 0, 0.001, 0.05, 0.001, 0.08}, Limits{"cpu-survey-avx512.json", 0, 0.001, 0.02, 0.001, 0.06},
        Limits{"cpu-survey-avx2.json", 0, 0.001, 0.07, 0.02, 0.06}),
    [](const auto& test) {
      std::string name = test.param.file;
      name.resize(name.find('.'));
      for (char& c : name)
        if (c == '-' || c == '/') c = '_';
      return name;
    });

// A process of its own, because a process asks for its CPU once.
TEST(AssumedPeaks, OfAnIntelWhoseAmxMayNotBeUsedAreThoseOfItsBf16) {
  if (!this_device().cpu_name.starts_with("Intel") || !this_device().has(Isa::avx512bf16))
    GTEST_SKIP() << "this CPU is " << this_device().cpu_name << ", without bf16 dot products or not Intel's";
  const auto choose = [] {
    const Problem problem{.m = 64,
                          .n = 4096,
                          .k = 4096,
                          .scheme = Scheme::parse("u4b8g128")->weight,
                          .layout = "cpu_n32",
                          .a_dtype = DType::bf16,
                          .epilogue = {.out = DType::bf16}};
    fmt::print(stderr, "{}\n", choose_kernel(problem, {}, false).kernel->name);
    std::exit(0);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ASSERT_EQ(setenv("NIBBLE_ISA", "avx512bf16", 1), 0);
  EXPECT_EXIT(choose(), ::testing::ExitedWithCode(0), "__cpu_avx512(vnni)?_m");
  unsetenv("NIBBLE_ISA");
}

/// The kernels for so many rows of 128 experts, fewest first.
std::vector<std::string> chosen_for_experts(const GpuInfo& gpu, const char* scheme, const char* layout,
                                            std::initializer_list<std::int64_t> numbers = {8, 512, 32768}) {
  std::vector<std::string> names;
  const Scheme parsed = *Scheme::parse(scheme);
  for (const std::int64_t rows : numbers) {
    const Problem problem{.m = rows,
                          .n = 3072,
                          .k = 4096,
                          .scheme = parsed.weight,
                          .layout = layout,
                          .memory = Backend::cuda,
                          .a_dtype = DType::bf16,
                          .epilogue = {.out = DType::bf16},
                          .act_scheme = parsed.act,
                          .gpu = &gpu,
                          .experts = 128};
    const nibble::Choice choice = choose_kernel(problem, {}, false);
    names.emplace_back(choice.kernel == nullptr ? "none" : choice.kernel->name);
  }
  return names;
}

const GpuInfo kA100{.name = "NVIDIA A100",
                    .compute_capability = 80,
                    .sms = 108,
                    .shared_bytes_per_block = 166912,
                    .l2_bytes = 41943040,
                    .memory_bytes = std::int64_t{80} << 30,
                    .read_gbytes_per_s = 1800,
                    .isas = 1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80)};

TEST(ExpertChoice, OfAnA100IsOfTensorCoresInTilesOfFewAndOfManyRows) {
  const auto few_and_many = [](const std::string& few, const std::string& many) { return std::vector{few, few, many}; };
  EXPECT_EQ(chosen_for_experts(kA100, "u4b8g128", "gpu_n64k128"),
            few_and_many("linear_any_bf16_any__cuda_sm80_experts_m16n64k128", "linear_any_bf16_any__cuda_sm80_gemm"));
  EXPECT_EQ(chosen_for_experts(kA100, "s8r_u4b8g128", "gpu_n64k128"),
            few_and_many("linear_any_s8i16_any__cuda_sm80_experts_m16n64k128", "linear_any_s8i16_any__cuda_sm80_n64k128"));
  EXPECT_EQ(chosen_for_experts(kA100, "s8r_s8c", "gpu_w8n64k128"),
            few_and_many("linear_any_s8_any__cuda_sm80_experts_m16n64k128", "linear_any_s8_any__cuda_sm80_n64k128"));
  EXPECT_EQ(chosen_for_experts(kA100, "e4m3g128_e4m3b128x128", "gpu_w8n64k128"),
            few_and_many("linear_any_e4m3_any__cuda_sm80_experts_m16n64k128", "linear_any_e4m3_any__cuda_sm80_n64k128"));
}

TEST(ExpertChoice, OfHopperIsOfItsOwnKernels) {
  for (const std::string_view gpu : described_gpus())
    for (const auto& [scheme, layout] : {std::pair{"u4b8g128", "gpu_n64k128"},
                                         {"s8r_u4b8g128", "gpu_n64k128"},
                                         {"s8g32_u4b8g32", "gpu_n64k128"},
                                         {"s8r_s8c", "gpu_w8n64k128"},
                                         {"e4m3g128_e4m3b128x128", "gpu_w8n64k128"}})
      for (const std::string& kernel : chosen_for_experts(*described_gpu(gpu), scheme, layout))
        EXPECT_NE(kernel.find("__cuda_sm90"), std::string::npos) << gpu << " " << scheme << ": " << kernel;
}

// What was the fastest there, with every kernel forced in turn: bench/moe.py 128,8,4096,1536 --device cuda --tokens 256,1024,2048 --kernel NAME.
TEST(ExpertChoice, OfAnH200CountsOnThePartsThatKernelsLeaveOut) {
  const GpuInfo h200 = *described_gpu("h200");
  const auto tiles = [&](const char* scheme, const char* layout) {
    std::vector<int> rows;
    for (const std::string& name : chosen_for_experts(h200, scheme, layout, {2048, 8192, 16384}))
      rows.push_back(find_kernel(name)->tile.m);
    return rows;
  };
  EXPECT_EQ(tiles("u4b8g128", "gpu_n64k128"), (std::vector{32, 128, 128}));
  EXPECT_EQ(tiles("s8g128_u4b8g128", "gpu_n64k128").front(), 16);
  EXPECT_EQ(tiles("e4m3g128_e4m3b128x128", "gpu_w8n64k128"), (std::vector{64, 128, 128}));
  EXPECT_EQ(tiles("s8r_s8c", "gpu_w8n64k128"), (std::vector{64, 128, 128}));
}

// ---- K divided among CTAs, on sm_80's kernels of linear layers

Problem layer(std::int64_t m, std::int64_t n, std::int64_t k, const GpuInfo& gpu) {
  return {.m = m,
          .n = n,
          .k = k,
          .scheme = Scheme::parse("u4b8g128")->weight,
          .layout = "gpu_n64k128",
          .memory = Backend::cuda,
          .a_dtype = DType::f16,
          .epilogue = {.out = DType::f16},
          .gpu = &gpu};
}
/// The end of the kernel's name, behind "sm80_".
std::string chosen_sm80(std::int64_t m, std::int64_t n, std::int64_t k, const char* scheme = "u4b8g128") {
  Problem problem = layer(m, n, k, kA100);
  const Scheme parsed = *Scheme::parse(scheme);
  problem.scheme = parsed.weight, problem.act_scheme = parsed.act;
  if (parsed.weight.codes == DType::s8) problem.layout = "gpu_w8n64k128";
  const nibble::Choice choice = choose_kernel(problem, {}, false);
  const std::string name(choice.kernel == nullptr ? "none" : choice.kernel->name);
  const auto at = name.find("sm80_");
  return at == std::string::npos ? name : name.substr(at + 5);
}

/// An A100 has 108 SMs. 4096 rows are 64 tiles of 64 × 32; 28672 are 112 of 256 × 64, or 224 CTAs that have half of K each, in three rounds of half the
/// length instead of two.
TEST(SplitChoice, DividesKWhereTilesLeaveMultiprocessorsIdle) {
  EXPECT_EQ(chosen_sm80(32, 4096, 4096), "gemm4");
  EXPECT_EQ(chosen_sm80(64, 4096, 4096), "gemm4");
  EXPECT_EQ(chosen_sm80(32, 1024, 8192), "gemm8");
  EXPECT_EQ(chosen_sm80(64, 28672, 4096), "gemm2");
  EXPECT_EQ(chosen_sm80(64, 27648, 4096), "gemm");  // 108 tiles
  EXPECT_EQ(chosen_sm80(2048, 4096, 4096), "gemm");
  EXPECT_EQ(chosen_sm80(1, 4096, 14336), "m16n64k128");  // which divides K by itself (decode_sm80_ranks)
}

TEST(SplitChoice, DividesKOfCodesToo) {
  EXPECT_EQ(chosen_sm80(64, 4096, 4096, "s8g128_u4b8g128"), "split4_n64k128");
  EXPECT_EQ(chosen_sm80(8, 1024, 8192, "s8g128_u4b8g128"), "split8_n64k128");
  EXPECT_EQ(chosen_sm80(2048, 8192, 4096, "s8g128_u4b8g128"), "n64k128");
  EXPECT_EQ(chosen_sm80(64, 4096, 4096, "s8r_s8c"), "split4_n64k128");
  EXPECT_EQ(chosen_sm80(2048, 8192, 4096, "s8r_s8c"), "n64k128");
}

/// The predicted time of a split: rounds of CTAs × records of a rank, and adding the sums.
TEST(SplitChoice, IsByThePredictedTime) {
  GpuInfo gpu = kA100;
  gpu.sms = 132;
  const auto us = [&](int split, std::int64_t m, std::int64_t n, std::int64_t k) {
    return cuda::gemm_sm80_cost_us(split, gpu, layer(m, n, k, gpu));
  };
  // 64 CTAs of 64 × 32: two or four times as many have SMs, alone or two by two.
  EXPECT_LT(us(2, 32, 4096, 4096), us(1, 32, 4096, 4096) - 3);
  EXPECT_LT(us(4, 32, 4096, 4096), us(2, 32, 4096, 4096));
  // Deep layers gain more, layers that fill the GPU lose what adding takes.
  EXPECT_LT(us(4, 32, 4096, 14336) / us(1, 32, 4096, 14336), us(4, 32, 4096, 4096) / us(1, 32, 4096, 4096));
  EXPECT_GT(us(2, 512, 28672, 4096), us(1, 512, 28672, 4096));
  // What was not measured does not count on a GPU whose own kernels were.
  const GpuInfo h200 = *described_gpu("h200");
  EXPECT_EQ(cuda::gemm_sm80_cost_us(4, h200, layer(32, 4096, 4096, h200)),
            cuda::gemm_sm80_cost_us(1, h200, layer(32, 4096, 4096, h200)));
  // No more CTAs divide K than there are records.
  EXPECT_EQ(us(8, 32, 4096, 256), us(4, 32, 4096, 256));
}

/// The workspace of a split has the sums of a launch, which are bounded; it does not decrease with M.
TEST(SplitChoice, WorkspaceIsThatOfALaunch) {
  const GpuInfo h200 = *described_gpu("h200");
  for (const char* name : {"linear_any_f16_any__cuda_sm80_gemm2", "linear_any_f16_any__cuda_sm80_gemm8",
                           "linear_any_s8i16_any__cuda_sm80_split8_n64k128", "linear_any_s8_any__cuda_sm80_split2_n64k128"}) {
    const Kernel* const kernel = find_kernel(name);
    ASSERT_NE(kernel, nullptr) << name;
    std::size_t before = 0;
    for (std::int64_t m = 1; m <= 4096; m *= 2) {
      const std::size_t bytes = kernel->workspace(*kernel, layer(m, 4096, 4096, h200));
      EXPECT_GE(bytes, before) << name << " M=" << m;
      EXPECT_LE(bytes, std::size_t{17} << 20) << name << " M=" << m;
      EXPECT_GE(bytes, static_cast<std::size_t>(kernel->tile.split * std::min<std::int64_t>(m, 64) * 4096 * 4))
          << name << " M=" << m;
      before = bytes;
    }
  }
}

}  // namespace
}  // namespace nibble
