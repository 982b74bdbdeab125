// Packing and plans.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "plan/choose.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::random_weight;
using ::testing::StartsWith;

const WeightScheme kAwq{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};

TEST(Pack, PacksFourBitWeightsTightly) {
  const QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16}, 64, 1024, 1);
  const auto packed = pack(q, {.layout = "cpu_n32"});
  ASSERT_TRUE(packed.ok());
  EXPECT_EQ(packed->bytes().size(), 64u * 1024 / 2 + 64 * 8 * 2);
}

/// Small weights are cheap for the reference, whose bits are others: W8A8 would not be the same for every shape.
TEST(Pack, LeavesTheReferenceToThoseWhoAskForIt) {
  const ActScheme ways[] = {{},
                            {DType::s8, GroupShape::channel()},
                            {DType::s8, GroupShape::channel(), ZeroKind::integer},
                            {DType::e4m3, GroupShape::channel()}};
  for (const WeightScheme& scheme : testing::all_schemes())
    for (std::int64_t n : {1, 2, 3, 7, 16, 33})
      for (std::int64_t k : {1, 2, 5, 8, 27, 32, 64}) {
        const QuantTensor q = random_weight(scheme, n, k, 1);
        for (const ActScheme& way : ways)
          for (std::int64_t m_max : {1, 40, 8192}) {
            if (way.codes == DType::s8 && info(scheme.codes).kind == DTypeKind::floating)
              continue;                                                   // the reference alone does that
            if (way.codes != DType::none && scheme.is_dense()) continue;  // refused
            const LinearSpec spec{.m_max = m_max, .act_scheme = way};
            const auto weight = pack(q, spec);
            ASSERT_TRUE(weight.ok()) << weight.status().message();
            const auto plan = Plan::linear(*weight, spec, {.allow_reference = false});
            ASSERT_TRUE(plan.ok()) << Scheme{scheme, way}.name() << " W[" << n << "," << k << "], M up to " << m_max << ": "
                                   << plan.status().message();
          }
      }
}

TEST(Pack, LeavesTheReferenceOutOfSmallConvolutions) {
  for (const char* name : {"u4b8c", "s8c", "u4zg9", "e4m3c"})
    for (std::int64_t channels : {1, 3}) {
      const ConvGeometry g{.in_channels = channels, .height = 512, .width = 512, .filter = {3, 3}, .padding = {1, 1, 1, 1}};
      QuantTensor q = random_weight(Scheme::parse(name)->weight, 1, g.k(), 1);
      q.filter = g.filter;
      const auto weight = pack(q);
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      const auto plan = Plan::conv(*weight, {.geometry = g}, {.allow_reference = false});
      EXPECT_TRUE(plan.ok()) << name << ": " << plan.status().message();
    }
}

TEST(Pack, OneRowOfW8A8HasTheBitsItHasAmongOthers) {
  constexpr std::int64_t kN = 40, kK = 27, kM = 3;
  const QuantTensor all = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, kN, kK, 4);
  std::vector<float> a(kM * kK);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i * i % 101) / 7 - 5;
  const auto run = [&](const QuantTensor& q) {
    const ActScheme per_token{DType::s8, GroupShape::channel()};
    const auto weight = pack(q, LinearSpec{.act_scheme = per_token});
    const auto plan = Plan::linear(*weight, {.m_max = kM, .act_scheme = per_token});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    std::vector<float> d(static_cast<std::size_t>(kM * q.n));
    std::vector<std::byte> workspace(plan->workspace_bytes());
    EXPECT_TRUE(plan->run(*weight, ConstTensorView(a.data(), {kM, kK}), TensorView(d.data(), {kM, q.n}), {}, workspace).ok());
    return d;
  };
  const std::vector<float> together = run(all);
  for (std::int64_t n = 0; n < kN; ++n) {
    QuantTensor one = all;
    one.n = 1;
    one.codes.assign(all.codes.begin() + n * kK, all.codes.begin() + (n + 1) * kK);
    one.scales = Tensor(DType::f32, {1, 1});
    one.scales.set(0, all.scales.at(n));
    const std::vector<float> alone = run(one);
    for (std::int64_t m = 0; m < kM; ++m)
      EXPECT_EQ(alone[static_cast<std::size_t>(m)], together[static_cast<std::size_t>(m * kN + n)]) << m << "," << n;
  }
}

TEST(Pack, RefusesWhatItCannotPack) {
  QuantTensor q = random_weight(kAwq, 8, 64, 1);
  EXPECT_EQ(pack(q, {.layout = "nope"}).status().code(), StatusCode::not_found);
  EXPECT_EQ(pack(q, {.kernel = "nope"}).status().code(), StatusCode::not_found);
  q.codes.clear();
  EXPECT_EQ(pack(q).status().code(), StatusCode::invalid_argument);
}

/// A GPU's layout can be packed on any machine; the next steps need the GPU, and their errors say so.
TEST(Pack, LeavesNaNCodesToLayoutsThatHoldThem) {
  QuantTensor q = random_weight({DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32}, 64, 256, 1);
  q.codes[3 * 256 + 5] = 0xff;
  const auto packed = pack(q, {.layout = "gpu_n64k128"});
  ASSERT_FALSE(packed.ok());
  EXPECT_EQ(packed.status().message(), "W[3,5] is NaN (code 0xff), and layout gpu_n64k128 holds finite e4m3 codes only");
  for (const char* layout : {"", "gpu_w8n64k128"}) EXPECT_TRUE(pack(q, {.layout = layout}).ok()) << layout;
}

TEST(Gpu, HostPackedWeightsWaitForUpload) {
  const auto weight = pack(random_weight(kAwq, 64, 128, 1), {.layout = "gpu_n64k128"});
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  EXPECT_EQ(weight->backend(), Backend::cpu);
  const Status planned = Plan::linear(*weight, {.a_dtype = DType::f16}).status();
  EXPECT_EQ(planned.code(), StatusCode::unsupported);
  EXPECT_THAT(planned.message(), HasSubstr("the weight is in host memory; nibble::upload takes it there"));
  const auto on_cpu = pack(random_weight(kAwq, 64, 128, 1));
  EXPECT_THAT(upload(*on_cpu).status().message(),
              HasSubstr("is for the CPU; pack with Backend::cuda, or for layout gpu_n64k128"));
  EXPECT_EQ(upload(*weight).ok(), this_gpu().ok());
}

