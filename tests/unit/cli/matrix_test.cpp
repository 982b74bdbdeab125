// The support matrix: complete, true to the planner, and with reasons that are one line.
#include "commands/matrix.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

namespace nibble::cli {
namespace {

using testing::HasSubstr;

TEST(SupportMatrix, HasNoEmptyCell) {
  const auto matrix = support_matrix();
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  ASSERT_GE(matrix->machines.size(), 5U);
  EXPECT_EQ(std::set<std::string>(matrix->weights.begin(), matrix->weights.end()).size(), matrix->weights.size());
  std::set<std::string> operations;
  for (const SupportMatrix::Question& question : matrix->questions) {
    operations.insert(question.operation);
    EXPECT_FALSE(question.name.empty() || question.about.empty());
    ASSERT_EQ(question.cells.size(), matrix->weights.size()) << question.name;
    for (const auto& row : question.cells) {
      ASSERT_EQ(row.size(), matrix->machines.size()) << question.name;
      for (const std::size_t answer : row) ASSERT_LT(answer, matrix->answers.size());
    }
  }
  EXPECT_EQ(operations, (std::set<std::string>{"linear", "conv", "dequantize"}));
  for (const std::string& answer : matrix->answers) {
    if (answer == "fast" || answer == "generic" || answer == "reference") continue;
    EXPECT_TRUE(answer.starts_with("no: ")) << answer;
    EXPECT_EQ(answer.find('\n'), std::string::npos) << answer;
    EXPECT_GT(answer.size(), 12U) << answer;
    EXPECT_LT(answer.size(), 160U) << answer;
    EXPECT_EQ(answer.find("__"), std::string::npos) << "the name of a kernel: " << answer;
  }
}

TEST(SupportMatrix, SaysWhatThePlannerSays) {
  const auto matrix = support_matrix();
  ASSERT_TRUE(matrix.ok()) << matrix.status().message();
  const auto cell = [&](std::string_view operation, std::string_view question, std::string_view weight,
                        std::string_view machine) {
    const auto q = std::ranges::find_if(matrix->questions,
                                        [&](const auto& one) { return one.operation == operation && one.name == question; });
    const auto w = std::ranges::find(matrix->weights, weight);
    const auto m = std::ranges::find(matrix->machines, machine, &SupportMatrix::Column::name);
    if (q == matrix->questions.end() || w == matrix->weights.end() || m == matrix->machines.end())
      return std::string("not asked");
    return matrix->answers[q->cells[static_cast<std::size_t>(w - matrix->weights.begin())]
                                   [static_cast<std::size_t>(m - matrix->machines.begin())]];
  };
  EXPECT_EQ(cell("linear", "f16", "u4b8g128", "sm_90"), "fast");
  EXPECT_EQ(cell("linear", "f32", "u4b8g128", "sm_90"), "fast");
  EXPECT_EQ(cell("linear", "f16", "u4b8g128", "sm_75"), "fast");
  EXPECT_EQ(cell("linear", "bf16", "u4b8g128", "sm_75"), "generic");
  EXPECT_EQ(cell("linear", "f32", "u4b8g128", "sm_75"), "fast");
  EXPECT_EQ(cell("linear", "f32", "u4b8g8", "baseline"), "fast");
  for (const auto& [operation, activations] : {std::pair("linear", "f16"), {"conv", "f16"}, {"dequantize", "→f16"}})
    EXPECT_EQ(cell(operation, activations, "u4b8g128", "sm_70"),
              "no: this GPU of compute capability 7.0 is older than compute capability 7.5, the least that nibble has kernels "
              "for: run on a newer GPU, or on the CPU");
  EXPECT_EQ(cell("linear", "f16→s8g128", "u4zg128", "sm_75"), "fast");
  EXPECT_EQ(cell("linear", "f16→s8g128", "u4zg128", "sm_80"), "fast");
  EXPECT_THAT(cell("linear", "f16→s8g128", "u4b8g96", "baseline"), HasSubstr("do not line up"));
  EXPECT_EQ(cell("linear", "f16→s8r", "e5m2c", "baseline"), "reference");
  EXPECT_EQ(cell("dequantize", "→f16", "u4zg128 act-order", "sm_80"), "generic");
  EXPECT_THAT(cell("conv", "f16", "u4b8g128 act-order", "sm_90"), HasSubstr("no act-order"));
  for (const std::string_view machine : {"sm_75", "sm_80", "sm_90"}) {
    EXPECT_EQ(cell("conv", "f16→s8r", "s8c", machine), "fast");
    EXPECT_EQ(cell("conv", "f16→s8r", "u4zg48", machine), "fast");
    EXPECT_EQ(cell("conv", "f16→e4m3t", "e4m3b128x128", machine), "fast");
    EXPECT_EQ(cell("conv", "f32", "e2m1g16", machine), "fast");
  }
}

/// Tables for readers: what answers alike is shown once, a machine that runs nothing in one cell, and refusals have numbers.
TEST(SupportMatrix, GroupsWhatAnswersAlike) {
  SupportMatrix matrix;
  matrix.machines = {{"old", ""}, {"new", ""}, {"newer", ""}};
  matrix.weights = {"u4b8g128", "u4b8g64", "u4zg128", "u4zg64", "u8b128g32", "u8b128c", "s8c", "s8c prescale", "e4m3b128x128"};
  matrix.answers = {"no: too old", "fast", "no: of a kind"};
  const std::vector<std::size_t> runs{0, 1, 1}, never{0, 2, 2};
  const std::vector<std::vector<std::size_t>> cells{runs, runs, runs, runs, runs, runs, runs, runs, never};
  matrix.questions = {{"linear", "f16", "", cells}, {"linear", "bf16", "", cells}};
  const SupportTables all = tables_of(matrix);
  ASSERT_EQ(all.tables.size(), 2U);
  EXPECT_EQ(all.tables[0].machines, (std::vector<std::string>{"old"}));
  EXPECT_TRUE(all.tables[0].columns.empty());
  ASSERT_EQ(all.tables[0].rows.size(), 1U);
  EXPECT_EQ(all.tables[0].rows[0].cells, (std::vector<std::string>{"no (1)"}));
  EXPECT_EQ(all.tables[1].machines, (std::vector<std::string>{"new", "newer"}));
  EXPECT_EQ(all.tables[1].columns, (std::vector<std::string>{"f16, bf16"}));
  ASSERT_EQ(all.tables[1].rows.size(), 2U);
  EXPECT_EQ(all.tables[1].rows[0].weights, "u4{b8,z}g{128,64}, u8b128{g32,c}, s8c, s8c prescale");
  EXPECT_EQ(all.tables[1].rows[0].cells, (std::vector<std::string>{"fast"}));
  EXPECT_EQ(all.tables[1].rows[1].weights, "e4m3b128x128");
  EXPECT_EQ(all.tables[1].rows[1].cells, (std::vector<std::string>{"no (2)"}));
  EXPECT_EQ(all.refusals, (std::vector<std::string>{"too old", "of a kind"}));
}

/// The reason of a cell: of most kernels that could run there, or what a better machine has.
TEST(SupportMatrix, TellsTheReasonThatSaysMost) {
  const auto reason = [](std::vector<Refusal> refusals, std::optional<Isa> level = {}) {
    return reason_of(Status(StatusCode::unsupported, "refused", std::move(refusals)), level);
  };
  const std::vector<Refusal> layouts{{.layout = "one", .reason = "groups of 8"}, {.layout = "two", .reason = "codes"}};
  EXPECT_EQ(reason(layouts), "groups of 8");
  std::vector<std::string_view> cpu, gpu;
  for (const KernelInfo& kernel : kernels()) (kernel.backend == Backend::cuda ? gpu : cpu).push_back(kernel.name);
  ASSERT_GE(gpu.size(), 3U);
  std::vector<Refusal> kernels{{.kernel = cpu[0], .others = 9, .reason = "runs on the CPU"},
                               {.kernel = gpu[0], .needs = Isa::sm80, .reason = "needs sm80"},
                               {.kernel = gpu[1], .needs = Isa::sm90, .reason = "needs sm90"},
                               {.kernel = gpu[2], .others = 4, .reason = "multiplies floats, A is not"},
                               {.kernel = gpu[2], .reason = "multiplies bytes; of one kind"}};
  EXPECT_EQ(reason(kernels), "multiplies bytes; of one kind");
  EXPECT_EQ(reason(kernels, Isa::sm90), "needs sm90");
  EXPECT_EQ(reason(kernels, Isa::simt), "needs sm80");
  kernels.pop_back();
  EXPECT_EQ(reason(kernels), "multiplies floats, A is not");
  EXPECT_EQ(reason({layouts[0], kernels[1]}), "groups of 8");
  EXPECT_EQ(reason({}), "refused");
}

}  // namespace
}  // namespace nibble::cli
