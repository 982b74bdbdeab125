// Replays the planner over the layers that were measured on an H200, with every kernel that takes them: which kernel would it choose,
// was that one measured, and how much slower than the fastest was it? Needs no GPU. The limits are a ratchet: they may only go down.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "plan/choose.hpp"

namespace nibble {
namespace {

using nlohmann::json;

/// A layer, and the time of each kernel.
struct Cell {
  Problem problem;
  std::string what;
  std::map<std::string, double, std::less<>> us;
};

const GpuInfo& h200() {
  static const GpuInfo kGpu = [] {
    GpuInfo gpu{.name = "NVIDIA H200", .compute_capability = 90, .sms = 132, .shared_bytes_per_block = 232448};
    gpu.l2_bytes = 62914560, gpu.memory_bytes = 150109880320;
    gpu.read_gbytes_per_s = 4381.01664;
    for (const Isa isa : {Isa::simt, Isa::sm80, Isa::sm90}) gpu.isas |= 1U << static_cast<int>(isa);
    return gpu;
  }();
  return kGpu;
}

Problem linear(const std::string& scheme, const json& row) {
  const Scheme parsed = *Scheme::parse(scheme);
  return {.m = row["m"],
          .n = row["n"],
          .k = row["k"],
          .scheme = parsed.weight,
          .layout = parsed.weight.codes == DType::s8 || parsed.weight.codes == DType::e4m3 ? "gpu_w8n64k128" : "gpu_n64k128",
          .memory = Backend::cuda,
          .a_dtype = DType::f16,
          .epilogue = {.out = DType::f16},
          .act_scheme = parsed.act,
          .gpu = &h200()};
}

/// Of a survey (bench/survey.py), or of `w8a8_check bench`, whose activations come as codes.
std::vector<Cell> measured(const std::string& file) {
  std::ifstream in(std::string(NIBBLE_SOURCE_DIR "/bench/results/h200/") + file);
  const json data = json::parse(in);
  const std::map<std::string, std::string> kinds{
      {"s8", "s8r_s8c"}, {"e4m3", "e4m3r_e4m3c"}, {"e4m3 g128", "e4m3g128_e4m3b128x128"}};
  std::vector<Cell> cells;
  for (const json& row : data["rows"]) {
    const bool codes = row.contains("kind");
    if (codes && !kinds.contains(row["kind"])) continue;
    Cell& cell = cells.emplace_back();
    cell.what = codes ? kinds.at(row["kind"]) : row["scheme"].get<std::string>();
    cell.problem = linear(cell.what, row);
    if (codes) cell.problem.a_dtype = cell.problem.act_scheme.codes;
    for (const auto& [kernel, us] : row["us"].items()) cell.us[kernel] = us;
  }
  return cells;
}

struct Limits {
  const char* file;
  std::size_t unmeasured;  // choices without a measurement
  double median, worst;    // of the regret: how much slower than the fastest measured kernel the chosen one is
};
std::ostream& operator<<(std::ostream& out, const Limits& limits) { return out << limits.file; }

class Choice : public testing::TestWithParam<Limits> {};

TEST_P(Choice, IsMeasuredAndNearTheFastest) {
  const Limits& limits = GetParam();
  std::vector<std::string> unmeasured;
  std::vector<std::pair<double, std::string>> regrets;
  for (const Cell& cell : measured(limits.file)) {
    const nibble::Choice choice = choose_kernel(cell.problem, {}, true);
    ASSERT_NE(choice.kernel, nullptr) << refusals(judge_all(cell.problem, {}, true));
    const auto fastest = std::ranges::min_element(cell.us, {}, [](const auto& entry) { return entry.second; });
    const auto chosen = cell.us.find(choice.kernel->name);
    const std::string where = fmt::format("{} N={} K={} M={}: {}, the fastest is {}", cell.what, cell.problem.n, cell.problem.k,
                                          cell.problem.m, choice.kernel->name, fastest->first);
    if (chosen == cell.us.end())
      unmeasured.push_back(where);
    else
      regrets.emplace_back(chosen->second / fastest->second - 1, where);
  }
  ASSERT_FALSE(regrets.empty());
  std::ranges::sort(regrets, std::greater());
  const double median = regrets[regrets.size() / 2].first, worst = regrets.front().first;
  fmt::print("{}: {} layers, {} choices not measured; slower than the fastest by {:.1f} % in the median, {:.1f} % at worst\n",
             limits.file, unmeasured.size() + regrets.size(), unmeasured.size(), 100 * median, 100 * worst);
  for (const std::string& where : unmeasured) fmt::print("  not measured  {}\n", where);
  for (const auto& [regret, where] : regrets)
    if (regret > 0.05) fmt::print("  {:5.1f} %       {}\n", 100 * regret, where);
  EXPECT_LE(unmeasured.size(), limits.unmeasured);
  EXPECT_LE(median, limits.median);
  EXPECT_LE(worst, limits.worst);
}

INSTANTIATE_TEST_SUITE_P(H200, Choice,
                         testing::Values(Limits{"scaled.json", 0, 0.001, 0.32}, Limits{"gemm-kernels.json", 0, 0.001, 0.12},
                                         Limits{"gemm-prefill.json", 0, 0.002, 0.02}, Limits{"gemm-groups.json", 0, 0.001, 0.1},

                                         Limits{"gemm-qwen.json", 0, 0.001, 0.12}, Limits{"gemm-deepseek.json", 0, 0.001, 0.15},
                                         Limits{"decode-kernels.json", 0, 0.001, 0.08},
                                         Limits{"online-kernels.json", 0, 0.001, 0.13},
                                         Limits{"online-tokens.json", 0, 0.001, 0.09},
                                         Limits{"online-folds.json", 0, 0.001, 0.04}),
                         [](const auto& test) {
                           std::string name = test.param.file;
                           name.resize(name.find('.'));
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace nibble