TEST(Gpu, PackingForItIsRefusedWithTheReason) {
  const QuantTensor q = random_weight(kAwq, 64, 128, 1);
  const Status no_gpu = this_gpu().status();
  if (!no_gpu.ok()) {
    EXPECT_EQ(no_gpu.code(), StatusCode::unsupported);
    for (const PackOptions& options :
         {PackOptions{.backend = Backend::cuda}, PackOptions{.kernel = "linear_any_f16_any__cuda_sm90_m16n64k128"}}) {
      const Status status = pack(q, options).status();
      EXPECT_EQ(status.code(), StatusCode::unsupported);
      EXPECT_THAT(status.message(), HasSubstr(no_gpu.message()));
    }
    EXPECT_THAT(runs_here(Isa::sm90).message(), HasSubstr("needs sm90: " + no_gpu.message()));
    return;
  }
  EXPECT_EQ(pack(q, {.layout = "cpu_n32", .backend = Backend::cuda}).status().code(), StatusCode::invalid_argument);
  const QuantTensor other = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(12), DType::f16}, 64, 120, 1);
  EXPECT_THAT(pack(other, {.backend = Backend::cuda}).status().message(), HasSubstr("groups of 12 channels"));
}

TEST(Gpu, StreamsAreForWeightsInDeviceMemory) {
  const auto weight = pack(random_weight(kAwq, 8, 32, 1));
  const auto plan = Plan::linear(*weight);
  std::vector<float> a(32), d(8);
  const Status status = plan->run(*weight, ConstTensorView(a.data(), {1, 32}), TensorView(d.data(), {1, 8}), {}, {}, Stream{});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_THAT(status.message(), HasSubstr("in host memory"));
}

/// TMA reads rows that begin at multiples of 16 bytes. Which kernel runs for other pointers is decided, and told, when a plan is made.
TEST(Gpu, ThePlanNamesTheKernelOfUnalignedRows) {
  GpuInfo h200{.compute_capability = 90, .sms = 132, .shared_bytes_per_block = 232448};
  h200.read_gbytes_per_s = 4470;
  for (const Isa isa : {Isa::simt, Isa::sm80, Isa::sm90}) h200.isas |= 1U << static_cast<int>(isa);
  Problem p{.n = 4096, .k = 4096, .scheme = Scheme::parse("s8r_s8c")->weight, .layout = "gpu_w8n64k128", .memory = Backend::cuda};
  p.act_scheme = Scheme::parse("s8r_s8c")->act;
  p.gpu = &h200;
  p.a_dtype = DType::s8;
  const auto given = choose_buckets(p, 256, {}, false);
  for (const Bucket& bucket : *given) {
    EXPECT_EQ(bucket.main->isa, Isa::sm90);
    ASSERT_NE(bucket.unaligned, nullptr);
    EXPECT_EQ(bucket.unaligned->name, "linear_any_s8_any__cuda_sm80_n64k128");
  }
  p.a_dtype = DType::f16;  // the codes are the plan's own
  const auto quantized = choose_buckets(p, 256, {}, false);
  for (const Bucket& bucket : *quantized) EXPECT_EQ(bucket.unaligned, nullptr);

  const Explanation explanation = explanation_of(*given, p, {}, false);
  EXPECT_EQ(explanation.buckets.front().unaligned, "linear_any_s8_any__cuda_sm80_n64k128");
}

TEST(Plan, BucketsCoverEveryMAndExplainEveryKernel) {
  const auto weight = pack(random_weight(kAwq, 64, 64, 1));
  const auto plan = Plan::linear(*weight, {.a_dtype = DType::f32, .m_max = 100});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const Explanation why = plan->explain();
  std::int64_t next = 1;
  for (const Explanation::Bucket& bucket : why.buckets) {
    EXPECT_EQ(bucket.m_low, next);
    next = bucket.m_high + 1;
    EXPECT_LE(bucket.steps.size(), 4u);
    EXPECT_EQ(bucket.steps.back(), plan->kernel(bucket.m_low));
    std::size_t linear_kernels = 0;
    for (const Kernel& kernel : kernel_table()) linear_kernels += kernel.op == Op::linear ? 1 : 0;
    EXPECT_EQ(bucket.candidates.size(), linear_kernels);
    // Choosing asks without texts; the answers with texts agree.
    const Explanation::Candidate* cheapest = nullptr;
    for (const auto& candidate : bucket.candidates) {
      EXPECT_TRUE(candidate.accepted ? candidate.cost_us > 0 : !candidate.refusal.empty()) << candidate.kernel;
      const bool counts = candidate.accepted && find_kernel(candidate.kernel)->backend != Backend::reference;
      if (counts && (cheapest == nullptr || candidate.cost_us < cheapest->cost_us)) cheapest = &candidate;
    }
    ASSERT_NE(cheapest, nullptr);
    EXPECT_EQ(cheapest->kernel, bucket.steps.back());
  }
  EXPECT_EQ(next, 101);
  // A forced kernel is the only one that is accepted.
  const auto forced = Plan::linear(*weight, {.m_max = 1}, {.kernel = std::string(plan->kernel(100))});
  ASSERT_TRUE(forced.ok()) << forced.status().message();
  const Explanation only = forced->explain();
  for (const auto& candidate : only.buckets.front().candidates)
    EXPECT_EQ(candidate.accepted, candidate.kernel == plan->kernel(100)) << candidate.kernel;
}

TEST(Plan, RefusalsCarryTheReasons) {
  const auto weight = pack(random_weight(kAwq, 64, 64, 1), {.layout = "plain"});
  const auto plan = Plan::linear(*weight, {}, {.allow_reference = false});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), StatusCode::unsupported);
  EXPECT_THAT(plan.status().message(), HasSubstr("the weight is packed as plain"));
  EXPECT_THAT(plan.status().message(), HasSubstr("the reference is not allowed"));
  EXPECT_EQ(Plan::linear(*weight, {.a_dtype = DType::s8}).status().code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::linear(*weight, {.m_max = 0}).status().code(), StatusCode::invalid_argument);
  EXPECT_EQ(Plan::linear(*weight, {}, {.kernel = "nope"}).status().code(), StatusCode::not_found);
  EXPECT_EQ(Plan::linear(*weight, {.epilogue = {.out = DType::s16}}).status().code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::dequantize(*weight, {.out = DType::s8}).status().code(), StatusCode::unsupported);
}

