// The question without bytes: what packing and planning would decide, for this machine or another.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::random_weight;

const WeightScheme kAwq{DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};

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

/// Compute capability 7.5 has sm_80's kernels of f16 and int8, as far as its 64 KiB of shared memory hold their stages, and none of bf16.
TEST(Explain, TuringMultipliesF16AndInt8InTensorCores) {
  GpuInfo turing = *described_gpu("h100");
  turing.name = "Tesla T4";
  turing.compute_capability = 75;
  turing.sms = 40;
  turing.shared_bytes_per_block = 64 << 10;
  turing.isas = 1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80);
  const auto explained = [&](const std::string& text, DType a_dtype) {
    const Scheme scheme = *Scheme::parse(text);
    WeightDesc desc{.scheme = scheme.weight, .n = 4096, .k = 4096};
    if (scheme.weight.zero == ZeroKind::integer) desc.zero_type = DType::u8;
    return *explain(desc, {.a_dtype = a_dtype, .m_max = 256, .act_scheme = scheme.act}, turing);
  };
  const auto refusal = [](const Explanation& of, std::string_view kernel) {
    for (const Explanation::Candidate& one : of.buckets.back().candidates)
      if (one.kernel == kernel) return one.accepted ? std::string("accepted") : one.refusal;
    return std::string("none");
  };
  for (const char* const text : {"u4b8g128", "u4zg32", "u8b128g32", "s8g128", "e4m3c", "e2m1g32"})
    EXPECT_EQ(refusal(explained(text, DType::f16), "linear_any_f16_any__cuda_sm80_gemm"), "accepted") << text;
  EXPECT_THAT(std::string(explained("u4b8g128", DType::f16).buckets.back().steps.back()), HasSubstr("__cuda_sm80_gemm"));
  for (const char* const text : {"s8r_s8c", "e4m3r_e4m3c", "s8g128_u4zg128", "s8r_u4b8c"})
    EXPECT_THAT(std::string(explained(text, DType::f16).buckets.back().steps.back()), HasSubstr("__cuda_sm80_")) << text;
  EXPECT_EQ(refusal(explained("u4b8g128", DType::f16), "linear_any_f16_any__cuda_sm80_m16n64k128"),
            "needs 71712 bytes of shared memory, this GPU has 65536");
  const Explanation bf16 = explained("u4b8g128", DType::bf16);
  EXPECT_EQ(refusal(bf16, "linear_any_bf16_any__cuda_sm80_gemm"),
            "multiplies bf16, for which this Tesla T4 of compute capability 7.5 has no tensor cores: pass f16");
  EXPECT_THAT(std::string(bf16.buckets.back().steps.back()), HasSubstr("__cuda_simt_"));
}

/// Weights of 4 bits are packed as bytes for kernels that sum over all of K, and two to a byte for all others.
TEST(Explain, FourBitsPerChannelAreBytesForIntegerSums) {
  const GpuInfo h100 = *described_gpu("h100");
  for (const char* const weight : {"u4b8c", "u4zc"}) {
    const auto layout_for = [&](const std::string& act, DType a_dtype) -> std::string {
      const Scheme scheme = *Scheme::parse(act + weight);
      WeightDesc desc{.scheme = scheme.weight, .n = 4096, .k = 4096};
      if (scheme.weight.zero != ZeroKind::none) desc.zero_type = DType::u8;
      if (scheme.act.group == GroupShape::tensor()) desc.static_acts = StaticActs{0.02f, 0};
      const auto explained = explain(desc, {.a_dtype = a_dtype, .m_max = 256, .act_scheme = scheme.act}, h100);
      return explained.ok() ? std::string(explained->layout) : explained.status().message();
    };
    for (const char* const act : {"s8r_", "s8zr_", "s8t_", "s8zt_"})
      for (const DType a_dtype : {DType::f16, DType::s8}) EXPECT_EQ(layout_for(act, a_dtype), "gpu_w8n64k128") << act << weight;
    for (const char* const act : {"", "s8g128_"}) EXPECT_EQ(layout_for(act, DType::f16), "gpu_n64k128") << act << weight;
  }
}

