// The kernel table: names, facts and costs of its rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "plan/choose.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;

TEST(KernelTable, NamesAreTheFields) {
  std::set<std::string_view> seen;
  for (const Kernel& kernel : kernel_table()) {
    EXPECT_EQ(kernel.name, kernel_name(kernel));
    EXPECT_TRUE(seen.insert(kernel.name).second) << kernel.name << " is listed twice";
    EXPECT_FALSE(kernel.summary.empty()) << kernel.name;
    if (!kernel.layout.empty()) {
      EXPECT_NE(find_layout(kernel.layout), nullptr) << kernel.name;
    }
  }
  EXPECT_EQ(kernel_table().back().backend, Backend::reference);
}

/// The facts of a row that choice depends on are set and agree with its name.
TEST(KernelTable, FactsOfARowAgree) {
  std::set<ActForm> made;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == Op::prepare) {
      EXPECT_EQ(kernel.out, name(kernel.form)) << kernel.name;
      made.insert(kernel.form);
    }
  for (const Kernel& kernel : kernel_table()) {
    SCOPED_TRACE(kernel.name);
    if (kernel.op == Op::linear && kernel.form != ActForm::as_given) {
      EXPECT_EQ(kernel.act, name(kernel.form));
      EXPECT_TRUE(made.contains(kernel.form)) << "nothing prepares what it reads";
    }
    EXPECT_FALSE(kernel.quantizes && kernel.form != ActForm::as_given) << "codes are made twice";
    const bool prepares = kernel.form != ActForm::as_given && kernel.variant != "depthwise";
    EXPECT_EQ(kernel.linear != nullptr, kernel.op == Op::conv && (prepares || kernel.variant.starts_with("im2col")));
    if (kernel.linear == nullptr) continue;
    const Kernel* const linear = kernel.linear;
    EXPECT_EQ(linear->op, Op::linear);
    EXPECT_EQ(linear->isa, kernel.isa);
    EXPECT_EQ(linear->layout, kernel.layout);
    EXPECT_EQ(linear->form, kernel.form);
    EXPECT_EQ(linear->sums, kernel.sums);
    EXPECT_EQ(linear->tile.m, kernel.tile.m);
  }
}

TEST(Isa, LevelsOfCpusAndGpusAreTwoTrees) {
  for (Isa isa : kAllIsas) {
    EXPECT_EQ(backend(parent(isa)), backend(isa)) << name(isa);
    EXPECT_LE(parent(isa), isa) << name(isa);
    EXPECT_FALSE(backend(isa) == Backend::cuda && this_device().has(isa)) << name(isa);
  }
  EXPECT_EQ(backend(this_device().isa), Backend::cpu);
  EXPECT_TRUE(runs_here(Isa::baseline).ok());
}

TEST(Gpu, CostsGrowWithTheWorkAndOrderTheKernels) {
  const GpuInfo h200 = *described_gpu("h200");
  const auto cost = [&](Isa isa, std::int64_t m, std::int64_t n) {
    const Problem p{.m = m, .n = n, .k = 4096, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
    return isa == Isa::simt   ? cuda::simt_cost_us(h200, p)
           : isa == Isa::sm80 ? cuda::decode_sm80_cost_us(h200, p)
                              : std::min(cuda::decode_sm90_cost_us(8, h200, p), cuda::decode_sm90_cost_us(16, h200, p));
  };
  for (Isa isa : {Isa::simt, Isa::sm80, Isa::sm90})
    for (std::int64_t m = 1; m < 4096; m *= 2) {
      EXPECT_LE(cost(isa, m, 4096), cost(isa, 2 * m, 4096)) << name(isa) << " M=" << m;
      EXPECT_LE(cost(isa, m, 4096), cost(isa, m, 8192))
          << name(isa) << " M=" << m;  // sm80: a CTA for each SM at most, both times
      EXPECT_LT(cost(isa, m, 4096), cost(isa, m, 16384)) << name(isa) << " M=" << m;
      if (m <= 8) {  // more are for wgmma rows
        EXPECT_LT(cost(Isa::sm90, m, 8192), cost(Isa::sm80, m, 8192)) << "M=" << m;
      }
      EXPECT_LT(cost(Isa::sm80, m, 4096), cost(Isa::simt, m, 4096)) << "M=" << m;
    }
}

/// Quantizing in the launch that multiplies costs little over W4A16, up to the capacity of a launch; a scale per token costs more.
TEST(Gpu, QuantizingInTheSameLaunchCostsLittle) {
  const GpuInfo h200 = *described_gpu("h200");
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{4096, 4096}, {8192, 8192}, {4096, 14336}, {57344, 8192}})
    for (std::int64_t m : {1, 2, 4, 8}) {
      Problem p{.m = m, .n = n, .k = k, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
      p.act_scheme = {DType::s8, GroupShape::group(128)};
      const int tokens = m == 1 ? 1 : 8;
      const double online = cuda::wna8_decode_cost_us(tokens, h200, p);
      EXPECT_LT(online, 1.2 * cuda::decode_sm90_cost_us(tokens, h200, p) + (m == 1 ? 0.5 : 2.5))
          << "M=" << m << " N=" << n << " K=" << k;
      p.act_scheme.group = GroupShape::channel();
      EXPECT_GT(cuda::wna8_decode_cost_us(tokens, h200, p), online);
      p.m = 9;
      EXPECT_GT(cuda::wna8_decode_cost_us(8, h200, p), 1.5 * online) << "two launches";
    }
}