/// Integer sums exist only where one scale a token and one an output channel are all that is left to do.
TEST(Plan, IntegerSumsAreOfW8A8) {
  const QuantTensor w8 = random_weight({.codes = DType::s8, .group = GroupShape::channel(), .scale = DType::f32}, 64, 64, 1);
  const ActScheme token{DType::s8, GroupShape::channel()}, block{DType::s8, GroupShape::group(32)};
  const auto message = [](const QuantTensor& q, const LinearSpec& spec) {
    const auto weight = pack(q, spec);
    return weight.ok() ? std::string() : std::string(weight.status().message());
  };
  const EpilogueSpec raw{.out = DType::s32}, biased{.sum_bias = true};
  EXPECT_EQ(message(w8, {.a_dtype = DType::s8, .epilogue = raw, .act_scheme = token}), "");
  EXPECT_EQ(message(w8, {.epilogue = biased, .act_scheme = token}), "");
  EXPECT_THAT(message(w8, {.epilogue = raw, .act_scheme = token}), HasSubstr("pass A as s8 or u8, not f32"));
  EXPECT_THAT(message(w8, {.epilogue = biased, .act_scheme = block}), HasSubstr("this is s8g32_s8c"));
  EXPECT_THAT(message(w8, {.epilogue = biased}), HasSubstr("is for W8A8"));
  EXPECT_THAT(message(random_weight(kAwq, 64, 64, 1), {.epilogue = biased, .act_scheme = token}), HasSubstr("is for W8A8"));
  EXPECT_THAT(message(w8, {.a_dtype = DType::s8, .epilogue = {.bias = true, .out = DType::s32}, .act_scheme = token}),
              HasSubstr("a D of s32 is the integer sums"));
  EXPECT_THAT(message(w8, {.epilogue = {.out = DType::f16, .out_scales = true}, .act_scheme = token}), HasSubstr("no out_scale"));
  EXPECT_THAT(message(w8, {.epilogue = {.out = DType::u8, .out_zero = -1}, .act_scheme = token}), HasSubstr("outside [0, 255]"));
  EXPECT_THAT(message(w8, {.epilogue = {.out = DType::u8, .out_high = -1}, .act_scheme = token}),
              HasSubstr("holds none of [0, 255]"));
}

/// The forced kernel's reason and the remedy, not every other kernel's reason.
TEST(Plan, AForcedKernelThatRefusesSaysWhy) {
  const QuantTensor q = random_weight(kAwq, 64, 64, 1);
  const auto weight = pack(q, {.layout = "cpu_n16"});
  int refused = 0;
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op != Op::linear) continue;
    const std::string name(kernel.name);
    const Status status = Plan::linear(*weight, {}, {.kernel = name}).status();
    if (status.ok()) continue;
    ++refused;
    EXPECT_EQ(status.code(), StatusCode::unsupported);
    EXPECT_LT(status.message().size(), 350u) << status.message();
    EXPECT_THAT(status.message(), HasSubstr("kernel " + name + " does not take linear u4zg32 M=1 N=64 K=64 ->f32: "));
    EXPECT_THAT(status.message(), Not(HasSubstr(" more: ")));
    if (kernel.backend == Backend::cuda || !runs_here(kernel.isa).ok() || kernel.layout == "cpu_n16") continue;
    EXPECT_THAT(status.message(), HasSubstr("reads layout " + std::string(kernel.layout) +
                                            ", the weight is packed as cpu_n16; pack with kernel=" + name));
  }
  EXPECT_GT(refused, 10);
  const std::string reference = "linear_any_any_any__ref_baseline", int8 = "linear_any_s8_any__cpu_baseline_m4n16";
  EXPECT_TRUE(Plan::linear(*pack(q, {.kernel = reference}), {}, {.kernel = reference}).ok());
  EXPECT_THAT(Plan::linear(*weight, {}, {.kernel = int8}).status().message(),
              HasSubstr("they are to stay exact; force another kernel, or none"));
  ASSERT_EQ(setenv("NIBBLE_KERNEL", int8.c_str(), 1), 0);
  EXPECT_THAT(Plan::linear(*weight).status().message(), HasSubstr(int8 + " of NIBBLE_KERNEL does not take"));
  EXPECT_THAT(Plan::linear(*weight).status().message(), HasSubstr("unset NIBBLE_KERNEL"));
  unsetenv("NIBBLE_KERNEL");
}

