// nibble bench: how fast the layers of a checkpoint run here, against what this machine can do.
#include "commands/bench.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <set>

#include "commands/commands.hpp"
#include "commands/option_checks.hpp"
#include "commands/report_command.hpp"
#include "terminal/progress.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Options {
  std::filesystem::path path, shapes, conv, report, reference;
  std::vector<std::filesystem::path> compare;
  std::vector<std::int64_t> m = {1, 16, 256}, batches = {1}, block, moe;
  std::vector<std::string> schemes, acts = {"f32"}, calls = {"back-to-back"}, routings = {"uniform"};  // no schemes: the default
  std::string operation = "linear", backend = "cpu", activations, kernel, layer, json, layout = "nchw", accumulation = "fast";
  std::string norm = "none";
  bool all_kernels = false, no_baselines = false, glu = false, prescale = false;
  int threads = 0;
  double min_seconds = 0.2, fail_under = 0;
  int rounds = 7;
  std::string out;
};

std::string commit() {
  const char* given = std::getenv("NIBBLE_COMMIT");
  return given != nullptr && *given != '\0' ? given : NIBBLE_BUILD_COMMIT;
}

// "awq" for "out/awq/".
std::string display_name(const std::filesystem::path& path) {
  const auto normal = std::filesystem::absolute(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).filename().string();
}

Result<Outcome> run_compare(const Options& options) {
  const auto comparison = compare_benchmarks(options.compare[0], options.compare[1], wants_colour(stdout));
  if (!comparison.ok()) return comparison.status();
  const bool passed = comparison->worst >= options.fail_under;
  const auto text = [&] {
    return comparison->text +
           (passed ? "" : fmt::format("regression: {:.3f} is below {:.3f}\n", comparison->worst, options.fail_under));
  };
  const auto document = [&] {
    Json json = comparison->json;
    json["passed"] = passed;
    return json;
  };
  if (Status written = print_result(options.json, text, document); !written.ok()) return written;
  return passed ? Outcome::ok : Outcome::failed;
}

std::vector<DType> act_types(const Options& options) {
  std::vector<DType> types;
  for (const std::string& act : options.acts) types.push_back(parse_dtype(act).value_or(DType::f32));
  return types;
}

Operation operation_of(const Options& options) {
  return options.operation == "dequantize" ? Operation::dequantize
         : options.operation == "quantize" ? Operation::quantize
                                           : Operation::linear;
}

Result<std::unique_ptr<BenchMachine>> machine_of(Backend backend, Executor& executor) {
  if (backend == Backend::cuda) return gpu_machine(executor);
  return cpu_machine(executor);
}

// What is measured: layers, blocks of them, or layers of experts.
struct Cases {
  std::vector<BenchCase> layers;
  std::vector<BlockCase> blocks;
  std::vector<MoeCase> experts;
};

