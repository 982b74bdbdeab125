// The kernel table, layouts, plans, and the comparator that verification rests on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "kernels/kernel.hpp"
#include "kernels/reference/oracle.hpp"
#include "layouts/tile.hpp"
#include "nibble/nibble.hpp"
#include "plan/act_model.hpp"
#include "plan/choose.hpp"
#include "plan/compare.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::random_weight;

const WeightScheme kAwq{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};

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
    EXPECT_EQ(kernel.linear != nullptr,
              kernel.op == Op::conv && kernel.form != ActForm::as_given && kernel.variant != "depthwise");
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

TEST(Layouts, RoundTripOfEverySchemeAndAwkwardShapes) {
  std::uint64_t seed = 0;
  std::map<const Layout*, int> held;
  for (const Layout* layout : layout_table())
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {16, 32}, {33, 129}, {31, 64}, {65, 7}}) {
        ++seed;
        const QuantTensor q =
            random_weight(scheme, n, k, seed, {.act_order = seed % 2 == 0, .prescale = seed % 3 == 0, .bias = seed % 5 == 0});
        if (const std::string reason = refusal(*layout, q.scheme, q.zeros.dtype, q.k); !reason.empty()) {
          const Status status = pack(q, {.layout = std::string(layout->name)}).status();
          EXPECT_EQ(status.code(), StatusCode::unsupported);
          EXPECT_THAT(status.message(), HasSubstr(reason));
          continue;
        }
        ++held[layout];
        const auto packed = pack(q, {.layout = std::string(layout->name)});
        ASSERT_TRUE(packed.ok()) << packed.status().message();
        EXPECT_EQ(packed->layout(), layout->name);
        const auto back = unpack(*packed);
        ASSERT_TRUE(back.ok());
        EXPECT_TRUE(*back == q) << layout->name << " " << scheme.name() << " [" << n << "," << k << "]";
      }
  for (const Layout* layout : layout_table()) EXPECT_GT(held[layout], 50) << layout->name;
}

/// The planes of every code width tile its bits, and every (plane, row, channel) has a distinct place.
TEST(Layouts, BitPlanesAreAPartition) {
  for (int bits = 1; bits <= 8; ++bits)
    for (int rows : {16, 32}) {
      const tile::Planes planes = tile::planes(bits);
      int shift = 0;
      std::int64_t bytes = 0;
      for (int p = 0; p < planes.count; ++p) {
        const auto [width, at] = planes.plane[static_cast<std::size_t>(p)];
        EXPECT_EQ(at, shift);
        shift += width;
        std::set<std::pair<int, int>> places;
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < tile::kOctet; ++j) {
            const tile::BitPlace place = tile::place(rows, width, r, j);
            EXPECT_LT(place.byte, rows * width);
            EXPECT_LE(place.shift + width, 8);
            EXPECT_TRUE(places.insert({place.byte, place.shift}).second);
          }
        bytes += rows * width;
      }
      EXPECT_EQ(shift, bits);
      EXPECT_EQ(bytes, rows * bits);
    }
}

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
              continue;  // the reference alone does that
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
  const QuantTensor other = random_weight({DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f16}, 64, 128, 1);
  EXPECT_THAT(pack(other, {.backend = Backend::cuda}).status().message(), HasSubstr("codes of type e4m3"));
}

TEST(Gpu, StreamsAreForWeightsInDeviceMemory) {
  const auto weight = pack(random_weight(kAwq, 8, 32, 1));
  const auto plan = Plan::linear(*weight);
  std::vector<float> a(32), d(8);
  const Status status = plan->run(*weight, ConstTensorView(a.data(), {1, 32}), TensorView(d.data(), {1, 8}), {}, {}, Stream{});
  EXPECT_EQ(status.code(), StatusCode::invalid_argument);
  EXPECT_THAT(status.message(), HasSubstr("in host memory"));
}