TEST(Plan, AnUnknownKernelIsToldTheNearestName) {
  const auto weight = pack(random_weight(kAwq, 64, 64, 1));
  const std::string typo = "linear_any_s8_any_cpu_baseline_m4n16",
                    told = ", the nearest is 'linear_any_s8_any__cpu_baseline_m4n16';";
  EXPECT_THAT(Plan::linear(*weight, {}, {.kernel = typo}).status().message(), HasSubstr("'" + typo + "'" + told));
  EXPECT_THAT(pack(random_weight(kAwq, 64, 64, 1), {.kernel = typo}).status().message(), HasSubstr(told));
  EXPECT_THAT(kernel_info("conv").status().message(), HasSubstr("no kernel is called 'conv'; nibble doctor --kernels"));
  EXPECT_THAT(kernel_info(std::string(100'000, 'x')).status().message(), Not(HasSubstr("nearest")));
  EXPECT_EQ(kernel_info("linear_any_any_any__ref_baseline")->backend, Backend::reference);
}

TEST(Plan, EnvironmentForcesAKernel) {
  ASSERT_EQ(setenv("NIBBLE_KERNEL", "linear_any_any_any__ref_baseline", 1), 0);
  const auto weight = pack(random_weight(kAwq, 64, 64, 1));
  ASSERT_TRUE(weight.ok());
  EXPECT_EQ(Plan::linear(*weight)->kernel(), "linear_any_any_any__ref_baseline");
  EXPECT_TRUE(Plan::dequantize(*pack(random_weight(kAwq, 8, 64, 1), {.layout = "cpu_n16"}), {}).ok());
  ASSERT_EQ(setenv("NIBBLE_KERNEL", "no_such_kernel", 1), 0);
  EXPECT_EQ(pack(random_weight(kAwq, 64, 64, 1)).status().code(), StatusCode::invalid_argument);
  unsetenv("NIBBLE_KERNEL");
}

TEST(Plan, RunChecksItsArgumentsAndWritesNothing) {
  const std::int64_t m = 3, n = 40, k = 64;
  const auto weight = pack(random_weight(kAwq, n, k, 1));
  const auto other = pack(random_weight(kAwq, n, 96, 1));
  const auto plan = Plan::linear(*weight, {.a_dtype = DType::f32, .m_max = m, .epilogue = {.bias = true}});
  ASSERT_TRUE(plan.ok());
  std::vector<float> a(static_cast<std::size_t>(m * k), 1.0f), d(static_cast<std::size_t>(m * n), 7.0f),
      bias(static_cast<std::size_t>(n), 0.0f);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const ConstTensorView a_view(a.data(), {m, k});
  const TensorView d_view(d.data(), {m, n});
  const Operands args{.bias = ConstTensorView(bias.data(), {n})};
  const auto expect = [&](const Status& status, std::string_view text) {
    EXPECT_EQ(status.code(), StatusCode::invalid_argument);
    EXPECT_THAT(status.message(), HasSubstr(std::string(text)));
    for (float x : d) ASSERT_EQ(x, 7.0f);
  };
  expect(plan->run(*other, a_view, d_view, args, workspace), "the plan is for W[40,64]");
  QuantTensor with_signs = random_weight(kAwq, n, k, 1);
  with_signs.zeros.dtype = DType::s8;
  expect(plan->run(*pack(with_signs), a_view, d_view, args, workspace), "zero points of u8, the weight has those of s8");
  expect(plan->run(*weight, ConstTensorView(a.data(), {m, 32}), d_view, args, workspace), "A is f32 [3,32]");
  expect(plan->run(*weight, ConstTensorView(a.data(), {m + 1, k}), d_view, args, workspace), "[1…3,64]");
  expect(plan->run(*weight, a_view, TensorView(d.data(), {n, m}), args, workspace), "D is f32 [40,3]");
  expect(plan->run(*weight, {}, d_view, args, workspace), "A has no data");
  TensorView overlapping = d_view;
  overlapping.strides[0] = n - 1;
  expect(plan->run(*weight, a_view, overlapping, args, workspace),
         "the rows of D overlap: they are 39 elements apart and 40 long");
  expect(plan->run(*weight, a_view, d_view, {}, workspace), "needs bias, none was given");
  expect(plan->run(*weight, a_view, d_view, {.bias = ConstTensorView(bias.data(), {n - 1})}, workspace), "vector of 40");
  expect(plan->run(*weight, a_view, d_view, args, std::span(workspace).first(16)), "workspace has 16 bytes");
  ASSERT_TRUE(plan->run(*weight, a_view, d_view, args, workspace).ok());
  EXPECT_NE(d[0], 7.0f);
}

TEST(Plan, TheWorkspaceOfAnMIsEnoughForIt) {
  const testing::RandomWeight ordered{.act_order = true, .prescale = true};
  for (const LinearSpec& spec : {LinearSpec{.m_max = 70}, LinearSpec{.a_dtype = DType::bf16, .m_max = 70},
                                 LinearSpec{.m_max = 70, .act_scheme = {DType::s8, GroupShape::channel()}}}) {
    const auto weight = pack(random_weight(kAwq, 48, 64, 1, ordered), spec);
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    const auto plan = Plan::linear(*weight, spec);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    for (std::int64_t m = 1; m <= spec.m_max; ++m) {
      const Tensor a(spec.a_dtype, {m, 64});
      Tensor d(DType::f32, {m, 48});
      std::vector<std::byte> workspace(plan->workspace_bytes(m));
      ASSERT_LE(workspace.size(), plan->workspace_bytes());
      const auto run = [&](std::span<std::byte> memory) {
        return plan->run(*weight, ConstTensorView(a.bytes.data(), a.dtype, {m, 64}), TensorView(d.bytes.data(), d.dtype, {m, 48}),
                         {}, memory);
      };
      EXPECT_TRUE(run(workspace).ok()) << m;
      EXPECT_EQ(run({}).code(), StatusCode::invalid_argument) << m;
    }
    EXPECT_GT(plan->workspace_bytes(1), 0u);
    EXPECT_LT(plan->workspace_bytes(1), plan->workspace_bytes());
    EXPECT_EQ(plan->workspace_bytes(0), plan->workspace_bytes(1));
    EXPECT_EQ(plan->workspace_bytes(71), plan->workspace_bytes(70));
  }
}

TEST(Plan, TheWorkspaceOfImagesCountsTheirPixels) {
  const ConvGeometry g{.in_channels = 64, .out_channels = 48, .height = 5, .width = 7};
  const ConvSpec spec{.geometry = g, .input = ImageLayout::nhwc, .output = ImageLayout::nhwc, .batch_max = 6};
  const auto weight = pack(random_weight(kAwq, 48, 64, 1), spec);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const auto images = Plan::conv(*weight, spec);
  const auto tokens = Plan::linear(*weight, {.m_max = 6 * 35});
  ASSERT_TRUE(images.ok() && tokens.ok());
  for (const std::int64_t batch : {1, 2, 6})
    EXPECT_EQ(images->workspace_bytes(batch), tokens->workspace_bytes(batch * 35)) << batch;
  EXPECT_LT(images->workspace_bytes(1), images->workspace_bytes());
}

TEST(Plan, RefusesActivationsItCannotQuantize) {
  const auto weight = pack(random_weight(kAwq, 64, 128, 1));
  const auto status = [&](DType codes, GroupShape group) {
    return Plan::linear(*weight, {.act_scheme = {codes, group}}).status();
  };
  EXPECT_TRUE(status(DType::s8, GroupShape::channel()).ok());
  EXPECT_TRUE(status(DType::s8, GroupShape::group(64)).ok());
  EXPECT_TRUE(status(DType::e4m3, GroupShape::group(64)).ok());
  EXPECT_THAT(status(DType::e5m2, GroupShape::channel()).message(), HasSubstr("cannot be quantized to e5m2"));
  EXPECT_THAT(status(DType::s8, GroupShape::tensor()).message(), HasSubstr("a scale per tensor"));
  EXPECT_TRUE(status(DType::s8, GroupShape::group(4)).ok());
  EXPECT_THAT(status(DType::s8, GroupShape::group(48)).message(), HasSubstr("do not line up with the weight's groups of 32"));
  EXPECT_TRUE(status(DType::s8, GroupShape::group(1024)).ok());
  const auto with_zeros = [&](std::int32_t block) {
    return Plan::linear(*weight, {.act_scheme = {DType::s8, GroupShape::group(block), ZeroKind::integer}}).status();
  };
  for (std::int32_t block : {4, 32, 64, 128, 256, 512}) EXPECT_TRUE(with_zeros(block).ok()) << block;
}

TEST(Plan, RefusesOffsetsOfActivationsItCannotFind) {
  const auto weight = pack(random_weight(kAwq, 64, 128, 1), {.layout = "plain"});
  const auto status = [&](DType codes, GroupShape group, ZeroKind zero) {
    return Plan::linear(*weight, {.act_scheme = {codes, group, zero}}).status();
  };
  EXPECT_TRUE(status(DType::s8, GroupShape::channel(), ZeroKind::offset).ok());
  EXPECT_TRUE(status(DType::s8, GroupShape::group(32), ZeroKind::offset).ok());
  EXPECT_THAT(status(DType::s8, GroupShape::tensor(), ZeroKind::offset).message(), HasSubstr("per token or block"));
  EXPECT_THAT(status(DType::e4m3, GroupShape::channel(), ZeroKind::offset).message(), HasSubstr("no such zero points"));
  EXPECT_THAT(status(DType::s8, GroupShape::channel(), ZeroKind::real).message(), HasSubstr("no such zero points"));
  const auto explained = explain(weight->desc(), LinearSpec{.act_scheme = {DType::s8, GroupShape::channel(), ZeroKind::offset}},
                                 *described_gpu("h200"));
  ASSERT_TRUE(explained.ok()) << explained.status().message();
  EXPECT_THAT(explained->buckets.front().steps.back(), HasSubstr("__cuda_simt_codes"));
}

/// Given codes in blocks come with a scale and a zero point per block.
TEST(Plan, ChecksTheZeroPointsOfBlocks) {
  const auto weight = pack(random_weight(kAwq, 8, 128, 1));
  const auto plan = Plan::linear(
      *weight, {.a_dtype = DType::s8, .m_max = 2, .act_scheme = {DType::s8, GroupShape::group(64), ZeroKind::integer}});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::vector<std::int8_t> a(2 * 128, 1);
  const std::vector<float> scales(4, 1.0f);
  const std::vector<std::int32_t> zeros(4, 0);
  std::vector<float> d(2 * 8);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto run = [&](const ConstTensorView& zero) {
    return plan->run(*weight, ConstTensorView(a.data(), {2, 128}), TensorView(d.data(), {2, 8}),
                     {.a_scale = ConstTensorView(scales.data(), {2, 2}), .a_zero = zero}, workspace);
  };
  EXPECT_TRUE(run(ConstTensorView(zeros.data(), {2, 2})).ok());
  EXPECT_THAT(run(ConstTensorView(zeros.data(), {2})).message(), HasSubstr("a_zero must be s32 [2,2]"));
  EXPECT_THAT(run({}).message(), HasSubstr("a_zero must be s32 [2,2]"));
}

/// Codes of u8 are those of s8 and 128, and so are their zero points: D has the same bits, after a step more.
TEST(Plan, TakesCodesOfU8) {
  const std::int64_t m = 5, n = 40, k = 96, pitch = k + 7;
  for (const auto& [text, known] : {std::pair{"s8zr_s8c", false},
                                    {"s8zt_s8c", false},
                                    {"s8zt_s8c", true},
                                    {"s8zr_u4zg32", false},
                                    {"s8zg32_u4zg32", false},
                                    {"s8zt_u4b8g32", true}}) {
    SCOPED_TRACE(text);
    const bool of_weight = known;  // clang 14 lets no lambda capture a binding
    const Scheme scheme = *Scheme::parse(text);
    QuantTensor q = random_weight(scheme.weight, n, k, 1);
    if (of_weight) q.static_acts = {0.02f, -37};
    const auto weight = pack(q);
    ASSERT_TRUE(weight.ok()) << weight.status().message();
    const std::int64_t rows = scheme.act.group == GroupShape::tensor() ? 1 : m, groups = scheme.act.group.cols(k);
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(m * pitch));
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i * 77 + i / 5);
    std::vector<float> scales(static_cast<std::size_t>(rows * groups));
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = 0.01f + 0.001f * static_cast<float>(i);
    const auto run = [&](DType type) {
      const int above = type == DType::u8 ? 128 : 0;
      std::vector<std::uint8_t> a = codes;
      if (type == DType::s8)
        for (std::uint8_t& code : a) code ^= 0x80;
      std::vector<std::int32_t> zeros(2 * scales.size());  // every second one counts
      for (std::size_t i = 0; i < zeros.size(); i += 2) zeros[i] = static_cast<std::int32_t>(i * 13 % 256) - 128 + above;
      Operands operands;
      if (!of_weight && scheme.act.group.k == 0) {
        operands = {.a_scale = ConstTensorView(scales.data(), {rows}), .a_zero = ConstTensorView(zeros.data(), {rows})};
        operands.a_zero.strides[0] = 2;
      } else if (!of_weight) {
        operands = {.a_scale = ConstTensorView(scales.data(), {rows, groups}),
                    .a_zero = ConstTensorView(zeros.data(), {rows, groups})};
        operands.a_zero.strides = {2 * groups, 2};
      }
      ConstTensorView a_view(a.data(), type, {m, k});
      a_view.strides[0] = pitch;
      std::vector<float> d(static_cast<std::size_t>(m * n));
      const auto plan = Plan::linear(*weight, {.a_dtype = type, .m_max = m, .act_scheme = scheme.act});
      EXPECT_TRUE(plan.ok()) << plan.status().message();
      if (!plan.ok()) return d;
      for (const Explanation::Bucket& bucket : plan->explain().buckets)
        EXPECT_EQ(bucket.steps.front() == "prepare_s8_u8_none__cpu_baseline", type == DType::u8) << bucket.steps.front();
      std::vector<std::byte> workspace(plan->workspace_bytes());
      const Status ran = plan->run(*weight, a_view, TensorView(d.data(), {m, n}), operands, workspace);
      EXPECT_TRUE(ran.ok()) << ran.message();
      return d;
    };
    EXPECT_EQ(run(DType::u8), run(DType::s8));
  }
}

TEST(Plan, CodesOfU8HaveIntegerZeroPoints) {
  const QuantTensor q = random_weight(kAwq, 8, 128, 1);
  const auto status = [&](const char* scheme, DType type = DType::u8) {
    return explain(describe(q), LinearSpec{.a_dtype = type, .act_scheme = Scheme::parse(scheme)->act}).status();
  };
  EXPECT_TRUE(status("s8zr_s8c").ok()) << status("s8zr_s8c").message();
  EXPECT_THAT(status("s8r_s8c").message(),
              HasSubstr("use a scheme with them, s8zr_u4zg32 (a_zero is 0 for codes that have none)"));
  EXPECT_THAT(status("s8or_s8c").message(), HasSubstr("pass codes − 128 as s8, with offsets + 128·scale"));
  EXPECT_THAT(status("e4m3r_s8c").message(), HasSubstr("activations of type u8"));
  const auto on_gpu =
      explain(describe(q), LinearSpec{.a_dtype = DType::u8, .m_max = 64, .act_scheme = Scheme::parse("s8zr_s8c")->act},
              *described_gpu("h100"));
  ASSERT_TRUE(on_gpu.ok()) << on_gpu.status().message();
  for (const Explanation::Bucket& bucket : on_gpu->buckets) EXPECT_EQ(bucket.steps.front(), "prepare_s8_u8_none__cuda_simt");
}

/// What CUTLASS and vLLM call azp_adj, of one zero point for all tokens: azp·Σ_k q_w[n,k]. Less that, sums of codes are those of the scheme
/// with zero points.
TEST(Plan, AnAzpAdjOfATensorIsASumBias) {
  const std::int64_t m = 7, n = 40, k = 100;
  const std::int32_t azp = -19;
  const QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, n, k, 1);
  const auto weight = pack(q);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  std::vector<std::int8_t> a(static_cast<std::size_t>(m * k));
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::int8_t>(i * 77 + i / 5);
  std::vector<std::int32_t> less_azp_adj(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < q.codes.size(); ++i)
    less_azp_adj[i / static_cast<std::size_t>(k)] -= azp * static_cast<std::int8_t>(q.codes[i]);
  const float scale = 0.01f;
  const auto run = [&](ZeroKind zero) {
    const bool adjusted = zero == ZeroKind::none;
    std::vector<float> d(static_cast<std::size_t>(m * n));
    const auto plan = Plan::linear(*weight, {.a_dtype = DType::s8,
                                             .m_max = m,
                                             .epilogue = {.sum_bias = adjusted},
                                             .act_scheme = {DType::s8, GroupShape::tensor(), zero}});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return d;
    Operands operands{.a_scale = ConstTensorView(&scale, {1})};
    if (adjusted)
      operands.sum_bias = ConstTensorView(less_azp_adj.data(), {n});
    else
      operands.a_zero = ConstTensorView(&azp, {1});
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const Status ran = plan->run(*weight, ConstTensorView(a.data(), {m, k}), TensorView(d.data(), {m, n}), operands, workspace);
    EXPECT_TRUE(ran.ok()) << ran.message();
    return d;
  };
  EXPECT_EQ(run(ZeroKind::none), run(ZeroKind::integer));
}