Result<Benchmark> measure(const Options& options, const Cases& cases, Executor& executor) {
  const auto machine = machine_of(parse_backend(options.backend), executor);
  if (!machine.ok()) return machine.status();
  Benchmark benchmark;
  benchmark.roofline = (*machine)->roofline();
  if ((*machine)->backend() == Backend::cuda) {
    if (auto gpu = this_gpu(); gpu.ok()) benchmark.gpu = *std::move(gpu);
  }
  if (!options.no_baselines && options.conv.empty() && options.block.empty() && options.moe.empty() &&
      options.operation == "linear")
    benchmark.baseline = (*machine)->baseline_description();
  benchmark.commit = commit();
  benchmark.date = utc_now();
  benchmark.accumulation = options.accumulation;
  BenchSpec spec;
  spec.operation = operation_of(options);
  spec.acts = act_types(options);
  spec.accumulation = parse_accumulation(options.accumulation);
  spec.calls.clear();
  for (const std::string& calls : options.calls) spec.calls.push_back(parse_calls(calls));
  spec.glu = options.glu;
  spec.norm = options.norm == "rms" ? Norm::rms : options.norm == "layer" ? Norm::layer : Norm::none;
  spec.kernel = options.kernel;
  spec.all_kernels = options.all_kernels;
  spec.min_seconds = options.min_seconds;
  spec.rounds = options.rounds;
  if (!options.out.empty()) spec.d_dtype = parse_dtype(options.out).value_or(DType::none);
  spec.baselines = !options.no_baselines;
  std::size_t cells = 0, done = 0;
  for (const BenchCase& layer : cases.layers)
    cells += layer.m.size() * spec.acts.size() * spec.calls.size() * orders_of(spec.operation).size();
  for (const BlockCase& block : cases.blocks) cells += (block.m.size() + 1) * spec.acts.size();
  for (const MoeCase& layer : cases.experts) cells += (layer.m.size() * layer.routings.size() + 1) * spec.acts.size();
  ProgressBar progress("measuring");
  const auto step = [&](const std::string& what) { progress.update(done++, cells, what); };
  Status refusal;
  const auto take = [&](Result<LayerBench> bench) -> Status {
    if (!bench.ok()) {
      if (bench.status().code() != StatusCode::unsupported) return bench.status();
      refusal = bench.status();
      benchmark.left_out.emplace_back(refusal.message());
      return {};
    }
    for (BenchResult& result : bench->results) benchmark.results.push_back(std::move(result));
    for (std::string& reason : bench->left_out) benchmark.left_out.push_back(std::move(reason));
    return {};
  };
  for (const BenchCase& layer : cases.layers)
    if (Status taken = take(bench_layer(layer, spec, **machine, step)); !taken.ok()) return taken;
  for (const BlockCase& block : cases.blocks)
    if (Status taken = take(bench_block(block, spec, **machine, step)); !taken.ok()) return taken;
  for (const MoeCase& layer : cases.experts)
    if (Status taken = take(bench_moe(layer, spec, **machine, step)); !taken.ok()) return taken;
  if (benchmark.results.empty()) return refusal;
  for (const BenchResult& result : benchmark.results) {
    double &read = benchmark.roofline[Ceiling::read], &peak = benchmark.roofline[result.peak];
    read = std::max(read, result.ceiling_gbytes_per_s);
    peak = std::max(peak, result.ceiling_gops);
  }
  if (options.all_kernels) benchmark.regret = regret_of(benchmark.results);
  return benchmark;
}

std::vector<std::string> schemes_of(const Options& options) {
  if (!options.schemes.empty()) return options.schemes;
  if (options.conv.empty()) return {"u4zg128"};
  return {options.activations.empty() ? "s8t_s8c" : "s8c"};
}

ConvCasesSpec conv_cases(const Options& options, const ActScheme& quantize) {
  const auto layout = [](std::string_view text) { return text == "nhwc" ? ImageLayout::nhwc : ImageLayout::nchw; };
  return {.file = options.conv,
          .layer = options.layer,
          .schemes = schemes_of(options),
          .act_scheme = quantize,
          .batches = options.batches,
          .input = layout(options.layout.substr(0, 4)),
          .output = layout(options.layout.substr(options.layout.size() - 4))};
}