TEST(Gpu, CostsGrowWithTheWorkAndOrderTheKernels) {
  const GpuInfo h200{.sms = 132, .read_gbytes_per_s = 4470};
  const auto cost = [&](Isa isa, std::int64_t m, std::int64_t n) {
    return cuda::linear_cost_us(isa, 16, h200,
                                {.m = m, .n = n, .k = 4096, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}});
  };
  for (Isa isa : {Isa::simt, Isa::sm80, Isa::sm90})
    for (std::int64_t m = 1; m < 4096; m *= 2) {
      EXPECT_LE(cost(isa, m, 4096), cost(isa, 2 * m, 4096)) << name(isa) << " M=" << m;
      EXPECT_LT(cost(isa, m, 4096), cost(isa, m, 8192)) << name(isa) << " M=" << m;
      EXPECT_LT(cost(Isa::sm90, m, 8192), cost(Isa::sm80, m, 8192)) << "M=" << m;
      EXPECT_LT(cost(Isa::sm80, m, 4096), cost(Isa::simt, m, 4096)) << "M=" << m;
    }
}

/// Quantizing in the launch that multiplies costs little over W4A16, up to the capacity of a launch; a scale per token costs more.
TEST(Gpu, QuantizingInTheSameLaunchCostsLittle) {
  const GpuInfo h200{.compute_capability = 90, .sms = 132, .read_gbytes_per_s = 4470};
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{4096, 4096}, {8192, 8192}, {4096, 14336}, {57344, 8192}})
    for (std::int64_t m : {1, 2, 4, 8}) {
      Problem p{.m = m, .n = n, .k = k, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
      p.act_scheme = {DType::s8, GroupShape::group(128)};
      const int tokens = m == 1 ? 1 : 8;
      const double online = cuda::online_decode_cost_us(tokens, h200, p);
      EXPECT_LT(online, 1.2 * cuda::linear_cost_us(Isa::sm90, tokens, h200, p) + (m == 1 ? 0.5 : 2.5))
          << "M=" << m << " N=" << n << " K=" << k;
      p.act_scheme.group = GroupShape::channel();
      EXPECT_GT(cuda::online_decode_cost_us(tokens, h200, p), online);
      p.m = 9;
      EXPECT_GT(cuda::online_decode_cost_us(8, h200, p), 1.5 * online) << "two launches";
    }
}