/// A that comes as codes: a step puts them in the order of the weight, where kernels of floats quantize.
TEST(Explain, CodesThatAreGivenAreReorderedForWeightsInGroups) {
  GpuInfo ampere = *described_gpu("h100");
  ampere.isas = 1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80);
  const auto explained = [](const std::string& text, const GpuInfo& gpu, bool act_order) {
    const Scheme scheme = *Scheme::parse(text);
    WeightDesc desc{.scheme = scheme.weight, .n = 4096, .k = 4096, .act_order = act_order};
    if (scheme.weight.zero != ZeroKind::none) desc.zero_type = DType::u8;
    return explain(desc, {.a_dtype = DType::s8, .m_max = 256, .act_scheme = scheme.act}, gpu);
  };
  for (const char* const text : {"s8r_u4b8g128", "s8zr_u4zg64", "s8t_u4b8g128", "s8zt_u4zg32", "s8g128_u4zg128",
                                 "s8zg32_u8b128g128", "s8g128_s8c", "s8or_u4zg128", "s8og32_u4zg32", "s8og128_s8c"})
    for (const GpuInfo& gpu : {*described_gpu("h100"), ampere}) {
      const auto plan = explained(text, gpu, false);
      ASSERT_TRUE(plan.ok()) << text << ": " << plan.status().message();
      for (const Explanation::Bucket& bucket : plan->buckets) {
        if (bucket.m_low <= 8 && !gpu.has(Isa::sm90)) continue;  // dp4a on the codes as they are takes no longer there
        ASSERT_EQ(bucket.steps.size(), 2u) << text << ", M=" << bucket.m_high << ": " << bucket.steps.front();
        EXPECT_EQ(bucket.steps.front(), "prepare_s8i16_any_none__cuda_simt") << text;
      }
    }
  EXPECT_TRUE(explained("s8r_u4zg128", ampere, true).ok());
  EXPECT_EQ(explained("s8g128_u4zg128", ampere, true)->buckets.front().steps,  // whose blocks act-order tears apart
            std::vector<std::string_view>{"linear_any_s8_any__cuda_simt_codes_n64k128"});
}

/// FP8 activations × weights that are not FP8 take the kernels of f16 activations, and FP8 weights those of FP8 by FP8.
TEST(Explain, Fp8ActivationsTakeTensorCores) {
  const GpuInfo h200 = *described_gpu("h200");
  GpuInfo ampere = h200;
  ampere.isas = 1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80);
  const auto steps = [](const std::string& text, DType a_dtype, bool act_order, std::int64_t m, const GpuInfo& gpu) {
    const Scheme scheme = *Scheme::parse(text);
    WeightDesc desc{.scheme = scheme.weight, .n = 4096, .k = 4096, .act_order = act_order, .prescale = is_compute_float(a_dtype)};
    if (scheme.weight.zero == ZeroKind::integer) desc.zero_type = DType::u8;
    if (scheme.weight.zero == ZeroKind::offset) desc.zero_type = DType::f16;
    if (scheme.act.group == GroupShape::tensor()) desc.static_acts = StaticActs{0.02f, 0};
    const auto explained = explain(desc, {.a_dtype = a_dtype, .m_max = m, .act_scheme = scheme.act}, gpu);
    EXPECT_TRUE(explained.ok()) << explained.status().message();
    return explained.ok() ? explained->buckets.back().steps : std::vector<std::string_view>{"none"};
  };
  for (const char* const text :
       {"e4m3r_u4b8g128", "e4m3t_u4b8g128", "e4m3g128_u4zg128", "e4m3r_u8b128c", "e4m3t_s8c", "e4m3r_e2m1g32"})
    for (const DType a_dtype : {DType::bf16, DType::e4m3})
      for (const GpuInfo& gpu : {h200, ampere})
        for (const std::int64_t m : {1, 64, 1024})
          EXPECT_THAT(
              steps(text, a_dtype, false, m, gpu),
              ElementsAre("prepare_e4m3f16_any_none__cuda_simt",
                          HasSubstr(gpu.has(Isa::sm90) ? "linear_any_e4m3f16_any__cuda_sm90_" : "e4m3f16_any__cuda_sm80_")))
              << text << " " << name(a_dtype) << " M=" << m;
  EXPECT_THAT(steps("e4m3r_u4b8g128", DType::e4m3, true, 64, h200).back(), HasSubstr("e4m3f16_any__cuda_sm90_"));
  EXPECT_THAT(steps("e4m3r_u4og8", DType::f16, false, 64, h200).back(), HasSubstr("cuda_simt_codes"));
  EXPECT_THAT(steps("e4m3r_e4m3c", DType::e4m3, false, 64, h200).back(), HasSubstr("linear_any_e4m3_any__cuda_sm90_"));
}