Result<Outcome> run(const Options& options) {
  if (!options.compare.empty()) return run_compare(options);
  if (int(!options.path.empty()) + int(!options.shapes.empty()) + int(!options.block.empty()) + int(!options.moe.empty()) +
          int(!options.conv.empty()) !=
      1) {
    return Status(StatusCode::invalid_argument,
                  "bench needs one of PATH or --shapes FILE or --block SIZES or --moe SIZES or --conv FILE; see nibble bench "
                  "--help");
  }
  if (options.operation != "linear" && (!options.report.empty() || !options.kernel.empty() || options.all_kernels))
    return Status(StatusCode::invalid_argument,
                  fmt::format("--report, --kernel and --all-kernels are of products; leave them out with --operation {}",
                              options.operation));
  if (options.operation != "linear" && options.prescale)
    return Status(StatusCode::invalid_argument,
                  fmt::format("--prescale is of products; leave it out with --operation {}", options.operation));
  if (!options.report.empty() && parse_backend(options.backend) == Backend::cuda)
    return Status(StatusCode::invalid_argument, "--report shows a CPU; give --json with --backend cuda");
  if (parse_backend(options.backend) == Backend::cpu &&
      std::ranges::count(options.calls, "back-to-back") != std::ssize(options.calls))
    return Status(StatusCode::invalid_argument,
                  "--calls isolated and chain are of GPUs: on a CPU a call begins when the last one has ended, and is timed "
                  "alone; leave it out, or give --backend cuda");
  if (options.operation != "linear" && std::ranges::count(options.calls, "chain") != 0)
    return Status(StatusCode::invalid_argument,
                  fmt::format("--calls chain is of products, which have a next weight; --operation {} has isolated calls",
                              options.operation));
  if (!options.moe.empty() && std::ranges::count(options.calls, "chain") != 0)
    return Status(StatusCode::invalid_argument,
                  "--calls chain: which experts the next layer reads is not known in advance; --moe has isolated calls");
  if (Status usable = check_backend(options.backend, options.kernel); !usable.ok()) return usable;
  const auto quantize = parse_asked_activations(options.activations);
  if (!quantize.ok()) return quantize.status();
  std::optional<Checkpoint> checkpoint;
  if (!options.path.empty()) {
    if (!options.report.empty() && options.acts.size() > 1) {
      return Status(StatusCode::invalid_argument, "--report of a checkpoint shows one type of activations: give --a-dtype one");
    }
    auto opened = Checkpoint::open(options.path);
    if (!opened.ok()) return opened.status();
    checkpoint = *std::move(opened);
  }
  Cases cases;
  if (!options.block.empty()) {
    const std::vector<std::int64_t>& sizes = options.block;
    auto blocks = cases_from_block({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, schemes_of(options), options.m);
    if (!blocks.ok()) return blocks.status();
    cases.blocks = *std::move(blocks);
  } else if (!options.moe.empty()) {
    const std::vector<std::int64_t>& sizes = options.moe;
    std::vector<Routing> routings;
    for (const std::string& routing : options.routings) routings.push_back(parse_routing(routing));
    auto layers = cases_from_moe({sizes[0], sizes[1], sizes[2], sizes[3]}, routings, schemes_of(options), options.m);
    if (!layers.ok()) return layers.status();
    cases.experts = *std::move(layers);
  } else {
    auto layers = checkpoint ? cases_from_checkpoint(*checkpoint, options.layer, *quantize, options.m)
                  : options.conv.empty()
                      ? cases_from_shapes(options.shapes, options.layer, schemes_of(options), options.m, options.prescale)
                      : cases_from_conv_shapes(conv_cases(options, quantize->value_or(ActScheme{})));
    if (!layers.ok()) return layers.status();
    cases.layers = *std::move(layers);
  }
  if (operation_of(options) == Operation::dequantize)
    for (BenchCase& layer : cases.layers) layer.m = {1};
  Threads threads(options.threads);
  const auto benchmark = measure(options, cases, threads.executor());
  if (!benchmark.ok()) return benchmark.status();
  const auto text = [&] { return benchmark_text(*benchmark, wants_colour(stdout)); };
  if (Status written = print_result(options.json, text, [&] { return benchmark_json(*benchmark); }); !written.ok())
    return written;
  if (options.report.empty()) return Outcome::ok;
  const std::filesystem::path& measured = checkpoint ? options.path : options.conv.empty() ? options.shapes : options.conv;
  const ReportRequest request{.output = options.report,
                              .checkpoint = options.path,
                              .reference = options.reference,
                              .title = display_name(measured),
                              .layer = options.layer,
                              .a_dtype = act_types(options).front(),
                              .act_scheme = *quantize};
  if (Status written = write_report(request, *benchmark, threads.executor()); !written.ok()) return written;
  return Outcome::ok;
}

// The best measured ceilings that results are compared with: "61.2 GB/s reads, 235 GFLOP/s f32, 940 Gop/s int8".
std::string ceilings_text(const Benchmark& benchmark) {
  std::string text = fmt::format("{:.1f} GB/s reads", benchmark.roofline.read_gbytes_per_s);
  for (Ceiling ceiling : kAllCeilings) {
    if (ceiling == Ceiling::read || !(benchmark.roofline[ceiling] > 0)) continue;
    if (std::none_of(benchmark.results.begin(), benchmark.results.end(), [&](const auto& r) { return r.peak == ceiling; }))
      continue;
    text +=
        fmt::format(", {:.0f} {} {}", benchmark.roofline[ceiling], ceiling == Ceiling::int8 ? "Gop/s" : "GFLOP/s", name(ceiling));
  }
  return text;
}

std::string regret_text(const Regret& regret) {
  const BenchResult &chosen = regret.chosen, &preferred = regret.preferred;
  std::string text =
      fmt::format("regret: the chosen kernel was at most {:.1f} % slower than the best one, {:.1f} % in the median of {}",
                  100 * (regret.worst - 1), 100 * (regret.median - 1), counted(regret.places, "choice"));
  if (regret.worst > 1) {
    text += fmt::format("; worst: {} M={} {} {}, {} where {} is best", printable(chosen.name), chosen.m, chosen.scheme,
                        chosen.a_dtype, chosen.kernel, preferred.kernel);
  }
  return text + "\n";
}

Json regret_json(const Regret& regret) {
  const BenchResult& chosen = regret.chosen;
  return {{"choices", regret.places},
          {"max_ratio", regret.worst},
          {"median_ratio", regret.median},
          {"worst",
           {{"name", chosen.name},
            {"m", chosen.m},
            {"n", chosen.n},
            {"k", chosen.k},
            {"scheme", chosen.scheme},
            {"a_dtype", chosen.a_dtype},
            {"chosen", chosen.kernel},
            {"best", regret.preferred.kernel}}}};
}

// The results, with the best measured ceilings.
Json cpu_json(const Roofline& roofline) {
  const DeviceInfo& device = this_device();
  return {{"cpu", device.cpu_name},
          {"isa", name(device.isa)},
          {"cores", device.cores},
          {"threads", roofline.threads},
          {"l1d_bytes", device.l1d_bytes},
          {"l2_bytes", device.l2_bytes},
          {"l3_bytes", device.l3_bytes},
          {"memory_bytes", device.memory_bytes},
          {"read_gbytes_per_s", roofline.read_gbytes_per_s},
          {"f32_gflops", roofline.f32_gflops},
          {"bf16_gflops", roofline.bf16_gflops},
          {"int8_gops", roofline.int8_gops}};
}

Json conv_json(const ConvShapes& conv, std::int64_t batch) {
  const ConvGeometry& g = conv.geometry;
  return {{"batch", batch},
          {"in_channels", g.in_channels},
          {"out_channels", g.out_channels},
          {"height", g.height},
          {"width", g.width},
          {"filter", {g.filter.h, g.filter.w}},
          {"stride", {g.stride.h, g.stride.w}},
          {"padding", {g.padding.top, g.padding.bottom, g.padding.left, g.padding.right}},
          {"dilation", {g.dilation.h, g.dilation.w}},
          {"groups", g.groups},
          {"input", name(conv.input)},
          {"output", name(conv.output)}};
}

Json block_json(const BlockShape& block) {
  return {{"hidden", block.hidden},
          {"intermediate", block.intermediate},
          {"heads", block.heads},
          {"kv_heads", block.kv_heads},
          {"head_dim", block.head_dim}};
}

Json moe_json(const MoeResult& moe) {
  const MoeShape& shape = moe.shape;
  return {{"experts", shape.experts},     {"top_k", shape.top_k}, {"hidden", shape.hidden}, {"intermediate", shape.intermediate},
          {"routing", name(moe.routing)}, {"hit", moe.hit},       {"bytes", moe.bytes}};
}

Json gpu_json(const GpuInfo& gpu, const Roofline& roofline) {
  Json json = gpu_description(gpu);
  json["read_gbytes_per_s"] = roofline.read_gbytes_per_s;
  json["f16_gflops"] = roofline.f16_gflops;
  return json;
}

}  // namespace