TEST(Plan, IsForWhatTheWeightWasPackedForUnlessItIsTold) {
  const LinearSpec spec{.a_dtype = DType::bf16, .m_max = 24, .epilogue = {.activation = Activation::silu, .out = DType::f16}};
  const auto weight = pack(random_weight(kAwq, 64, 128, 1), spec);
  EXPECT_EQ(std::get<LinearSpec>(weight->spec()), spec);
  const auto plan = Plan::linear(*weight);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->explain().buckets.back().m_high, 24);
  std::vector<std::uint16_t> a(24 * 128, 0x3f80), d(24 * 64);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto run = [&](DType a_dtype) {
    return plan->run(*weight, ConstTensorView(a.data(), a_dtype, {24, 128}), TensorView(d.data(), DType::f16, {24, 64}), {},
                     workspace);
  };
  EXPECT_TRUE(run(DType::bf16).ok());
  EXPECT_THAT(run(DType::f16).message(), HasSubstr("the plan takes bf16"));
  EXPECT_EQ(Plan::linear(*weight, {.m_max = 2})->explain().buckets.back().m_high, 2);
  EXPECT_EQ(Plan::linear(*pack(random_weight(kAwq, 64, 128, 1)))->explain().buckets.back().m_high, 8192);
  EXPECT_THAT(Plan::conv(*weight).status().message(), HasSubstr("W[64,128] was packed for a linear layer; pass a ConvSpec"));

  const ConvSpec images{.geometry = {.in_channels = 128, .out_channels = 64, .height = 3, .width = 3}, .batch_max = 5};
  const auto filters = pack(random_weight(kAwq, 64, 128, 1), images);
  EXPECT_EQ(std::get<ConvSpec>(filters->spec()), images);
  const auto conv = Plan::conv(*filters);
  ASSERT_TRUE(conv.ok()) << conv.status().message();
  EXPECT_EQ(conv->explain().buckets.back().m_high, 5);
  EXPECT_THAT(Plan::linear(*filters).status().message(), HasSubstr("was packed for a convolution; call Plan::conv()"));
}

