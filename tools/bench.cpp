// nibble bench: how fast the layers of a checkpoint run here, against what this machine can do.
#include "bench.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdlib>

#include "blas.hpp"
#include "commands.hpp"
#include "option_checks.hpp"
#include "progress.hpp"
#include "report_command.hpp"
#include "table.hpp"

namespace nibble::tools {
namespace {

struct Options {
  std::filesystem::path path, shapes, json, report, reference;
  std::vector<std::filesystem::path> compare;
  std::vector<std::int64_t> m = {1, 16, 256};
  std::string scheme = "u4zg128", act = "f32", kernel, layer;
  bool all_kernels = false, no_baselines = false;
  int threads = 0;
  double min_seconds = 0.2, fail_under = 0;
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
  print(comparison->text);
  if (comparison->worst >= options.fail_under) return Outcome::ok;
  print(fmt::format("regression: {:.3f} is below {:.3f}\n", comparison->worst, options.fail_under));
  return Outcome::failed;
}

Result<Benchmark> measure(const Options& options, const std::vector<BenchCase>& cases, Executor& executor) {
  Benchmark benchmark;
  benchmark.roofline = measure_roofline(executor);
  benchmark.commit = commit();
  benchmark.date = utc_now();
  BenchSpec spec;
  spec.act = parse_dtype(options.act).value_or(DType::f32);
  spec.kernel = options.kernel;
  spec.all_kernels = options.all_kernels;
  spec.min_seconds = options.min_seconds;
  spec.baselines = !options.no_baselines;
  std::size_t cells = 0, done = 0;
  for (const BenchCase& layer : cases) cells += layer.m.size();
  ProgressBar progress("measuring");
  for (const BenchCase& layer : cases) {
    auto results = bench_layer(layer, spec, benchmark.roofline, executor,
                               [&](const std::string& what) { progress.update(done++, cells, what); });
    if (!results.ok()) return results.status();
    for (BenchResult& result : *results) benchmark.results.push_back(std::move(result));
  }
  return benchmark;
}

Result<Outcome> run(const Options& options) {
  if (!options.compare.empty()) return run_compare(options);
  if (options.path.empty() == options.shapes.empty()) {
    return Status(StatusCode::invalid_argument, "bench needs a PATH or --shapes FILE, and not both; see nibble bench --help");
  }
  if (Status known = check_kernel_name(options.kernel); !known.ok()) return known;
  std::optional<Checkpoint> checkpoint;
  if (!options.path.empty()) {
    auto opened = Checkpoint::open(options.path);
    if (!opened.ok()) return opened.status();
    checkpoint = *std::move(opened);
  }
  const auto cases = checkpoint ? cases_from_checkpoint(*checkpoint, options.layer, options.m)
                                : cases_from_shapes(options.shapes, options.layer, options.scheme, options.m);
  if (!cases.ok()) return cases.status();
  Threads threads(options.threads);
  const auto benchmark = measure(options, *cases, threads.executor());
  if (!benchmark.ok()) return benchmark.status();
  print(benchmark_text(*benchmark, wants_colour(stdout)));
  if (!options.json.empty()) {
    if (Status written = write_file(options.json, to_text(benchmark_json(*benchmark))); !written.ok()) return written;
  }
  if (options.report.empty()) return Outcome::ok;
  const std::filesystem::path& measured = checkpoint ? options.path : options.shapes;
  const ReportRequest request{.output = options.report,
                              .checkpoint = options.path,
                              .reference = options.reference,
                              .title = display_name(measured),
                              .layer = options.layer,
                              .act = parse_dtype(options.act).value_or(DType::f32)};
  if (Status written = write_report(request, *benchmark, threads.executor()); !written.ok()) return written;
  return Outcome::ok;
}

}  // namespace

std::string benchmark_text(const Benchmark& benchmark, bool colour) {
  using enum Table::Align;
  Table table({{"layer"},
               {"M", right},
               {"N", right},
               {"K", right},
               {.title = "scheme", .fold = true},
               {.title = "kernel", .fold = true},
               {"median µs", right},
               {"GB/s", right},
               {"GFLOP/s", right},
               {"bound"},
               {"of roofline", right},
               {"vs openblas_f32", right}});
  bool baseline = false;
  for (const BenchResult& r : benchmark.results) {
    const auto blas = r.baselines.find("openblas_f32");
    baseline = baseline || blas != r.baselines.end();
    const std::string speedup = blas == r.baselines.end() ? "" : fmt::format("{:.2f}×", blas->second / r.median_us);
    table.add({printable(r.name), std::to_string(r.m), std::to_string(r.n), std::to_string(r.k), r.scheme, r.kernel,
               fmt::format("{:.1f}", r.median_us), fmt::format("{:.2f}", r.gbytes_per_s), fmt::format("{:.1f}", r.gflops),
               r.memory_bound ? "memory" : "compute", fmt::format("{:.0f} %", r.roofline_percent), speedup});
  }
  std::string text = table.render(colour);
  text += fmt::format("roofline, measured: {:.1f} GB/s reads, {:.0f} GFLOP/s f32, {}; weights cold, medians\n",
                      benchmark.roofline.read_gbytes_per_s, benchmark.roofline.f32_gflops,
                      counted(static_cast<std::size_t>(benchmark.roofline.threads), "thread"));
  if (baseline)
    text += fmt::format("baseline: {}, the same layer in f32\n", Blas::load(benchmark.roofline.threads)->description());
  return text;
}

Json benchmark_json(const Benchmark& benchmark) {
  const DeviceInfo& device = this_device();
  Json results = Json::array();
  for (const BenchResult& r : benchmark.results) {
    results.push_back({{"name", r.name},
                       {"m", r.m},
                       {"n", r.n},
                       {"k", r.k},
                       {"scheme", r.scheme},
                       {"act", r.act},
                       {"backend", r.backend},
                       {"kernel", r.kernel},
                       {"layout", r.layout},
                       {"modules", r.modules.size()},
                       {"median_us", r.median_us},
                       {"samples", r.samples},
                       {"gbytes_per_s", r.gbytes_per_s},
                       {"gflops", r.gflops},
                       {"bound", r.memory_bound ? "memory" : "compute"},
                       {"roofline_percent", r.roofline_percent},
                       {"baselines", Json(r.baselines)}});
  }
  return {{"schema", 1},
          {"device",
           {{"cpu", device.cpu_name},
            {"isa", name(device.isa)},
            {"cores", device.cores},
            {"threads", benchmark.roofline.threads},
            {"l1d_bytes", device.l1d_bytes},
            {"l2_bytes", device.l2_bytes},
            {"l3_bytes", device.l3_bytes},
            {"memory_bytes", device.memory_bytes},
            {"read_gbytes_per_s", benchmark.roofline.read_gbytes_per_s},
            {"f32_gflops", benchmark.roofline.f32_gflops}}},
          {"version", NIBBLE_VERSION},
          {"commit", benchmark.commit},
          {"date", benchmark.date},
          {"results", results}};
}

void add_bench(CLI::App& app, Action& action) {
  CLI::App* command = add_command(app, "bench", "Measure layers against the roofline of this machine; compare two results",
                                  "  nibble bench model/ -M 1,16,256 --json now.json --report now.html\n"
                                  "  nibble bench --shapes bench/shapes/llama3-8b.txt --scheme u4zg128\n"
                                  "  nibble bench --compare before.json now.json --fail-under 0.9");
  auto options = std::make_shared<Options>();
  const auto positive = between(1e-9, 1e9);
  CLI::Option* path = command->add_option("PATH", options->path, "Checkpoint whose layers to measure, each distinct shape once");
  CLI::Option* shapes = command->add_option("--shapes", options->shapes, "Measure the layers of this file: lines of [M] N K NAME")
                            ->type_name("FILE");
  add_m_list(*command, options->m, "Rows of activations");
  command->add_option("--scheme", options->scheme, "With --shapes: scheme of the weights")
      ->type_name("NAME")
      ->needs(shapes)
      ->capture_default_str();
  add_act(*command, options->act);
  CLI::Option* kernel = add_kernel(*command, options->kernel);
  command->add_flag("--all-kernels", options->all_kernels, "Measure every kernel that can run, not only the one chosen")
      ->excludes(kernel);
  command->add_flag("--no-baselines", options->no_baselines, "Leave out other libraries");
  add_threads(*command, options->threads);
  command->add_option("--layer", options->layer, "Only layers whose name matches this regular expression")->type_name("REGEX");
  command->add_option("--min-time", options->min_seconds, "Seconds to spend at least on each measurement")
      ->check(positive)
      ->type_name("S")
      ->capture_default_str();
  command->add_option("--json", options->json, "Write the results to this file")->type_name("FILE");
  CLI::Option* report =
      command->add_option("--report", options->report, "Write a page with pictures: inspection, verification, results")
          ->type_name("FILE");
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
                             ->excludes(shapes);
  command->add_option("--fail-under", options->fail_under, "With --compare: exit with 1 when any speed-up is below this")
      ->check(positive)
      ->type_name("RATIO")
      ->needs(compare);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::tools