std::string benchmark_text(const Benchmark& benchmark, bool colour) {
  std::set<std::string> fastest;  // baselines
  std::vector<std::string> doubts;
  for (const BenchResult& r : benchmark.results) {
    if (const auto other = fastest_baseline(r); other != r.baselines.end()) fastest.insert(other->first);
    for (const auto& [name, why] : r.doubted) {
      if (r.chosen) doubts.push_back(fmt::format("no ratio: {} M={}: {} {}\n", printable(r.name), r.m, name, why));
    }
  }
  const std::string against = fastest.size() > 1 ? "vs fastest" : fastest.empty() ? "vs baseline" : "vs " + *fastest.begin();
  using enum Table::Align;
  Table table({{"layer"},
               {"M", right},
               {"N", right},
               {"K", right},
               {.title = "scheme", .fold = true},
               {.title = "activations", .fold = true},
               {.title = "kernel", .fold = true},
               {"median µs", right},
               {"GB/s", right},
               {"Gop/s", right},
               {"ceiling"},
               {"reached", right},
               {against, right},
               {"chosen"}});
  bool above_peak = false, any_conv = false, any_block = false, any_moe = false;
  std::set<Calls> ways;
  for (const BenchResult& r : benchmark.results) {
    const auto other = fastest_baseline(r);
    above_peak = above_peak || r.compute_percent > 100;
    any_conv = any_conv || r.conv;
    any_block = any_block || r.block;
    any_moe = any_moe || r.moe;
    std::string speedup = r.doubted.empty() ? "" : "–";
    if (other != r.baselines.end())
      speedup = fmt::format("{:.2f}×{}", other->second / r.median_us, fastest.size() > 1 ? " " + other->first : "");
    ways.insert(r.calls);
    const std::string way = fmt::format(
        "{}{}{}{}{}", r.glu ? " (glu)" : "", r.norm == Norm::none ? "" : fmt::format(" ({} norm)", name(r.norm)),
        r.prescale ? " (prescale)" : "", r.moe ? fmt::format(" ({}, {:.1f} hit)", name(r.moe->routing), r.moe->hit) : "",
        r.calls == Calls::back_to_back ? "" : fmt::format(" ({})", name(r.calls)));
    table.add({printable(r.name) + (r.transposed ? " (transposed)" : "") + way, std::to_string(r.m), std::to_string(r.n),
               std::to_string(r.k), r.scheme, r.a_dtype, r.kernel, fmt::format("{:.1f}", r.median_us),
               fmt::format("{:.2f}", r.gbytes_per_s), r.gflops > 0 ? fmt::format("{:.1f}", r.gflops) : "",
               r.memory_bound ? "memory" : std::string(name(r.peak)) + " peak", fmt::format("{:.0f} %", r.roofline_percent),
               speedup, benchmark.regret && r.chosen ? "yes" : ""});
  }
  std::string text = table.render(colour);
  text +=
      fmt::format("roofline at best: {}, {}\n", ceilings_text(benchmark),
                  benchmark.gpu ? benchmark.gpu->name : counted(static_cast<std::size_t>(benchmark.roofline.threads), "thread"));
  text += "reached: of the ceiling as it was beside each run; weights cold, medians\n";
  if (ways.contains(Calls::isolated)) text += "isolated: an ordinary kernel runs before each call; its time is subtracted\n";
  if (ways.contains(Calls::chain)) text += "chain: so, and each call is told the weight of the next, which it asks for in L2\n";
  if (any_conv) text += "M, N and K of a convolution: output pixels, output channels, and the weights of one\n";
  if (any_block) text += "block: its four products one after the other, without attention; the others are each alone\n";
  if (any_moe)
    text += "experts: the whole layer without its router; GB/s of the weights of the experts that tokens of a call have (hit)\n";
  if (above_peak) text += "more than 100 % of a peak: the kernel uses faster instructions than those the peak is of\n";
  if (!benchmark.baseline.empty()) text += fmt::format("baseline: {}\n", benchmark.baseline);
  constexpr std::size_t kShown = 3;
  for (std::size_t i = 0; i < std::min(kShown, doubts.size()); ++i) text += doubts[i];
  if (doubts.size() > kShown) text += fmt::format("… and {} more without; --json has them all\n", doubts.size() - kShown);
  const Misprediction off = misprediction_of(benchmark.results);
  if (!off.at.name.empty())
    text += fmt::format("predicted times: {:.0f} % off in the median, {:.0f} % at worst: {} M={} {} {}, {}\n", 100 * off.median,
                        100 * off.worst, printable(off.at.name), off.at.m, off.at.scheme, off.at.a_dtype, off.at.kernel);
  if (benchmark.regret) text += regret_text(*benchmark.regret);
  for (const std::string& layer : benchmark.left_out) text += fmt::format("left out: {}\n", printable(layer));
  return text;
}