/// Adding partial sums of 512 channels in f32 costs little where tensor cores are the limit, and next to nothing where memory is.
TEST(Gpu, PreciseSumsOfFp8CostLittle) {
  const GpuInfo h200{.compute_capability = 90, .sms = 132, .read_gbytes_per_s = 4470};
  Problem p{.n = 8192, .k = 28672, .scheme = {DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32}};
  p.act_scheme = {DType::e4m3, GroupShape::channel()};
  const auto extra = [&](const Tile& tile, std::int64_t m) {
    p.m = m;
    p.accumulation = Accumulation::fast;
    const double fast = cuda::w8a8_sm90_cost_us(tile, DType::e4m3, h200, p);
    p.accumulation = Accumulation::precise;
    return cuda::w8a8_sm90_cost_us(tile, DType::e4m3, h200, p) / fast;
  };
  EXPECT_LT(extra({.m = 16, .n = 64}, 1), 1.002);
  EXPECT_GT(extra({.m = 256, .n = 128}, 4096), 1.01);
  EXPECT_LT(extra({.m = 256, .n = 128}, 4096), 1.1);
  p.act_scheme.group = GroupShape::group(128);
  EXPECT_EQ(extra({.m = 256, .n = 128}, 4096), 1.0) << "groups are added up in f32 anyway";
}

/// The cost of dequantizing does not depend on M: few tokens are cheaper without it, many with it.
TEST(Gpu, TheDenseTierIsForManyTokens) {
  const GpuInfo h200 = *described_gpu("h200");
  Problem problem{.n = 4096, .k = 4096, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
  double last = 0;
  for (problem.m = 1; problem.m <= 8192; problem.m *= 2) {
    const double dense = cuda::dense_cost_us(h200, problem);
    EXPECT_GE(dense, last) << "M=" << problem.m;
    last = dense;
    const double decode = cuda::decode_sm90_cost_us(16, h200, problem);
    if (problem.m <= 16 || problem.m >= 256) {
      EXPECT_EQ(dense < decode, problem.m >= 256) << "M=" << problem.m;
    }
    Problem with_bias = problem;
    with_bias.epilogue.bias = true;
    EXPECT_GT(cuda::dense_cost_us(h200, with_bias), dense) << "M=" << problem.m;
  }
}

/// Scratch of a GPU kernel as a plan counts it: enough for every M, and no less for a larger one.
TEST(Gpu, TheDenseTierAsksForItsScratch) {
  const Kernel* kernel = find_kernel("linear_any_f16_any__cuda_simt_dense");
  ASSERT_NE(kernel, nullptr);
  Problem problem{.n = 100, .k = 1001, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
  const std::size_t plain = kernel->workspace(*kernel, problem);
  EXPECT_GE(plain, (32u << 20) + 2u * 100 * 1008);  // cuBLASLt's own, and W with its rows aligned
  problem.m = 500;
  EXPECT_EQ(kernel->workspace(*kernel, problem), plain);
  problem.epilogue.bias = true;
  EXPECT_GE(kernel->workspace(*kernel, problem), plain + 4u * 500 * 100);  // sums
}

}  // namespace
}  // namespace nibble
