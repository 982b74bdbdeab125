// nibble doctor: the capabilities of this machine and this build.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>

#include "bench/blas.hpp"
#include "bench/dnnl.hpp"
#include "commands/commands.hpp"
#include "commands/matrix.hpp"
#include "terminal/output.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Options {
  bool kernels = false, layouts = false, formats = false, matrix = false, measure = false;
  std::string json;
  int threads = 0;
};

// Other libraries that bench compares with.
struct Baselines {
  const Blas* blas;
  const Dnnl* dnnl;

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    if (blas != nullptr) all.push_back(blas->description());
    if (dnnl != nullptr) all.push_back(dnnl->description());
    return all;
  }
};

std::string kernels_text(bool colour) {
  Table table({{"kernel"}, {"operation"}, {"backend"}, {"needs"}, {"layout"}, {"here"}, {"summary"}});
  for (const KernelInfo& k : kernels()) {
    table.add({std::string(k.name), std::string(name(k.op)), std::string(name(k.backend)), std::string(name(k.isa)),
               std::string(k.layout), runs_here(k.isa).ok() ? Cell("yes", Style::good) : Cell("no", Style::warn),
               std::string(k.summary)});
  }
  return table.render(colour);
}

std::string formats_text(bool colour) {
  Table table({{"format"}, {"writes"}, {"summary"}});
  for (const FormatInfo& f : formats()) table.add({std::string(f.name), f.can_write ? "yes" : "no", std::string(f.summary)});
  return table.render(colour);
}