Json benchmark_json(const Benchmark& benchmark) {
  Json results = Json::array();
  for (const BenchResult& r : benchmark.results) {
    Json& json = results.emplace_back();
    json = {{"name", r.name},
            {"m", r.m},
            {"n", r.n},
            {"k", r.k},
            {"scheme", r.scheme},
            {"a_dtype", r.a_dtype},
            {"d_dtype", r.d_dtype},
            {"backend", r.backend},
            {"kernel", r.kernel},
            {"layout", r.layout},
            {"calls", name(r.calls)},
            {"modules", r.modules.size()},
            {"median_us", r.median_us},
            {"predicted_us", r.predicted_us},
            {"samples", r.samples},
            {"gbytes_per_s", r.gbytes_per_s},
            {"gflops", r.gflops},
            {"bound", r.memory_bound ? "memory" : "compute"},
            {"peak", name(r.peak)},
            {"ceiling_gbytes_per_s", r.ceiling_gbytes_per_s},
            {"ceiling_gops", r.ceiling_gops},
            {"memory_percent", r.memory_percent},
            {"compute_percent", r.compute_percent},
            {"roofline_percent", r.roofline_percent},
            {"round_percents", r.round_percents},
            {"baselines", Json(r.baselines)}};
    if (!r.doubted.empty()) json["baselines_left_out"] = r.doubted;
    if (r.conv) json["conv"] = conv_json(*r.conv, r.batch);
    if (r.block) json["block"] = block_json(*r.block);
    if (r.moe) json["moe"] = moe_json(*r.moe);
    if (r.operation != Operation::linear) json["operation"] = name(r.operation);
    if (r.transposed) json["transposed"] = true;
    if (r.glu) json["glu"] = true;
    if (r.norm != Norm::none) json["norm"] = name(r.norm);
    if (r.prescale) json["prescale"] = true;
    if (benchmark.regret) json["chosen"] = r.chosen;
  }
  Json document = {{"schema", 1},
                   {"device", benchmark.gpu ? gpu_json(*benchmark.gpu, benchmark.roofline) : cpu_json(benchmark.roofline)},
                   {"version", NIBBLE_VERSION},
                   {"commit", benchmark.commit},
                   {"date", benchmark.date},
                   {"accumulation", benchmark.accumulation},
                   {"results", results}};
  if (benchmark.gpu) document["baseline"] = benchmark.baseline;
  if (benchmark.regret) document["regret"] = regret_json(*benchmark.regret);
  if (!benchmark.left_out.empty()) document["left_out"] = benchmark.left_out;
  return document;
}