/// A known scale comes with its zero point, and the scheme of the plan must have one.
TEST(Plan, RefusesAZeroPointThatTheSchemeDoesNotName) {
  QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 8, 64, 1);
  q.static_acts = {0.1f, 7};
  const auto weight = pack(q);
  const ActScheme without{DType::s8, GroupShape::tensor()}, with{DType::s8, GroupShape::tensor(), ZeroKind::integer};
  EXPECT_THAT(Plan::linear(*weight, {.act_scheme = without}).status().message(), HasSubstr("zero point 7"));
  EXPECT_TRUE(Plan::linear(*weight, {.act_scheme = with}).ok());
}

/// Where there is one scale per token and output channel, the exact kernels run, and the others say why they do not.
TEST(Plan, SumsOverAllOfKWhereScalesAllowIt) {
  const QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 64, 256, 1);
  const ActScheme per_token{DType::s8, GroupShape::channel()};
  const auto weight = pack(q, LinearSpec{.act_scheme = per_token});
  const auto plan = Plan::linear(*weight, {.act_scheme = per_token});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_THAT(std::string(plan->kernel()), HasSubstr("_whole_"));
  const auto blocks = Plan::linear(*weight, {.act_scheme = {DType::s8, GroupShape::group(64)}});
  ASSERT_TRUE(blocks.ok());
  EXPECT_THAT(std::string(blocks->kernel()), Not(HasSubstr("_whole_")));
}

