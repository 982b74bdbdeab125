// Merges the results of inspect, verify and bench for each layer into the data of one page.
#include "commands/report_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "commands/commands.hpp"
#include "commands/inspect.hpp"
#include "commands/verify.hpp"
#include "report/report.hpp"

namespace nibble::cli {
namespace {

ReportTiming timing_of(const BenchResult& result) {
  return {.m = result.m,
          .median_us = result.median_us,
          .gbytes_per_s = result.gbytes_per_s,
          .gflops = result.gflops,
          .ceiling = result.memory_bound ? Ceiling::read : result.peak,
          .peak = result.peak,
          .roofline_percent = result.roofline_percent,
          .baselines_us = result.baselines};
}

// Of several kernels for one M, the page shows the fastest.
void add_timing(ReportLayer& layer, const BenchResult& result) {
  for (ReportTiming& known : layer.timings) {
    if (known.m != result.m) continue;
    if (result.median_us < known.median_us) known = timing_of(result);
    return;
  }
  layer.timings.push_back(timing_of(result));
  layer.kernel = result.kernel;
}

// Layers of a shape file: only what was measured is known.
std::vector<ReportLayer> layers_from_results(const Benchmark& benchmark) {
  const auto mode_of = [](const BenchResult& result) { return result.scheme + " × " + result.a_dtype; };
  std::set<std::string> modes;
  for (const BenchResult& result : benchmark.results) modes.insert(mode_of(result));
  std::vector<ReportLayer> layers;
  for (const BenchResult& result : benchmark.results) {
    const std::string mode = modes.size() > 1 ? mode_of(result) : "";
    auto at = std::find_if(layers.begin(), layers.end(), [&](const ReportLayer& layer) {
      return layer.name == result.name && layer.n == result.n && layer.k == result.k && layer.mode == mode;
    });
    if (at == layers.end()) {
      at = layers.emplace(layers.end());
      at->name = result.name;
      at->n = result.n;
      at->k = result.k;
      at->scheme = result.scheme;
      at->mode = mode;
    }
    add_timing(*at, result);
  }
  return layers;
}

// Layers of a checkpoint: every module, with the timings of its shape.
std::vector<ReportLayer> layers_from_inspection(const Inspection& inspection, const std::vector<VerifiedLayer>& verified,
                                                const Benchmark& benchmark, const AskedActivations& quantize) {
  std::vector<ReportLayer> layers;
  for (const InspectedModule& found : inspection.modules) {
    ReportLayer& layer = layers.emplace_back();
    layer.name = found.module.name;
    layer.n = found.module.n;
    layer.k = found.module.k;
    layer.scheme = Scheme{found.module.scheme, activations_for(found.module, quantize)}.name();
    layer.bits_per_weight = found.bits_per_weight;
    layer.notes = found.notes;
    layer.error = found.error;
    for (const VerifiedLayer& check : verified) {
      if (check.name == layer.name) layer.verify = check.report;
    }
    for (const BenchResult& result : benchmark.results) {
      if (std::find(result.modules.begin(), result.modules.end(), layer.name) != result.modules.end()) add_timing(layer, result);
    }
  }
  return layers;
}

Status add_checkpoint(const ReportRequest& request, const Benchmark& benchmark, Executor& executor, ReportData& data) {
  const auto inspection =
      inspect_checkpoint({.path = request.checkpoint, .reference = request.reference, .layer = request.layer});
  if (!inspection.ok()) return inspection.status();
  const auto checkpoint = Checkpoint::open(request.checkpoint);
  if (!checkpoint.ok()) return checkpoint.status();
  const auto layer = compile_pattern("--layer", request.layer);
  if (!layer.ok()) return layer.status();
  VerifySpec spec;
  spec.linear.a_dtype = spec.linear.epilogue.out = request.a_dtype;
  spec.added_error = true;
  const std::int64_t one_row[] = {1};
  const auto verified = verify_checkpoint(*checkpoint, *layer, one_row, spec, request.act_scheme, executor);
  if (!verified.ok()) return verified.status();

  std::set<std::string> formats;
  for (const InspectedModule& found : inspection->modules) formats.insert(found.module.format);
  data.formats.assign(formats.begin(), formats.end());
  data.checkpoint = request.checkpoint.string();
  data.parameters = inspection->weights();
  data.bytes_before = 2 * static_cast<std::uint64_t>(data.parameters);  // as f16 or bf16
  data.bytes_after = inspection->quantized_bytes;
  data.bits_per_weight = inspection->mean_bits();
  data.notes = inspection->notes;
  data.layers = layers_from_inspection(*inspection, *verified, benchmark, request.act_scheme);
  return {};
}

}  // namespace

Status write_report(const ReportRequest& request, const Benchmark& benchmark, Executor& executor) {
  ReportData data;
  data.title = request.title;
  data.date = benchmark.date;
  data.version = NIBBLE_VERSION;
  data.commit = benchmark.commit;
  data.device = this_device();
  data.roofline = benchmark.roofline;
  if (request.checkpoint.empty()) {
    data.layers = layers_from_results(benchmark);
  } else if (Status added = add_checkpoint(request, benchmark, executor, data); !added.ok()) {
    return added;
  }
  return write_file(request.output, render_report(data));
}

}  // namespace nibble::cli