void add_bench(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "bench", "Measure layers against the roofline of this machine; compare two results",
                                  "  nibble bench model/ -M 1,16,256 --json now.json --report now.html\n"
                                  "  echo '4096 14336 down_proj' > layers.txt\n"
                                  "  nibble bench --shapes layers.txt --scheme u4zg128,s8g128_u4zg128\n"
                                  "  nibble bench --backend cuda --shapes layers.txt --scheme u4b8g128 --a-dtype f16,bf16\n"
                                  "  nibble bench --shapes layers.txt --operation dequantize --a-dtype bf16\n"
                                  "  nibble bench --block 4096,14336,32,8,128 --scheme u4b8g128 --a-dtype bf16 -M 1,16\n"
                                  "  nibble bench --moe 128,8,4096,1536 --routing uniform,zipf --scheme u4b8g128 -M 1,64\n"
                                  "  echo '64 56x56 64 3 conv padding=1' > convs.txt\n"
                                  "  nibble bench --conv convs.txt --scheme s8t_s8c,u4b8g32 --image-layout nhwc\n"
                                  "  nibble bench --compare before.json now.json --fail-under 0.9");
  auto options = std::make_shared<Options>();
  const auto positive = between(1e-9, 1e9);
  CLI::Option* path = command->add_option("PATH", options->path, "Checkpoint whose layers to measure, each distinct shape once");
  CLI::Option* shapes = command->add_option("--shapes", options->shapes, "Measure the layers of this file: lines of [M] N K NAME")
                            ->type_name("FILE");
  CLI::Option* block =
      command
          ->add_option("--block", options->block,
                       "Measure the linear layers of a decoder's block, each alone and one after the other: norm "
                       "and qkv, o, norm and gate_up with silu and glu, down, with residuals; attention left out")
          ->delimiter(',')
          ->expected(5)
          ->check(between<std::int64_t>(1, 1 << 20))
          ->type_name("HIDDEN,INTERMEDIATE,HEADS,KV_HEADS,HEAD_DIM")
          ->excludes(path)
          ->excludes(shapes);
  CLI::Option* moe =
      command
          ->add_option("--moe", options->moe,
                       "Measure a layer of experts, from ids to the weighted sum: gate_up with silu and glu, and down, [HIDDEN → "
                       "INTERMEDIATE → HIDDEN], of TOP_K experts for each of -M tokens")
          ->delimiter(',')
          ->expected(4)
          ->check(between<std::int64_t>(1, 1 << 20))
          ->type_name("EXPERTS,TOP_K,HIDDEN,INTERMEDIATE")
          ->excludes(path)
          ->excludes(shapes)
          ->excludes(block);
  command
      ->add_option("--routing", options->routings,
                   "With --moe: how tokens fall on experts: uniform; zipf: the i-th most popular with a probability as 1/i; hot: "
                   "half of the tokens have the same one; empty: one has no token. Popular experts are others in each call")
      ->delimiter(',')
      ->check(one_of(routing_names()))
      ->type_name("NAME,...")
      ->capture_default_str()
      ->needs(moe);
  CLI::Option* conv = command
                          ->add_option("--conv", options->conv,
                                       "Measure the convolutions of this file: lines of [B] C HxW CO FILTER NAME [stride=S] "
                                       "[padding=P] [dilation=D] [groups=G]")
                          ->type_name("FILE")
                          ->excludes(shapes)
                          ->excludes(block)
                          ->excludes(moe)
                          ->excludes(path);
  add_m_list(*command, options->m, "Rows of activations")->excludes(conv);
  command->add_option("--batch", options->batches, "With --conv: images, for lines that do not say")
      ->delimiter(',')
      ->check(between(1, 1 << 20))
      ->type_name("B,...")
      ->capture_default_str()
      ->needs(conv);
  command
      ->add_option("--image-layout", options->layout,
                   "With --conv: where elements of images lie, or of input and output: nchw, nhwc, nchw:nhwc, nhwc:nchw")
      ->check(one_of({"nchw", "nhwc", "nchw:nhwc", "nhwc:nchw"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->needs(conv);
  command
      ->add_option("--scheme", options->schemes,
                   "With --shapes, --block, --moe or --conv: schemes to measure; s8r_ or s8g128_ in front quantizes activations "
                   "while running "
                   "(default: u4zg128; with --conv: s8t_s8c)")
      ->delimiter(',')
      ->type_name("NAME,...")
      ->excludes(path);
  add_activations(
      *command, options->activations,
      "With PATH or --conv: quantize activations while running (default: as the checkpoint says; none: leave them as they are)")
      ->excludes(shapes)
      ->excludes(block)
      ->excludes(moe);
  add_accumulation(*command, options->accumulation);
  command
      ->add_option("--a-dtype", options->acts,
                   "Types of activations: f32, f16, bf16; or codes, s8, u8 or e4m3. The output is of the same type, of e4m3 bf16")
      ->delimiter(',')
      ->check(one_of({"f32", "f16", "bf16", "s8", "u8", "e4m3"}))
      ->type_name("TYPE,...")
      ->capture_default_str();
  command
      ->add_option("--out", options->out,
                   "Type of the output, whatever the activations are: f32, f16, bf16, s8, u8; s32, the sums of int8 codes")
      ->check(one_of({"f32", "f16", "bf16", "s8", "u8", "s32"}))
      ->type_name("TYPE")
      ->excludes(block)
      ->excludes(moe);
  command
      ->add_option("--operation", options->operation,
                   "linear: the product of the layer; dequantize: W in the types of --a-dtype, as [N,K] and [K,N]; quantize: "
                   "activations, as the scheme says")
      ->check(one_of({"linear", "dequantize", "quantize"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->excludes(block)
      ->excludes(moe)
      ->excludes(conv);
  command->add_flag("--glu", options->glu, "Layers of gate and up: silu of the first half of the outputs times the second half")
      ->excludes(block)
      ->excludes(moe)
      ->excludes(conv);
  command
      ->add_option("--norm", options->norm,
                   "Normalize activations first, with a residual stream added: rms, layer; none. Of float activations")
      ->check(one_of({"none", "rms", "layer"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->excludes(block)
      ->excludes(moe)
      ->excludes(conv);
  command
      ->add_flag("--prescale", options->prescale,
                 "With --shapes: measure each layer also with a prescale, a factor for each input channel that activations are "
                 "multiplied by first")
      ->needs(shapes);
  add_backend(*command, options->backend);
  command
      ->add_option("--calls", options->calls,
                   "How calls follow each other: back-to-back, as in a graph of layers alone; of a GPU also isolated: with an "
                   "ordinary kernel before each, whose time is subtracted; chain: so, and each is told the weight of the next")
      ->delimiter(',')
      ->check(one_of(calls_names()))
      ->type_name("NAME,...")
      ->capture_default_str();
  CLI::Option* kernel = add_kernel(*command, options->kernel);
  command
      ->add_flag("--all-kernels", options->all_kernels,
                 "Measure every kernel that a plan may choose, but for those predicted to take many times as long as the best")
      ->excludes(kernel)
      ->excludes(block)
      ->excludes(moe);
  command->add_flag("--no-baselines", options->no_baselines, "Leave out other libraries");
  add_threads(*command, options->threads);
  command->add_option("--layer", options->layer, "Only layers whose name matches this regular expression")
      ->type_name("REGEX")
      ->excludes(block)
      ->excludes(moe);
  command->add_option("--min-time", options->min_seconds, "Seconds to spend at least on each measurement")
      ->check(positive)
      ->type_name("S")
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Rounds in which the measured kernels take turns, in a random order in each")
      ->check(CLI::Range(1, 1000))
      ->type_name("N")
      ->capture_default_str();
  add_json(*command, options->json);
  CLI::Option* report =
      command->add_option("--report", options->report, "Write a page with pictures to FILE: inspection, verification, results")
          ->type_name("FILE")
          ->excludes(block)
          ->excludes(moe);
  command
      ->add_option("--reference", options->reference,
                   "For the report: float checkpoint to measure the quantization error against")
      ->type_name("PATH")
      ->needs(report)
      ->needs(path);
  CLI::Option* compare = command->add_option("--compare", options->compare, "Compare two JSON results instead of measuring")
                             ->expected(2)
                             ->type_name("BEFORE AFTER")
                             ->excludes(path)
                             ->excludes(shapes)
                             ->excludes(block)
                             ->excludes(moe)
                             ->excludes(conv);
  command->add_option("--fail-under", options->fail_under, "With --compare: exit with 1 when any speed-up is below this")
      ->check(positive)
      ->type_name("RATIO")
      ->needs(compare);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::cli