/// f32 activations × integers take tensor cores, three bytes each, but for few tokens: then reading weights takes the time.
TEST(Explain, F32ActivationsTakeTensorCores) {
  const GpuInfo h200 = *described_gpu("h200");
  GpuInfo ampere = h200;
  ampere.isas = 1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80);
  const auto steps = [](const WeightScheme& scheme, std::int64_t m, const GpuInfo& gpu) {
    WeightDesc desc{.scheme = scheme, .n = 4096, .k = 4096};
    if (scheme.zero == ZeroKind::integer) desc.zero_type = DType::u8;
    if (scheme.zero == ZeroKind::offset) desc.zero_type = DType::f16;
    const auto explained = explain(desc, {.m_max = m}, gpu);
    EXPECT_TRUE(explained.ok()) << explained.status().message();
    return explained.ok() ? explained->buckets.back().steps : std::vector<std::string_view>{"none"};
  };
  for (const char* const text : {"u4b8g128", "u4zg32", "u4og96", "u3b4g128", "s8c"})
    for (const DType scale : {DType::f16, DType::f32}) {
      const WeightScheme scheme = Scheme::parse(text, scale)->weight;
      const bool pairs = scheme.zero != ZeroKind::offset;  // of f16, which floats beside codes cannot take
      EXPECT_THAT(steps(scheme, 256, h200),
                  pairs ? ElementsAre("prepare_f16x2_f32_none__cuda_simt", HasSubstr("linear_any_f16x2_any__cuda_sm90_"))
                        : ElementsAre("prepare_s8x3_f32_none__cuda_simt", HasSubstr("linear_any_s8x3_any__cuda_sm90_")))
          << text;
      EXPECT_THAT(steps(scheme, 256, ampere),
                  ElementsAre("prepare_s8x3_f32_none__cuda_simt", HasSubstr("linear_any_s8x3_any__cuda_sm80_")))
          << text;
      EXPECT_THAT(steps(scheme, 1, ampere), ElementsAre("linear_any_any_any__cuda_simt_n64k128")) << text;
      EXPECT_THAT(steps(scheme, 32, h200).back(),
                  HasSubstr(pairs ? "linear_any_f16x2_any__cuda_sm90_" : "linear_any_s8x3_any__cuda_sm90_"))
          << text;
    }
  // Floats that no byte holds, and halves of integers; groups of 16 channels.
  for (const char* const text : {"e4m3c", "e4m3g128", "u4b8g16", "u4zg48", "e2m1g16", "e2m1g32"})
    EXPECT_THAT(steps(Scheme::parse(text)->weight, 256, h200),
                ElementsAre("prepare_f16x2_f32_none__cuda_simt", HasSubstr("linear_any_f16x2_any__cuda_sm90_")))
        << text;
  for (const char* const text : {"u4b8g16", "u4zg48", "e2m1g16", "e2m1g32"})
    EXPECT_THAT(steps(Scheme::parse(text)->weight, 256, ampere),
                ElementsAre("prepare_s8x3_f32_none__cuda_simt", "linear_any_s8x3_any__cuda_sm80_n64k128"))
        << text;
  EXPECT_THAT(steps(Scheme::parse("u4b8g8")->weight, 256, h200),
              ElementsAre("linear_any_any_any__cuda_simt_n64k128"));  // shorter than a fold
  EXPECT_THAT(steps(Scheme::parse("e4m3c")->weight, 256, ampere), ElementsAre("linear_any_any_any__cuda_simt_n64k128"));
}

/// int8 activations and weights of which one has a scale for 16 channels: tensor cores of every GPU that has such products, but for few tokens.
TEST(Explain, ScalesOf16ChannelsTakeTensorCores) {
  const GpuInfo h200 = *described_gpu("h200");
  for (const char* const text :
       {"s8g16_u4b8g16", "s8g128_u4zg16", "s8g16_u4b8g128", "s8r_u4og48", "s8zg16_u8zg32", "s8og16_u4og16"}) {
    const Scheme scheme = *Scheme::parse(text);
    WeightDesc desc{.scheme = scheme.weight, .n = 4096, .k = 6144};
    if (scheme.weight.zero == ZeroKind::integer) desc.zero_type = DType::u8;
    if (scheme.weight.zero == ZeroKind::offset) desc.zero_type = DType::f16;
    const auto explained = explain(desc, {.a_dtype = DType::f16, .m_max = 256, .act_scheme = scheme.act}, h200);
    ASSERT_TRUE(explained.ok()) << explained.status().message();
    EXPECT_EQ(explained->buckets.back().steps.back(), "linear_any_s8i16_any__cuda_sm80_n64k128") << text;
  }
}