/// Adding partial sums of 512 channels in f32 costs little where tensor cores are the limit, and nothing where memory is.
TEST(Gpu, PreciseSumsOfFp8CostLittle) {
  const GpuInfo h200{.compute_capability = 90, .sms = 132, .read_gbytes_per_s = 4470};
  Problem p{.n = 8192, .k = 28672, .scheme = {DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32}};
  p.act_scheme = {DType::e4m3, GroupShape::channel()};
  const auto extra = [&](const Tile& tile, std::int64_t m) {
    p.m = m;
    p.accumulation = Accumulation::fast;
    const double fast = cuda::scaled_sm90_cost_us(tile, DType::e4m3, h200, p);
    p.accumulation = Accumulation::precise;
    return cuda::scaled_sm90_cost_us(tile, DType::e4m3, h200, p) / fast;
  };
  EXPECT_EQ(extra({.m = 16, .n = 64}, 1), 1.0);
  EXPECT_GT(extra({.m = 256, .n = 128}, 4096), 1.01);
  EXPECT_LT(extra({.m = 256, .n = 128}, 4096), 1.1);
  p.act_scheme.group = GroupShape::group(128);
  EXPECT_EQ(extra({.m = 256, .n = 128}, 4096), 1.0) << "groups are added up in f32 anyway";
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

/// The bound of a layer is that of the requested accumulation; only tensor cores of sm_90 have a choice.
TEST(Gpu, TheBoundFollowsTheAccumulation) {
  const WeightScheme per_channel{DType::e4m3, ZeroKind::none, GroupShape::channel(), DType::f32};
  const ActScheme per_token{DType::e4m3, GroupShape::channel()}, groups{DType::e4m3, GroupShape::group(128)};
  const auto channels = [&](std::string_view kernel, const ActScheme& quantize, Accumulation accumulation) {
    return act_model(*find_kernel(kernel), DType::bf16, quantize, per_channel, accumulation).fp8_group;
  };
  for (const Kernel& kernel : kernel_table()) {
    if (kernel.op != Op::linear || kernel.act != "e4m3" || kernel.backend != Backend::cuda) continue;
    const bool sm90 = kernel.isa == Isa::sm90;
    EXPECT_EQ(channels(kernel.name, per_token, Accumulation::fast), sm90 ? 0 : -1) << kernel.name;
    EXPECT_EQ(channels(kernel.name, per_token, Accumulation::precise), sm90 ? 512 : -1) << kernel.name;
    for (Accumulation accumulation : {Accumulation::fast, Accumulation::precise})
      EXPECT_EQ(channels(kernel.name, groups, accumulation), sm90 ? 128 : -1) << kernel.name;
  }

  const Kernel& kernel = *find_kernel("linear_any_e4m3_any__cuda_sm90_wgmma_m256n128");
  const QuantTensor q = random_weight(per_channel, 1, 8192, 1);
  const std::vector<float> a(8192, 1.0f);
  const std::int64_t column = 0;
  const auto bound = [&](Accumulation accumulation) {
    return reference::linear(reference::arrays_of(q), ConstTensorView(a.data(), {1, 8192}), {}, {}, {&column, 1},
                             act_model(kernel, DType::f32, per_token, per_channel, accumulation))
        .front()
        .bound;
  };
  EXPECT_LT(bound(Accumulation::precise), 0.7 * bound(Accumulation::fast));
}

/// The cost of dequantizing does not depend on M: few tokens are cheaper without it, many with it.
TEST(Gpu, TheDenseTierIsForManyTokens) {
  const GpuInfo h200{.compute_capability = 90, .sms = 132, .read_gbytes_per_s = 4470};
  Problem problem{.n = 4096, .k = 4096, .a_dtype = DType::f16, .epilogue = {.out = DType::f16}};
  double last = 0;
  for (problem.m = 1; problem.m <= 8192; problem.m *= 2) {
    const double dense = cuda::dense_cost_us(h200, problem);
    EXPECT_GE(dense, last) << "M=" << problem.m;
    last = dense;
    const double decode = cuda::linear_cost_us(Isa::sm90, 16, h200, problem);
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

TEST(Isa, LevelsOfCpusAndGpusAreTwoTrees) {
  for (Isa isa : kAllIsas) {
    EXPECT_EQ(backend(parent(isa)), backend(isa)) << name(isa);
    EXPECT_LE(parent(isa), isa) << name(isa);
    EXPECT_FALSE(backend(isa) == Backend::cuda && this_device().has(isa)) << name(isa);
  }
  EXPECT_EQ(backend(this_device().isa), Backend::cpu);
  EXPECT_TRUE(runs_here(Isa::baseline).ok());
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
  EXPECT_EQ(Plan::linear(*weight, {.epilogue = {.out = DType::u8}}).status().code(), StatusCode::unsupported);
  EXPECT_EQ(Plan::dequantize(*weight, {.out = DType::s8}).status().code(), StatusCode::unsupported);
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
  EXPECT_THAT(status(DType::s8, GroupShape::group(4)).message(), HasSubstr("a multiple of 8 channels"));
  EXPECT_THAT(status(DType::s8, GroupShape::group(48)).message(), HasSubstr("do not line up with the weight's groups of 32"));
  EXPECT_THAT(status(DType::s8, GroupShape::group(1024)).message(), HasSubstr("512 at most, not 1024"));
  const auto with_zeros = [&](std::int32_t block) {
    return Plan::linear(*weight, {.act_scheme = {DType::s8, GroupShape::group(block), ZeroKind::integer}}).status();
  };
  for (std::int32_t block : {32, 64, 128, 256}) EXPECT_TRUE(with_zeros(block).ok()) << block;
  EXPECT_THAT(with_zeros(512).message(), HasSubstr("256 at most with zero points, not 512"));
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

template <class Spec>
void expect_explained(const QuantTensor& q, const Spec& spec, const std::function<Result<Plan>(const PackedWeight&)>& plan) {
  const auto weight = pack(q, spec);
  ASSERT_TRUE(weight.ok()) << weight.status().message();
  const auto planned = plan(*weight);
  const auto explained = explain(describe(q), spec);
  ASSERT_TRUE(planned.ok()) << planned.status().message();
  ASSERT_TRUE(explained.ok()) << explained.status().message();
  EXPECT_EQ(explained->layout, weight->layout());
  const Explanation expected = planned->explain();
  ASSERT_EQ(explained->buckets.size(), expected.buckets.size());
  bool others = false;
  for (std::size_t i = 0; i < expected.buckets.size(); ++i) {
    const Explanation::Bucket &got = explained->buckets[i], &want = expected.buckets[i];
    EXPECT_EQ(got.m_low, want.m_low);
    EXPECT_EQ(got.m_high, want.m_high);
    EXPECT_EQ(got.steps, want.steps);
    EXPECT_EQ(got.cost_us, want.cost_us);
    for (const Explanation::Candidate& candidate : got.candidates)
      others |= candidate.accepted && find_kernel(candidate.kernel)->layout != weight->layout();
  }
  EXPECT_TRUE(others) << "kernels that read another layout are judged too";
}

/// The question without bytes has the answer that packing and planning give.
TEST(Explain, SaysWhatPackingAndPlanningDecide) {
  for (const char* name : {"u4zg32", "u4b8g64", "s8c", "u3b4g32", "e4m3b128x128"})
    for (const char* act : {"", "s8r", "s8g32"}) {
      SCOPED_TRACE(::testing::Message() << act << " " << name);
      const WeightScheme scheme = Scheme::parse(name)->weight;
      if (*act != '\0' && scheme.codes == DType::e4m3) continue;
      const QuantTensor q = random_weight(scheme, 96, 128, 1);
      LinearSpec spec{.a_dtype = DType::bf16, .m_max = 300, .epilogue = {.out = DType::bf16}};
      if (*act != '\0') spec.act_scheme = Scheme::parse(std::string(act) + "_s8c")->act;
      expect_explained(q, spec, [&](const PackedWeight& weight) { return Plan::linear(weight, spec); });
    }
  QuantTensor filters = random_weight(kAwq, 24, 9 * 32, 1);
  filters.filter = {3, 3};
  for (const std::int64_t padding : {0, 1}) {
    const ConvSpec spec{.geometry = {.in_channels = 32,
                                     .out_channels = 24,
                                     .height = 9,
                                     .width = 11,
                                     .filter = {3, 3},
                                     .padding = {padding, padding, padding, padding}},
                        .batch_max = 3};
    expect_explained(filters, spec, [&](const PackedWeight& weight) { return Plan::conv(weight, spec); });
  }
  const WeightDesc weight{.scheme = kAwq, .n = 8, .k = 64, .zero_type = DType::u8};
  EXPECT_EQ(explain(weight, LinearSpec{}, {.layout = "none"}).status().code(), StatusCode::not_found);
  EXPECT_EQ(explain(weight, LinearSpec{.m_max = -1}).status().code(), StatusCode::invalid_argument);
  // A pointwise convolution is asked for as a linear layer, after its geometry was held against the weight.
  const ConvSpec other{.geometry = {.in_channels = 32, .out_channels = 8, .height = 1, .width = 1}};
  EXPECT_EQ(explain(weight, other).status().code(), StatusCode::invalid_argument);
}

/// For a GPU that need not be there, nor have been built for.
TEST(Explain, ForADescribedGpu) {
  const WeightDesc weight{.scheme = Scheme::parse("u4b8g128")->weight, .n = 4096, .k = 4096};
  const LinearSpec spec{.a_dtype = DType::f16, .m_max = 512, .epilogue = {.out = DType::f16}};
  std::set<double> answers;
  for (const std::string_view name : described_gpus()) {
    const auto gpu = described_gpu(name);
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    const auto explained = explain(weight, spec, *gpu);
    ASSERT_TRUE(explained.ok()) << explained.status().message();
    EXPECT_EQ(explained->layout, "gpu_n64k128");
    EXPECT_EQ(explained->buckets.back().m_high, 512);
    for (const Explanation::Bucket& bucket : explained->buckets)
      EXPECT_THAT(std::string(bucket.steps.back()), HasSubstr("__cuda_sm90_"));
    answers.insert(explained->buckets.front().cost_us);
    ConvSpec conv{.geometry = {.in_channels = 64, .out_channels = 64, .height = 28, .width = 28, .filter = {3, 3}},
                  .a_dtype = DType::f16,
                  .epilogue = {.out = DType::f16}};
    const auto images = explain({.scheme = weight.scheme, .n = 64, .k = 9 * 64, .filter = {3, 3}}, conv, *gpu);
    ASSERT_TRUE(images.ok()) << images.status().message();
    EXPECT_THAT(std::string(images->buckets.back().steps.back()), HasSubstr("__cuda_"));
  }
  EXPECT_EQ(answers.size(), described_gpus().size()) << "the costs of each";
  GpuInfo old = *described_gpu("h100");
  old.isas = 1U << static_cast<int>(Isa::simt);
  EXPECT_THAT(std::string(explain(weight, spec, old)->buckets.back().steps.back()), HasSubstr("__cuda_simt_"));
  EXPECT_THAT(described_gpu("a100").status().message(), HasSubstr("h100 and h200"));
  EXPECT_EQ(described_gpu("a100").status().code(), StatusCode::not_found);
}

/// The error that quantizing activations adds: less with finer scales, nothing where codes hold the activations exactly.
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

TEST(ActErrors, FollowTheScales) {
  const QuantTensor q = random_weight(kAwq, 48, 512, 1, {.bias = true});
  const ActScheme modes[] = {{DType::s8},
                             {DType::s8, GroupShape::channel(), ZeroKind::integer},
                             {DType::s8, GroupShape::group(32)},
                             {DType::s8, GroupShape::group(32), ZeroKind::integer},
                             {DType::s8, GroupShape::group(48)},
                             {}};
  const auto plain = activation_errors(q, modes), outliers = activation_errors(q, modes, {.outliers = 100});
  ASSERT_TRUE(plain.ok() && outliers.ok());
  const auto error = [&](std::size_t mode) { return (*plain)[mode].relative_l2; };
  EXPECT_GT(error(0), error(1));
  EXPECT_GT(error(1), error(2));
  EXPECT_GT(error(2), error(3));
  EXPECT_NEAR((*plain)[0].sqnr_db, -20 * std::log10(error(0)), 1e-9);
  EXPECT_THAT((*plain)[4].possible.message(), HasSubstr("do not line up"));
  EXPECT_EQ(error(5), 0) << "nothing is quantized";
  EXPECT_GT((*outliers)[0].relative_l2, 3 * (*outliers)[3].relative_l2);

  std::vector<float> inputs(2 * 512);
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = static_cast<float>(static_cast<int>(i % 255) - 127);
  const auto exact = activation_errors(q, {modes, 1}, {.inputs = ConstTensorView(inputs.data(), {2, 512})});
  ASSERT_TRUE(exact.ok());
  EXPECT_LT((*exact)[0].relative_l2, 1e-6);
  EXPECT_THAT(activation_errors(q, modes, {.inputs = ConstTensorView(inputs.data(), {4, 256})}).status().message(),
              HasSubstr("[tokens,512]"));
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

// ---- the comparator: it must notice errors of both signs, in values of both signs

class Comparator : public ::testing::Test {
 protected:
  Comparator() : d_(DType::f32, {2, 3}), columns_{0, 1, 2} {
    const float values[] = {1.0f, -2.0f, 0.0f, -1e-3f, 5e4f, -7.0f};
    for (std::int64_t i = 0; i < 6; ++i) {
      d_.set(i, values[i]);
      expected_.push_back({values[i], 1e-3});
    }
  }
  Comparison run() { return compare(d_, columns_, expected_); }

  Tensor d_;
  std::vector<std::int64_t> columns_;
  std::vector<reference::Expected> expected_;
};

TEST_F(Comparator, AcceptsEqualityAndErrorsWithinTheBound) {
  EXPECT_EQ(run().failures, 0);
  EXPECT_EQ(run().checked, 6);
  for (std::int64_t i = 0; i < 6; ++i)
    if (i != 4) d_.set(i, static_cast<float>(expected_[static_cast<std::size_t>(i)].value + 0.9e-3));
  EXPECT_EQ(run().failures, 0);
}

TEST_F(Comparator, NoticesErrorsOfBothSignsAtEveryPosition) {
  for (std::int64_t i = 0; i < 6; ++i)
    for (double error : {-1.1e-2, +1.1e-2}) {
      const float good = d_.at(i);
      d_.set(i, static_cast<float>(expected_[static_cast<std::size_t>(i)].value + error));
      const Comparison c = run();
      EXPECT_EQ(c.failures, 1) << i << " " << error;
      EXPECT_EQ(c.worst_m * 3 + c.worst_n, i);
      d_.set(i, good);
    }
}

TEST_F(Comparator, NoticesWrongSignNaNAndInfinity) {
  for (std::int64_t i : {0, 1, 5}) {
    const float good = d_.at(i);
    for (float bad : {-good, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity()}) {
      d_.set(i, bad);
      EXPECT_EQ(run().failures, 1) << i << " " << bad;
    }
    d_.set(i, good);
  }
}

TEST_F(Comparator, OverflowToInfinityIsRightOnlyWhenTheTypeOverflows) {
  Tensor half(DType::f16, {1, 1});
  half.set(0, std::numeric_limits<float>::infinity());
  const std::int64_t column[] = {0};
  const std::vector<reference::Expected> big{{70000.0, 1.0}}, small{{60000.0, 1.0}}, negative{{-70000.0, 1.0}};
  EXPECT_EQ(compare(half, column, big).failures, 0);
  EXPECT_EQ(compare(half, column, small).failures, 1);
  EXPECT_EQ(compare(half, column, negative).failures, 1);
}

/// One wrong code in a real-sized layer must not hide in the tolerance.
TEST(Verify, OneWrongCodeInALargeLayerIsFound) {
  const std::int64_t n = 32, k = 4096;
  const QuantTensor good = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(128), DType::f16}, n, k, 3);
  QuantTensor bad = good;
  bad.codes[5 * k + 1234] ^= 4;
  const std::int64_t m = 4;
  Tensor a(DType::f32, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
  const ConstTensorView a_view(a.as<float>(), {m, k});
  const auto weight = pack(bad);
  const auto plan = Plan::linear(*weight, {.m_max = m});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  Tensor d(DType::f32, {m, n});
  ASSERT_TRUE(plan->run(*weight, a_view, TensorView(d.as<float>(), {m, n}), {}, workspace).ok());
  std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
  std::iota(columns.begin(), columns.end(), 0);
  const Comparison c = compare(d, columns, reference::linear(reference::arrays_of(good), a_view, {}, {}, columns));
  EXPECT_GE(c.failures, 1);
  EXPECT_EQ(c.worst_n, 5);
}

/// x as an f16 or bf16.
double rounded(DType type, double x) {
  const auto f = static_cast<float>(x);
  return type == DType::f16 ? to_f32(to_f16(f)) : to_f32(to_bf16(f));
}

/// W in a kernel that rounds weights to `type`: rounded once, or after rounding scales and the fractional part of an offset.
double rounded_weight(const QuantTensor& q, std::int64_t n, std::int64_t k, DType type, bool rounds_scales) {
  const std::int64_t at = n * q.groups() + k / q.scheme.group.k;
  const double s = q.scales.at(at), code = code_value(q.scheme.codes, q.codes[static_cast<std::size_t>(n * q.k + k)]);
  const double offset = q.scheme.zero == ZeroKind::offset ? q.zeros.at(at) : 0.0;
  if (!rounds_scales) return rounded(type, code * s + offset);
  const double up = type == DType::f16 ? 64.0 : 1.0;
  const double whole = std::nearbyint(-offset / s);
  return rounded(type, (code - whole) * rounded(type, s * up) + rounded(type, (offset + whole * s) * up)) / up;
}

/// The bounds of kernels that round weights hold, and still show one wrong code: of bf16 only where no scale is rounded, so that
/// the rounding is known.
TEST(Verify, RoundedWeightsAreWithinTheirBoundAndAWrongCodeIsNot) {
  const std::int64_t m = 4, n = 16, k = 4096, wrong = 5;
  std::vector<std::int64_t> columns(static_cast<std::size_t>(n));
  std::iota(columns.begin(), columns.end(), 0);
  for (DType type : {DType::f16, DType::bf16})
    for (ZeroKind zero : {ZeroKind::none, ZeroKind::offset})
      for (float scale2 : {1.0f, 1e-3f})
        for (bool rounds_scales : {false, true}) {
          const DType codes = zero == ZeroKind::none ? DType::u4b8 : DType::u4;
          const QuantTensor q = random_weight({codes, zero, GroupShape::group(128), DType::f32}, n, k, 3);
          QuantTensor good = q;
          good.scale2 = scale2;
          Tensor a(type, {m, k});
          for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
          const ConstTensorView a_view(a.bytes.data(), type, {m, k});
          const auto expected = reference::linear(reference::arrays_of(good), a_view, {}, {}, columns,
                                                  {.dot_factor = 4, .weight_type = type, .rounds_scales = rounds_scales});
          const auto compared = [&](const QuantTensor& weight) {
            Tensor d(DType::f32, {m, n});
            for (std::int64_t row = 0; row < m; ++row)
              for (std::int64_t column = 0; column < n; ++column) {
                double sum = 0;
                for (std::int64_t i = 0; i < k; ++i)
                  sum += a.at(row * k + i) * rounded_weight(weight, column, i, type, rounds_scales);
                d.set(row * n + column, static_cast<float>(sum * scale2));
              }
            return compare(d, columns, expected);
          };
          SCOPED_TRACE(::testing::Message() << name(type) << (zero == ZeroKind::offset ? " offset" : "") << " scale2 " << scale2
                                            << (rounds_scales ? " scales too" : ""));
          const Comparison right = compared(q);
          EXPECT_EQ(right.failures, 0);
          EXPECT_GT(right.worst_ratio, 0.02);  // a loose bound would test nothing
          if (type == DType::bf16 && rounds_scales) continue;
          QuantTensor bad = q;
          bad.codes[static_cast<std::size_t>(wrong * k + 1234)] ^= 4;
          const Comparison c = compared(bad);
          EXPECT_GE(c.failures, 1);
          EXPECT_EQ(c.worst_n, wrong);
        }
}

/// Tiny weights, where f16 has fewer bits or none: the bound has a floor there.
TEST(Verify, RoundedWeightsMayVanishInHalfPrecision) {
  const std::int64_t n = 4, k = 256;
  for (bool rounds_scales : {false, true})
    for (float scale : {1e-6f, 3e-8f, 1e-9f}) {
      QuantTensor q = random_weight({DType::u4b8, ZeroKind::none, GroupShape::group(32), DType::f32}, n, k, 3);
      for (std::int64_t i = 0; i < q.scales.numel(); ++i) q.scales.set(i, scale * (1 + 0.01f * static_cast<float>(i)));
      Tensor a(DType::f16, {1, k}), d(DType::f32, {1, n});
      for (std::int64_t i = 0; i < k; ++i) a.set(i, random_normal(1, static_cast<std::uint64_t>(i)));
      for (std::int64_t column = 0; column < n; ++column) {
        double sum = 0;
        for (std::int64_t i = 0; i < k; ++i) sum += a.at(i) * rounded_weight(q, column, i, DType::f16, rounds_scales);
        d.set(column, static_cast<float>(sum));
      }
      const std::int64_t columns[] = {0, 1, 2, 3};
      const auto expected = reference::linear(reference::arrays_of(q), ConstTensorView(a.bytes.data(), DType::f16, {1, k}), {},
                                              {}, columns, {.weight_type = DType::f16, .rounds_scales = rounds_scales});
      EXPECT_EQ(compare(d, columns, expected).failures, 0) << scale;
    }
}

TEST(Executor, RunsEveryIterationOnceForAnyThreadCountAndBackToBack) {
  for (int threads : {1, 2, 3, 8}) {
    auto executor = make_executor(threads);
    EXPECT_EQ(executor->threads(), threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> hits(static_cast<std::size_t>(round % 17));
      executor->parallel_for(round % 17, [&](std::int64_t i) { hits[static_cast<std::size_t>(i)].fetch_add(1); });
      for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1);
    }
  }
}

TEST(Roofline, IsMeasured) {
  auto executor = make_executor(1);
  const Roofline roofline = measure_roofline(*executor);
  EXPECT_GT(roofline.read_gbytes_per_s, 0.1);
  EXPECT_GT(roofline.f32_gflops, 0.1);
  EXPECT_EQ(roofline.threads, 1);
}

}  // namespace
}  // namespace nibble