std::string layouts_text(bool colour) {
  std::string text;
  for (const LayoutInfo& layout : layouts()) {
    text += styled(layout.name, Style::bold, colour) + "\n";
    std::string_view rest = layout.drawing;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      text += end == 0 ? "\n" : fmt::format("  {}\n", rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  return text;
}

// The ceilings of this machine: the best measurement and, with --measure, the variation.
struct Ceilings {
  Roofline best;
  std::array<std::vector<double>, kAllCeilings.size()> samples;  // sorted; empty without --measure

  const std::vector<double>& of(Ceiling ceiling) const { return samples[static_cast<std::size_t>(ceiling)]; }
};

// Probes as short as a benchmark's, interleaved for some seconds.
Ceilings measure_ceilings(Executor& executor, bool repeatedly) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kDuration{4};
  Ceilings ceilings;
  RooflineProbe probe(executor);
  ceilings.best = probe.roofline();
  if (!repeatedly) return ceilings;
  const auto end = Clock::now() + kDuration;
  do {
    for (Ceiling ceiling : kAllCeilings) {
      const double value = probe.measure(ceiling, ceiling == Ceiling::read ? 0.02 : 0.005);
      ceilings.samples[static_cast<std::size_t>(ceiling)].push_back(value);
      ceilings.best[ceiling] = std::max(ceilings.best[ceiling], value);
    }
  } while (Clock::now() < end);
  for (std::vector<double>& samples : ceilings.samples) std::sort(samples.begin(), samples.end());
  return ceilings;
}

// "61.0 GB/s"; with --measure "median 60.2 GB/s, from 41.5 to 61.0 in 132 probes".
std::string ceiling_text(const Ceilings& ceilings, Ceiling ceiling) {
  if (!(ceilings.best[ceiling] > 0)) return "none: no instruction for it";
  const std::string_view unit = ceiling == Ceiling::read ? "GB/s" : ceiling == Ceiling::int8 ? "Gop/s" : "GFLOP/s";
  const auto text = [&](double value) { return fmt::format("{:.{}f}", value, ceiling == Ceiling::read ? 1 : 0); };
  const std::vector<double>& samples = ceilings.of(ceiling);
  if (samples.empty()) return fmt::format("{} {}", text(ceilings.best[ceiling]), unit);
  return fmt::format("median {} {}, from {} to {} in {}", text(samples[samples.size() / 2]), unit, text(samples.front()),
                     text(samples.back()), counted(samples.size(), "probe"));
}

// GB/s, by measurement.
Result<double> gpu_reads() {
  auto probe = GpuReadProbe::make();
  return probe.ok() ? probe->measure() : probe.status();
}

// "NVIDIA H200, compute capability 9.0, 132 SMs, ...", or why there is none.
std::string gpu_text() {
  const auto gpu = this_gpu();
  if (!gpu.ok()) return "none: " + gpu.status().message();
  const auto reads = gpu_reads();
  return fmt::format("{}, compute capability {}.{}, {} SMs, L2 {}, memory {}, reads {:.0f} GB/s estimated, {}", gpu->name,
                     gpu->compute_capability / 10, gpu->compute_capability % 10, gpu->sms, human_binary(gpu->l2_bytes),
                     human_binary(gpu->memory_bytes), gpu->read_gbytes_per_s,
                     reads.ok() ? fmt::format("{:.0f} measured", *reads) : reads.status().message());
}

Json gpu_json() {
  const auto gpu = this_gpu();
  if (!gpu.ok()) return {{"gpu", nullptr}, {"reason", gpu.status().message()}};
  Json json = gpu_description(*gpu);
  if (const auto reads = gpu_reads(); reads.ok()) json["read_gbytes_per_s"] = *reads;
  return json;
}

std::string machine_text(const Ceilings& ceilings, const Baselines& found) {
  const DeviceInfo& d = this_device();
  const auto size = [](std::int64_t bytes) { return bytes > 0 ? human_binary(bytes) : std::string("unknown"); };
  std::size_t usable = 0;
  const auto all = kernels();
  for (const KernelInfo& kernel : all) usable += runs_here(kernel.isa).ok() ? 1 : 0;
  Table table({{"nibble"}, {NIBBLE_VERSION " at " NIBBLE_BUILD_COMMIT}});
  table.add({"compiler", NIBBLE_BUILD_COMPILER});
  table.add({"cpu", d.cpu_name});
  table.add({"instruction set", std::string(name(d.isa))});
  table.add({"cores", std::to_string(d.cores)});
  table.add({"threads", std::to_string(ceilings.best.threads)});
  table.add({"caches", fmt::format("L1d {}, L2 {} per core, L3 {}", size(d.l1d_bytes), size(d.l2_bytes), size(d.l3_bytes))});
  table.add({"memory", size(d.memory_bytes)});
  table.add({"reads, measured", ceiling_text(ceilings, Ceiling::read)});
  table.add({"f32 peak, measured", ceiling_text(ceilings, Ceiling::f32)});
  table.add({"bf16 peak, measured", ceiling_text(ceilings, Ceiling::bf16)});
  table.add({"int8 peak, measured", ceiling_text(ceilings, Ceiling::int8)});
  table.add({"kernels", fmt::format("{} of {} can run here (--kernels)", usable, all.size())});
  table.add({"layouts", fmt::format("{} (--layouts)", layouts().size())});
  std::string names;
  for (const FormatInfo& format : formats())
    if (format.name != "unsupported") names += fmt::format("{}{}", names.empty() ? "" : ", ", format.name);
  table.add({"formats", names + " (--formats)"});
  table.add({"GPU", gpu_text()});
  table.add({"baselines", found.blas == nullptr && found.dnnl == nullptr
                              ? "none: neither OpenBLAS (libopenblas0-pthread) nor oneDNN (libdnnl2) is installed"
                              : fmt::format("{}", fmt::join(found.names(), "; "))});
  return table.render(wants_colour(stdout));
}

Json list_json(const Options& options, const SupportMatrix& matrix) {
  Json json = {{"schema", 1}};
  for (const KernelInfo& k : kernels()) {
    if (options.kernels) {
      json["kernels"].push_back({{"name", k.name},
                                 {"op", name(k.op)},
                                 {"backend", name(k.backend)},
                                 {"isa", name(k.isa)},
                                 {"layout", k.layout},
                                 {"runs_here", runs_here(k.isa).ok()},
                                 {"summary", k.summary}});
    }
  }
  for (const LayoutInfo& l : layouts()) {
    if (options.layouts) json["layouts"].push_back({{"name", l.name}, {"drawing", l.drawing}});
  }
  for (const FormatInfo& f : formats()) {
    if (options.formats) json["formats"].push_back({{"name", f.name}, {"summary", f.summary}, {"can_write", f.can_write}});
  }
  if (options.matrix) json["matrix"] = matrix_json(matrix);
  return json;
}

Json machine_json(const Ceilings& ceilings, const Baselines& found) {
  const DeviceInfo& d = this_device();
  const Roofline& best = ceilings.best;
  Json json = {{"version", NIBBLE_VERSION},
               {"commit", NIBBLE_BUILD_COMMIT},
               {"compiler", NIBBLE_BUILD_COMPILER},
               {"cpu", d.cpu_name},
               {"isa", name(d.isa)},
               {"cores", d.cores},
               {"threads", best.threads},
               {"l1d_bytes", d.l1d_bytes},
               {"l2_bytes", d.l2_bytes},
               {"l3_bytes", d.l3_bytes},
               {"memory_bytes", d.memory_bytes},
               {"read_gbytes_per_s", best.read_gbytes_per_s},
               {"f32_gflops", best.f32_gflops},
               {"bf16_gflops", best.bf16_gflops},
               {"int8_gops", best.int8_gops},
               {"cuda", gpu_json()},
               {"openblas", found.blas == nullptr ? Json(nullptr) : Json(found.blas->description())},
               {"onednn", found.dnnl == nullptr ? Json(nullptr) : Json(found.dnnl->description())}};
  for (Ceiling ceiling : kAllCeilings) {
    const std::vector<double>& samples = ceilings.of(ceiling);
    if (samples.empty()) continue;
    json["probes"][std::string(name(ceiling))] = {
        {"median", samples[samples.size() / 2]}, {"min", samples.front()}, {"max", samples.back()}, {"count", samples.size()}};
  }
  return json;
}

Result<Outcome> run(const Options& options) {
  const bool lists = options.kernels || options.layouts || options.formats || options.matrix;
  const bool colour = wants_colour(stdout);
  SupportMatrix matrix;
  if (options.matrix) {
    auto asked = support_matrix();
    if (!asked.ok()) return asked.status();
    matrix = std::move(*asked);
  }
  const auto list_text = [&] {
    return (options.kernels ? kernels_text(colour) : "") + (options.layouts ? layouts_text(colour) : "") +
           (options.formats ? formats_text(colour) : "") + (options.matrix ? matrix_text(matrix, colour) : "");
  };
  if (lists) {
    if (Status written = print_result(options.json, list_text, [&] { return list_json(options, matrix); }); !written.ok())
      return written;
    return Outcome::ok;
  }
  Threads threads(options.threads);
  const Ceilings ceilings = measure_ceilings(threads.executor(), options.measure);
  const Baselines found{Blas::load(ceilings.best.threads), Dnnl::load(ceilings.best.threads)};
  const auto document = [&] {
    Json json = {{"schema", 1}};
    json.update(machine_json(ceilings, found));
    return json;
  };
  if (Status written = print_result(
          options.json, [&] { return machine_text(ceilings, found); }, document);
      !written.ok())
    return written;
  return Outcome::ok;
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  CLI::App* command =
      add_command(app, "doctor", "Show what this machine and this build can do",
                  "  nibble doctor\n  nibble doctor --measure\n  nibble doctor --kernels --json\n  nibble doctor --matrix");
  auto options = std::make_shared<Options>();
  CLI::Option* kernels = command->add_flag("--kernels", options->kernels, "List the kernels of this build");
  CLI::Option* layouts =
      command->add_flag("--layouts", options->layouts, "List the packed layouts, with a drawing of their bytes");
  CLI::Option* formats = command->add_flag("--formats", options->formats, "List the checkpoint formats");
  CLI::Option* matrix = command->add_flag(
      "--matrix", options->matrix,
      "Tell which weights run on which machines, for each operation: by a fast kernel, a generic one, or not, with the reason");
  command
      ->add_flag("--measure", options->measure,
                 "Repeat the measurement of the ceilings for some seconds: median and spread, for machines shared with others")
      ->excludes(kernels)
      ->excludes(layouts)
      ->excludes(formats)
      ->excludes(matrix);
  add_threads(*command, options->threads);
  add_json(*command, options->json);
  command->callback([options, &action] { action = [options] { return run(*options); }; });
}

}  // namespace nibble::cli