/// For a CPU that need not be there: kernels of its level, of the levels below and of no other.
TEST(Explain, ForADescribedCpu) {
  const WeightDesc weight{.scheme = Scheme::parse("u4b8g128")->weight, .n = 4096, .k = 4096};
  const LinearSpec spec{.m_max = 64};
  const auto baseline = explain(weight, spec, Isa::baseline);
  ASSERT_TRUE(baseline.ok()) << baseline.status().message();
  for (const Explanation::Bucket& bucket : baseline->buckets)
    for (const Explanation::Candidate& candidate : bucket.candidates)
      EXPECT_TRUE(!candidate.accepted || candidate.kernel.find("_baseline") != std::string_view::npos) << candidate.kernel;
  const auto dequantized = explain(weight, DequantizeSpec{}, baseline->layout, Isa::baseline);
  ASSERT_TRUE(dequantized.ok()) << dequantized.status().message();
  EXPECT_THAT(std::string(dequantized->buckets.front().steps.back()), HasSubstr("dequantize_"));
  EXPECT_EQ(explain(weight, DequantizeSpec{.out = DType::s8}, baseline->layout, Isa::baseline).status().code(),
            StatusCode::unsupported);
  EXPECT_EQ(explain(weight, spec, Isa::sm90).status().code(), StatusCode::invalid_argument);
#if defined(__x86_64__)
  EXPECT_THAT(std::string(explain(weight, spec, Isa::avx2)->buckets.back().steps.back()), HasSubstr("__cpu_avx2_"));
  EXPECT_THAT(std::string(explain(weight, spec, Isa::amx)->buckets.back().steps.back()), HasSubstr("__cpu_a"));
#endif
}

/// Packing for a GPU that has no kernel for the weight says why, of every layout that holds it.
TEST(Explain, SaysWhyNoKernelTakesTheWeight) {
  GpuInfo old = *described_gpu("h100");
  old.isas = 0;
  const WeightDesc weight{.scheme = Scheme::parse("u4b8g128")->weight, .n = 4096, .k = 4096};
  const Status status = explain(weight, LinearSpec{}, old).status();
  EXPECT_EQ(status.code(), StatusCode::unsupported);
  EXPECT_THAT(status.message(), HasSubstr("layout gpu_n64k128: "));
  EXPECT_THAT(status.message(), HasSubstr("no code for this NVIDIA H100 80GB HBM3 of compute capability 9.0: build with -D "
                                          "NIBBLE_CUDA_ARCHITECTURES=native"));
  // The same as values, in the message's order.
  ASSERT_FALSE(status.refusals().empty());
  std::size_t at = 0;
  for (const Refusal& refusal : status.refusals()) {
    EXPECT_FALSE(refusal.layout.empty());
    at = status.message().find(refusal.reason, at);
    EXPECT_NE(at, std::string::npos) << refusal.reason;
    if (refusal.needs) {
      EXPECT_EQ(*refusal.needs, kernel_info(refusal.kernel)->isa);
    }
  }
  EXPECT_TRUE(std::ranges::any_of(status.refusals(), [](const Refusal& one) { return one.needs.has_value(); }));
  EXPECT_EQ(status.with_context("packing").refusals().size(), status.refusals().size());
  EXPECT_TRUE(Status().refusals().empty());
  old.compute_capability = 70;
  EXPECT_THAT(explain(weight, LinearSpec{}, old).status().message(), HasSubstr("is older than compute capability 7.5"));
  old = *described_gpu("h100");
  old.isas = 1U << static_cast<int>(Isa::sm90);
  EXPECT_THAT(explain(weight, LinearSpec{}, old).status().message(),
              HasSubstr("needs simt, this NVIDIA H100 80GB HBM3 offers sm90"));
}

/// A kernel that quantizes by itself competes with others and the step in front of them: at one token it is as fast as their products alone.
TEST(Explain, CountsTheStepThatPreparesActivations) {
  const WeightDesc weight{.scheme = Scheme::parse("u4b8g128")->weight, .n = 10240, .k = 8192};
  const LinearSpec spec{
      .a_dtype = DType::f16, .m_max = 64, .epilogue = {.out = DType::f16}, .act_scheme = {DType::s8, GroupShape::group(128)}};
  const auto explained = explain(weight, spec, *described_gpu("h100"));
  ASSERT_TRUE(explained.ok()) << explained.status().message();
  const Explanation::Bucket &one = explained->buckets.front(), &many = explained->buckets.back();
  EXPECT_THAT(std::string(one.steps.back()), HasSubstr("_online_"));
  ASSERT_EQ(many.steps.size(), 2U);
  for (const Explanation::Bucket& bucket : explained->buckets) {
    const auto chosen = std::ranges::find(bucket.candidates, bucket.steps.back(), &Explanation::Candidate::kernel);
    ASSERT_NE(chosen, bucket.candidates.end());
    EXPECT_EQ(chosen->cost_us, bucket.cost_us) << chosen->kernel;
    for (const Explanation::Candidate& candidate : bucket.candidates)
      EXPECT_FALSE(candidate.accepted && candidate.cost_us < bucket.cost_us) << candidate.kernel;
  }
}

}  // namespace
}  // namespace nibble
