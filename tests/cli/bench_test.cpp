// Measuring: rounds, peaks and regret. The rest of bench is tested through the command.
#include "commands/bench.hpp"

#include <gtest/gtest.h>

namespace nibble::cli {
namespace {

TEST(Bench, EachRoundIsAnnouncedAndTimed) {
  int rounds = 0, runs[2] = {};
  const std::vector<Contestant> contestants = {{"a", [&]() -> Result<double> { return 1e-6 * ++runs[0]; }},
                                               {"b", [&]() -> Result<double> { return 1e-6 * ++runs[1]; }}};
  const auto timings = time_in_turns(contestants, {.min_seconds = 0}, [&]() -> Status {
    EXPECT_EQ(runs[0], runs[1]);
    ++rounds;
    return {};
  });
  EXPECT_EQ(rounds, 7);
  ASSERT_TRUE(timings.ok());
  ASSERT_EQ(timings->size(), 2u);
  for (const Timing& timing : *timings) {
    EXPECT_EQ(timing.samples, 7u);
    ASSERT_EQ(timing.round_us.size(), 7u);
    for (std::size_t i = 0; i < 7; ++i) EXPECT_DOUBLE_EQ(timing.round_us[i], static_cast<double>(2 * i + 2)) << "one warms up";
    EXPECT_DOUBLE_EQ(timing.median_us, 8);
  }
}

TEST(Bench, AFailureEndsTheMeasurementAndNamesTheContestant) {
  int runs = 0;
  const std::vector<Contestant> contestants = {{"a", [&]() -> Result<double> {
                                                  if (++runs == 3) return Status(StatusCode::internal, "it broke");
                                                  return 1e-6;
                                                }}};
  const auto timings = time_in_turns(contestants, {.min_seconds = 0});
  ASSERT_FALSE(timings.ok());
  EXPECT_EQ(timings.status().message(), "a: it broke");
  EXPECT_EQ(runs, 3);
  const auto no_look = time_in_turns(contestants, {.min_seconds = 0}, [] { return Status(StatusCode::internal, "no probe"); });
  EXPECT_EQ(no_look.status().message(), "no probe");
}

TEST(Bench, ThePeakFollowsTheWork) {
  Roofline roofline;
  const ActScheme per_token{DType::s8, GroupShape::channel()};
  EXPECT_EQ(cpu_peak_for(DType::f32, {}, roofline), Ceiling::f32);
  EXPECT_EQ(cpu_peak_for(DType::f16, {}, roofline), Ceiling::f32);
  EXPECT_EQ(cpu_peak_for(DType::bf16, {}, roofline), Ceiling::f32);
  EXPECT_EQ(cpu_peak_for(DType::bf16, per_token, roofline), Ceiling::int8);
  roofline.bf16_gflops = 1;
  EXPECT_EQ(cpu_peak_for(DType::bf16, {}, roofline), Ceiling::bf16);
  EXPECT_EQ(cpu_peak_for(DType::f16, {}, roofline), Ceiling::f32);
}

BenchResult result(const std::string& name, std::int64_t m, const std::string& kernel, double us, bool chosen) {
  BenchResult r;
  r.name = name;
  r.m = m;
  r.kernel = kernel;
  r.median_us = us;
  r.chosen = chosen;
  return r;
}

TEST(Bench, RegretIsOfTheChoiceAgainstTheBest) {
  EXPECT_FALSE(regret_of({}));
  const std::vector<BenchResult> results = {result("a", 1, "fast", 100, true),  result("a", 1, "slow", 200, false),
                                            result("a", 16, "fast", 90, false), result("a", 16, "slow", 135, true),
                                            result("b", 1, "fast", 10, false),  result("b", 1, "slow", 11, true),
                                            result("b", 16, "fast", 10, false)};  // the choice was not measured
  const auto regret = regret_of(results);
  ASSERT_TRUE(regret);
  EXPECT_EQ(regret->places, 3u);
  EXPECT_DOUBLE_EQ(regret->worst, 1.5);
  EXPECT_DOUBLE_EQ(regret->median, 1.1);
  EXPECT_EQ(regret->chosen.m, 16);
  EXPECT_EQ(regret->chosen.kernel, "slow");
  EXPECT_EQ(regret->preferred.kernel, "fast");
}

TEST(Bench, IsolatedCallsAreMarkedAndAChoiceOfTheirOwn) {
  Benchmark benchmark;
  benchmark.results = {result("a", 1, "fast", 5, true), result("a", 1, "slow", 6, false), result("a", 1, "fast", 10, true),
                       result("a", 1, "slow", 8, false)};
  for (BenchResult& r : benchmark.results) r.calls = r.median_us > 6 ? Calls::isolated : Calls::back_to_back;
  const auto regret = regret_of(benchmark.results);
  ASSERT_TRUE(regret);
  EXPECT_EQ(regret->places, 2u);
  EXPECT_DOUBLE_EQ(regret->worst, 1.25);
  const std::string text = benchmark_text(benchmark, false);
  for (const char* part : {"a (isolated)", "isolated: an ordinary kernel runs before each call"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in:\n" << text;
  const Json json = benchmark_json(benchmark);
  EXPECT_EQ(json["results"][0]["calls"], "back-to-back");
  EXPECT_EQ(json["results"][2]["calls"], "isolated");
}

TEST(Bench, ResultsOfAGpuNameItAndItsBaseline) {
  Benchmark benchmark;
  benchmark.gpu = GpuInfo{.name = "NVIDIA X1", .compute_capability = 90, .sms = 132};
  benchmark.roofline.read_gbytes_per_s = 4470;
  benchmark.baseline = "cuBLAS 13.1.0, the same layer in f16";
  benchmark.results = {result("a", 1, "fast", 5, true)};
  benchmark.results[0].backend = "cuda";
  benchmark.results[0].peak = Ceiling::f16;
  benchmark.results[0].roofline_percent = 80;
  const std::string without_peak = benchmark_text(benchmark, false);
  EXPECT_NE(without_peak.find("roofline at best: 4470.0 GB/s reads, NVIDIA X1\n"), std::string::npos) << without_peak;
  EXPECT_EQ(without_peak.find("vs "), std::string::npos) << without_peak;
  benchmark.roofline.f16_gflops = 690000;
  benchmark.results[0].baselines["cublas_f16"] = 12.5;
  const std::string text = benchmark_text(benchmark, false);
  for (const char* part : {"vs cublas_f16", "2.50×", "80 %", "690000 GFLOP/s f16", "baseline: cuBLAS 13.1.0"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in:\n" << text;
  const Json json = benchmark_json(benchmark);
  EXPECT_EQ(json["device"]["gpu"], "NVIDIA X1");
  EXPECT_EQ(json["device"]["compute_capability"], "9.0");
  EXPECT_EQ(json["device"]["f16_gflops"], 690000);
  EXPECT_EQ(json["baseline"], benchmark.baseline);
  EXPECT_FALSE(json["device"].contains("cpu"));
}

/// A machine on which results arrive with a wrong byte.
class Tampering : public BenchMachine {
 public:
  explicit Tampering(std::size_t from_end) : cpu_(cpu_machine(default_executor())), from_end_(from_end) {}

  Backend backend() const override { return cpu_->backend(); }
  Executor& executor() const override { return cpu_->executor(); }
  const Roofline& roofline() const override { return cpu_->roofline(); }
  Result<double> probe(Ceiling, double) override { return 1.0; }
  Ceiling peak_for(DType type, const ActScheme& scheme) const override { return cpu_->peak_for(type, scheme); }
  std::uint64_t cold_bytes() const override { return cold; }
  void settle(std::span<const std::span<const std::byte>> copies) override {
    for (const std::span<const std::byte> copy : copies) settled += copy.size();
    cpu_->settle(copies);
  }
  Result<Contestant> contestant(const Plan& plan, Copies copies, const BenchWork& work) override {
    return cpu_->contestant(plan, copies, work);
  }
  Result<std::shared_ptr<std::byte>> place(std::span<const std::byte> bytes) override { return cpu_->place(bytes); }
  Status fetch(std::span<std::byte> to, const std::byte* from) override {
    if (Status fetched = cpu_->fetch(to, from); !fetched.ok()) return fetched;
    if (from_end_ != 0) to[to.size() - from_end_] = std::byte{0x42};  // of a float the byte of its exponent
    return {};
  }
  Result<Contestant> sequence(std::string name, std::vector<PlanCall> calls, std::size_t copies, Calls way,
                              std::shared_ptr<std::byte> memory) override {
    return cpu_->sequence(std::move(name), std::move(calls), copies, way, std::move(memory));
  }
  Result<Contestant> experts(std::string name, MoeCalls calls, Calls way, std::shared_ptr<std::byte> memory) override {
    return cpu_->experts(std::move(name), std::move(calls), way, std::move(memory));
  }
  Result<std::vector<Operator>> operators(const QuantTensor& q, const BenchWork& work) override {
    return cpu_->operators(q, work);
  }
  Result<std::unique_ptr<Baseline>> baseline(const QuantTensor&, const PackedWeight&) override {
    return std::unique_ptr<Baseline>();
  }
  std::string baseline_description() const override { return "none"; }

  std::uint64_t cold = 1;
  std::size_t settled = 0;  // bytes of weights that were read before they were timed

 private:
  std::unique_ptr<BenchMachine> cpu_;
  std::size_t from_end_;
};

TEST(Bench, ABlockWithAWrongResultIsNotMeasured) {
  const std::vector<std::string> schemes{"s8r_s8c"};
  const std::vector<std::int64_t> m{1};
  const auto blocks = cases_from_block({.hidden = 64, .intermediate = 64, .heads = 2, .kv_heads = 1, .head_dim = 32}, schemes, m);
  ASSERT_TRUE(blocks.ok()) << blocks.status().message();
  const BenchSpec spec{.min_seconds = 0, .rounds = 1};
  Tampering right(0), wrong(1);  // its last 256 bytes are y, the result of down
  const auto measured = bench_block(blocks->front(), spec, right, [](const std::string&) {});
  ASSERT_TRUE(measured.ok()) << measured.status().message();
  EXPECT_EQ(measured->results.size(), 5u);
  const std::size_t once = right.settled;
  EXPECT_GE(once, 64u * (128 + 64 + 128 + 64)) << "every weight is read once before it is timed";
  wrong.cold = 3 * once;
  const auto refused = bench_block(blocks->front(), spec, wrong, [](const std::string&) {});
  EXPECT_GE(wrong.settled, 4 * wrong.cold) << "of all copies, which each of the four products has";
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::internal);
  EXPECT_NE(refused.status().message().find("down of the block is "), std::string::npos) << refused.status().message();
}

TEST(Bench, ALayerOfExpertsWithAWrongResultIsNotMeasured) {
  const std::vector<std::string> schemes{"u4b8g32"};
  const std::vector<std::int64_t> m{1};
  const std::vector<Routing> routings{Routing::uniform};
  const auto layers = cases_from_moe({.experts = 4, .top_k = 2, .hidden = 64, .intermediate = 64}, routings, schemes, m);
  ASSERT_TRUE(layers.ok()) << layers.status().message();
  const BenchSpec spec{.min_seconds = 0, .rounds = 1};
  Tampering right(0), wrong(4 * 3 + 1);  // D comes last: channel 60 of 64
  const auto measured = bench_moe(layers->front(), spec, right, [](const std::string&) {});
  ASSERT_TRUE(measured.ok()) << measured.status().message();
  ASSERT_EQ(measured->results.size(), 1u);
  const auto all = static_cast<std::size_t>(measured->results[0].moe->bytes * 4 / 2);  // 2 of 4 experts are hit
  EXPECT_EQ(right.settled, all) << "every weight is read once before it is timed";
  wrong.cold = 3 * all;
  const auto refused = bench_moe(layers->front(), spec, wrong, [](const std::string&) {});
  EXPECT_EQ(wrong.settled, 3 * all) << "of all copies";
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::internal);
  EXPECT_NE(refused.status().message().find("the layer of experts is "), std::string::npos) << refused.status().message();
}

TEST(Bench, BaselinesThatWaitOrWaverAreNotBelieved) {
  const auto timing = [](std::vector<double> rounds) {
    Timing t;
    t.median_us = median(rounds);
    t.round_us = std::move(rounds);
    return t;
  };
  EXPECT_EQ(doubt(timing({400, 410, 405, 400, 2000, 415, 401}), 365), "") << "one round that something disturbed";
  EXPECT_EQ(doubt(timing({2925, 2900, 2930, 2925, 2925, 2925, 2925}), 365), "") << "slow, not absurd: an eighth of what it could";
  EXPECT_EQ(doubt(timing({6, 6, 7, 6, 6, 6, 6}), 0.1), "") << "a call costs something";
  const std::string waits = doubt(timing({82000, 76000, 90000, 81000, 80000, 79000, 83000}), 365);
  EXPECT_NE(waits.find("took 81000 µs, 222 times what"), std::string::npos) << waits;
  const std::string wavers = doubt(timing({400, 900, 3000, 500, 2800, 400, 1100}), 365);
  EXPECT_NE(wavers.find("from 400 to 2800 µs"), std::string::npos) << wavers;
}

TEST(Bench, OnlyRatiosOfBaselinesThatAreBelievedArePrinted) {
  Benchmark benchmark;
  benchmark.results = {result("a", 1, "k", 10, true), result("b", 1, "k", 10, true)};
  benchmark.results[0].doubted["openblas_f32"] = "took 12660 µs, 900 times what its bytes and operations need";
  benchmark.results[1].baselines = {{"onednn_bf16", 25}, {"openblas_f32", 90}};
  const std::string text = benchmark_text(benchmark, false);
  for (const char* part : {"vs onednn_bf16", "2.50×", "–", "no ratio: a M=1: openblas_f32 took 12660"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in:\n" << text;
  for (const char* part : {"9.00×", "1266"}) EXPECT_EQ(text.find(std::string(part) + "×"), std::string::npos) << text;
  const Json json = benchmark_json(benchmark);
  EXPECT_TRUE(json["results"][0]["baselines"].empty());
  EXPECT_TRUE(json["results"][0]["baselines_left_out"].contains("openblas_f32"));
  EXPECT_FALSE(json["results"][1].contains("baselines_left_out"));
}

TEST(Roofline, EveryCeilingCanBeProbedAlone) {
  const auto executor = make_executor(2);
  RooflineProbe probe(*executor);
  for (Ceiling ceiling : kAllCeilings) {
    const double value = probe.measure(ceiling, 0.001);
    const bool may_lack = ceiling == Ceiling::bf16 || ceiling == Ceiling::f16;  // no kernel of a CPU multiplies f16
    EXPECT_TRUE(value > 0.01 || (may_lack && value == 0)) << name(ceiling);
  }
  Roofline roofline;
  roofline[Ceiling::int8] = 3;
  EXPECT_EQ(roofline.int8_gops, 3);
  EXPECT_EQ(static_cast<const Roofline&>(roofline)[Ceiling::read], 0);
}

}  // namespace
}  // namespace nibble::cli
