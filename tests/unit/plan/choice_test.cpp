// Replays the planner over the layers that were measured on an H100 and an H200, with every kernel that takes them: which kernel would it
// choose, was that one measured, and how much slower than the fastest was it? Needs no GPU. The limits are a ratchet: they may only go down.
// Costs are fitted to surveys without the layers of bench/shapes/survey-left-out.txt, by which a choice is judged.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <sstream>
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

const GpuInfo kH100 = *described_gpu("h100"), kH200 = *described_gpu("h200");

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
          .act_scheme = parsed.act};
}

/// Of a survey (bench/survey.py).
std::vector<Cell> measured(const std::string& file) {
  std::ifstream in(std::string(NIBBLE_SOURCE_DIR "/bench/results/") + file);
  const json data = json::parse(in);
  std::vector<Cell> cells;
  for (const json& row : data["rows"]) {
    Cell& cell = cells.emplace_back();
    cell.what = row["scheme"];
    cell.problem = linear(cell.what, row);
    if (row["a_dtype"] == "s8" || row["a_dtype"] == "e4m3") cell.problem.a_dtype = cell.problem.act_scheme.codes;
    cell.problem.gpu = file.starts_with("h100") ? &kH100 : &kH200;
    if (row["us"].is_array()) {
      for (std::size_t i = 0; i < row["us"].size(); ++i)
        if (!row["us"][i].is_null()) cell.us[data["kernels"][i]] = row["us"][i];
    } else {
      for (const auto& [kernel, us] : row["us"].items()) cell.us[kernel] = us;
    }
  }
  return cells;
}

struct Limits {
  const char* file;
  std::size_t unmeasured;  // choices without a measurement
  double median, worst;    // of the regret: how much slower than the fastest measured kernel the chosen one is
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

class Choice : public testing::TestWithParam<Limits> {};

TEST_P(Choice, IsMeasuredAndNearTheFastest) {
  const Limits& limits = GetParam();
  std::vector<std::string> unmeasured;
  std::vector<std::pair<double, std::string>> regrets;
  std::vector<double> judged;  // of layers that no cost is fitted to
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
    if (chosen != cell.us.end() && left_out(cell.problem)) judged.push_back(regrets.back().first);
  }
  ASSERT_FALSE(regrets.empty());
  std::ranges::sort(regrets, std::greater());
  const double median = regrets[regrets.size() / 2].first, worst = regrets.front().first;
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
}

INSTANTIATE_TEST_SUITE_P(
    Measured, Choice,
    testing::Values(Limits{"h100/survey-wna16.json", 0, 0.001, 0.14}, Limits{"h100/survey-int8.json", 0, 0.001, 0.22},
                    Limits{"h100/survey-fp8.json", 0, 0.003, 0.237}, Limits{"h100/survey-fp8-blocks.json", 0, 0.001, 0.14},
                    Limits{"h100/survey-groups.json", 0, 0.001, 0.146}, Limits{"h100/survey-online.json", 0, 0.001, 0.317},
                    Limits{"h100/survey-online-tokens.json", 0, 0.001, 0.308}, Limits{"h200/survey-wna16.json", 0, 0.001, 0.201},
                    Limits{"h200/survey-int8.json", 0, 0.001, 0.174}, Limits{"h200/survey-fp8.json", 0, 0.001, 0.16},
                    Limits{"h200/survey-fp8-blocks.json", 0, 0.001, 0.187}, Limits{"h200/survey-groups.json", 0, 0.001, 0.254},
                    Limits{"h200/survey-online.json", 0, 0.001, 0.082}, Limits{"h200/survey-online-tokens.json", 0, 0.001, 0.249},
                    Limits{"h100/survey-online-folds.json", 0, 0.001, 0.136}, Limits{"h200/online-folds.json", 0, 0.001, 0.032},
                    Limits{"h200/gemm-qwen.json", 0, 0.001, 0.096}, Limits{"h200/gemm-deepseek.json", 0, 0.001, 0.143}),
    [](const auto& test) {
      std::string name = test.param.file;
      name.resize(name.find('.'));
      for (char& c : name)
        if (c == '-' || c == '/') c = '_';
      return name;
    });

}  // namespace
}  // namespace nibble