/// CPUs sum FP8 in f32, which satisfies both accumulations.
TEST(Plan, EveryAccumulationIsThatOfACpu) {
  const ActScheme per_token{DType::e4m3, GroupShape::channel()};
  const auto weight = pack(random_weight({DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32}, 40, 1024, 1));
  std::vector<float> a(3 * 1024), fast(3 * 40), precise(fast);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i % 37) - 18;
  for (auto* d : {&fast, &precise}) {
    const auto plan = Plan::linear(
        *weight, {.m_max = 3, .act_scheme = per_token, .accumulation = d == &fast ? Accumulation::fast : Accumulation::precise});
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    std::vector<std::byte> workspace(plan->workspace_bytes());
    const Status run = plan->run(*weight, ConstTensorView(a.data(), {3, 1024}), TensorView(d->data(), {3, 40}), {}, workspace);
    ASSERT_TRUE(run.ok()) << run.message();
  }
  EXPECT_EQ(fast, precise);
}

/// Twice the machine, half the time, for a layer large enough to drown the fixed costs.
TEST(Plan, PredictsForTheMachineItIsGiven) {
  const auto weight = pack(random_weight(kAwq, 1024, 1024, 1));
  Roofline slow{.threads = 2, .read_gbytes_per_s = 20, .f32_gflops = 100, .bf16_gflops = 200, .int8_gops = 400};
  Roofline fast{.threads = 2, .read_gbytes_per_s = 40, .f32_gflops = 200, .bf16_gflops = 400, .int8_gops = 800};
  const auto predicted = [&](const Roofline& machine) {
    return Plan::linear(*weight, {.m_max = 64}, {.machine = machine})->explain().buckets.back().cost_us;
  };
  EXPECT_NEAR(predicted(slow) / predicted(fast), 2.0, 0.1);
}

TEST(Plan, UsesTheWeightsOwnBiasWhenNoneIsGiven) {
  QuantTensor q = random_weight(kAwq, 8, 32, 1, {.bias = true});
  std::ranges::fill(q.codes, std::uint8_t{0});
  std::ranges::fill(q.zeros.bytes, std::byte{0});
  const auto weight = pack(q);
  const auto plan = Plan::linear(*weight, {.epilogue = {.bias = true}});
  std::vector<float> a(32, 1.0f), d(8);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  ASSERT_TRUE(plan->run(*weight, ConstTensorView(a.data(), {1, 32}), TensorView(d.data(), {1, 8}), {}, workspace).ok());
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(d[static_cast<std::size_t>(i)], q.bias.at(i));
}

// ---- gated linear units, and norms before a layer

const LinearSpec kGlu{.epilogue = {.activation = Activation::silu, .glu = true}};

TEST(Glu, PacksRowsInPairsAndUnpacksThem) {
  const QuantTensor q = random_weight(kAwq, 12, 64, 1, {.bias = true});
  const auto plain = pack(q, LinearSpec{}), glu = pack(q, kGlu);
  ASSERT_TRUE(plain.ok() && glu.ok());
  EXPECT_FALSE(plain->paired());
  EXPECT_TRUE(glu->paired());
  EXPECT_NE(std::vector(glu->bytes().begin(), glu->bytes().end()), std::vector(plain->bytes().begin(), plain->bytes().end()));
  EXPECT_EQ(*unpack(*glu), q);
}

TEST(Glu, TakesTheWeightThatWasPackedForIt) {
  const QuantTensor q = random_weight(kAwq, 12, 64, 1);
  const auto plain = pack(q, LinearSpec{}), glu = pack(q, kGlu);
  EXPECT_THAT(std::string(Plan::linear(*plain, kGlu).status().message()), HasSubstr("packed without"));
  EXPECT_THAT(std::string(Plan::linear(*glu, LinearSpec{}).status().message()), HasSubstr("packed for a glu"));
  EXPECT_THAT(std::string(Plan::dequantize(*glu, {}).status().message()), HasSubstr("rows lie in pairs: unpack() it"));
  const auto plan = Plan::linear(*glu);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> a(64, 1.0f), d(12);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  EXPECT_TRUE(plan->run(*glu, ConstTensorView(a.data(), {1, 64}), TensorView(d.data(), {1, 6}), {}, workspace).ok());
  const Status wide = plan->run(*glu, ConstTensorView(a.data(), {1, 64}), TensorView(d.data(), {1, 12}), {}, workspace);
  EXPECT_THAT(std::string(wide.message()), HasSubstr("D is f32 [1,12], the plan writes f32 [1,6]"));
  const Status other = plan->run(*plain, ConstTensorView(a.data(), {1, 64}), TensorView(d.data(), {1, 6}), {}, workspace);
  EXPECT_THAT(std::string(other.message()), HasSubstr("packed without"));
  const auto floats = Plan::dequantize(*plain, {});
  ASSERT_TRUE(floats.ok() && glu->layout() == plain->layout());
  std::vector<float> w(12 * 64);
  std::vector<std::byte> scratch(floats->workspace_bytes());
  const Status rows = floats->run(*glu, {}, TensorView(w.data(), {12, 64}), {}, scratch);
  EXPECT_THAT(std::string(rows.message()), HasSubstr("packed for a glu"));
}

/// A block of rows would have rows of both halves.
TEST(Glu, FinishesTheSumsOfAWeightInBlocks) {
  const QuantTensor q = random_weight({DType::e4m3, ZeroKind::none, GroupShape::block(128, 128), DType::f32}, 256, 256, 1);
  const auto weight = pack(q, kGlu);
  ASSERT_TRUE(weight.ok());
  EXPECT_FALSE(weight->paired());
  const auto plan = Plan::linear(*weight);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->explain().buckets.front().steps.back(), "finish_any_any_none__cpu_baseline");
}

TEST(Glu, RefusesWhatHasNoHalves) {
  const auto refused = [](const QuantTensor& q, EpilogueSpec epilogue) {
    return std::string(pack(q, LinearSpec{.epilogue = epilogue}).status().message());
  };
  const QuantTensor even = random_weight(kAwq, 4, 64, 1), odd = random_weight(kAwq, 5, 64, 1);
  EXPECT_THAT(refused(odd, {.glu = true}), HasSubstr("N=5 is odd"));
  EXPECT_THAT(refused(even, {.glu = true, .glu_limit = 0.0f}), HasSubstr("glu_limit=0 must be positive"));
  EXPECT_THAT(refused(even, {.glu_limit = 7.0f}), HasSubstr("are for a glu"));
  EXPECT_THAT(refused(even, {.glu = true, .glu_offset = std::numeric_limits<float>::infinity()}), HasSubstr("glu_offset=inf"));
  EXPECT_THAT(refused(even, {.glu = true, .out = DType::s32}), HasSubstr("glu"));
  const ConvSpec conv{.geometry = {.in_channels = 64, .out_channels = 4, .height = 2, .width = 2}, .epilogue = {.glu = true}};
  EXPECT_THAT(std::string(pack(even, conv).status().message()), HasSubstr("a convolution has no glu"));
}

TEST(Norm, IsTheFirstStepOfAPlan) {
  const QuantTensor q = random_weight(kAwq, 8, 64, 1);
  const LinearSpec spec{.m_max = 4, .act_scheme = {DType::s8, GroupShape::channel()}, .norm = {.kind = Norm::rms}};
  const auto first = [&](const PackOptions& packing, const PlanOptions& options) {
    const auto weight = pack(q, spec, packing);
    const auto plan = Plan::linear(*weight, spec, options);
    return plan.ok() ? std::string(plan->explain().buckets.back().steps.front()) : plan.status().message();
  };
  // The step that prepares activations normalizes them, too. The reference reads them as they are.
  EXPECT_THAT(first({}, {}), AllOf(StartsWith("prepare_s8"), EndsWith("_norm")));
  EXPECT_THAT(first({.layout = "plain"}, {.kernel = "linear_any_any_any__ref_baseline"}),
              StartsWith("prepare_normalized_any_none__cpu_"));
}

/// Unless a token does not fit into a CTA's registers, or its channels are in another order.
TEST(Norm, AndQuantizingAreOneStepOnTheGpu) {
  const auto steps = [](const char* text, std::int64_t k, bool act_order = false) {
    const Scheme scheme = *Scheme::parse(text);
    const QuantTensor q = random_weight(scheme.weight, 64, k, 1, {.act_order = act_order});
    const LinearSpec spec{
        .a_dtype = DType::f16, .m_max = 256, .act_scheme = scheme.act, .norm = {.kind = Norm::rms, .add = true}};
    const auto explanation = explain(describe(q), spec, *described_gpu("h100"));
    if (!explanation.ok()) return std::vector<std::string>{std::string(explanation.status().message())};
    const auto& all = explanation->buckets.back().steps;
    return std::vector<std::string>(all.begin(), all.end() - 1);  // without the product
  };
  EXPECT_THAT(steps("s8r_s8c", 1024), ElementsAre("prepare_s8_any_none__cuda_simt_norm"));
  EXPECT_THAT(steps("e4m3g128_e4m3b128x128", 1024), ElementsAre("prepare_e4m3_any_none__cuda_simt_norm"));
  EXPECT_THAT(steps("s8g128_u4zg128", 1024), ElementsAre("prepare_s8i16_any_none__cuda_simt_norm"));
  EXPECT_THAT(steps("s8r_s8c", 20480), ElementsAre("prepare_normalized_any_none__cuda_simt", "prepare_s8_any_none__cuda_simt"));
  EXPECT_THAT(steps("s8r_u4b8g128", 1024, true),
              ElementsAre("prepare_normalized_any_none__cuda_simt", "prepare_s8i16_any_none__cuda_simt"));
}

TEST(Norm, NamesTheOperandThatDoesNotFit) {
  const QuantTensor q = random_weight(kAwq, 8, 64, 1);
  const LinearSpec spec{.m_max = 2, .norm = {.kind = Norm::layer, .bias = true, .add = true}};
  const auto weight = pack(q, spec);
  const auto plan = Plan::linear(*weight);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<float> a(2 * 64, 1.0f), add(2 * 64, 1.0f), sum(2 * 64), w(64, 1.0f), d(2 * 8);
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto run = [&](const Operands& operands) {
    return std::string(
        plan->run(*weight, ConstTensorView(a.data(), {2, 64}), TensorView(d.data(), {2, 8}), operands, workspace).message());
  };
  const ConstTensorView vector(w.data(), {64}), matrix(add.data(), {2, 64});
  const TensorView out(sum.data(), {2, 64});
  EXPECT_EQ(run({.norm_weight = vector, .norm_bias = vector, .norm_add = matrix, .norm_sum = out}), "");
  EXPECT_EQ(sum.front(), 2.0f);
  EXPECT_EQ(run({.norm_weight = vector, .norm_bias = vector, .norm_add = matrix}), "");
  EXPECT_THAT(run({.norm_bias = vector, .norm_add = matrix}), HasSubstr("norm_weight must be a contiguous vector of 64"));
  EXPECT_THAT(run({.norm_weight = vector, .norm_add = matrix}), HasSubstr("norm_bias"));
  EXPECT_THAT(run({.norm_weight = vector, .norm_bias = vector}), HasSubstr("norm_add must be"));
  EXPECT_THAT(run({.norm_weight = vector, .norm_bias = vector, .norm_add = ConstTensorView(add.data(), {1, 64})}),
              HasSubstr("norm_add must be"));
  EXPECT_THAT(run({.norm_weight = vector,
                   .norm_bias = vector,
                   .norm_add = matrix,
                   .norm_sum = TensorView(reinterpret_cast<f16*>(sum.data()), {2, 64})}),
              HasSubstr("norm_sum must be f32 [2,64]"));
}

TEST(Norm, RefusesWhatIsNoNorm) {
  const QuantTensor q = random_weight({DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32}, 8, 64, 1);
  const auto refused = [&](const NormSpec& norm, DType a = DType::f32, ActScheme act = {}) {
    return std::string(pack(q, LinearSpec{.a_dtype = a, .act_scheme = act, .norm = norm}).status().message());
  };
  EXPECT_THAT(refused({.kind = Norm::rms, .eps = -1.0f}), HasSubstr("norm.eps=-1"));
  EXPECT_THAT(refused({.kind = Norm::rms, .bias = true}), HasSubstr("norm.bias is for a layer norm"));
  EXPECT_THAT(refused({.add = true}), HasSubstr("norm.add"));
  EXPECT_THAT(refused({.kind = Norm::rms}, DType::s8, {DType::s8, GroupShape::channel()}),
              HasSubstr("normalize before quantizing"));
}

// ---- the comparator: it must notice errors of both signs, in values of both signs

}  // namespace
}  // namespace nibble
