// Benchmark results as a document: written by `bench`, read by `bench --compare`, shown by the report.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/block.hpp"
#include "bench/core.hpp"
#include "bench/moe.hpp"
#include "commands/commands.hpp"
#include "nibble/nibble.hpp"
#include "terminal/output.hpp"

namespace nibble::cli {

struct Benchmark {
  Roofline roofline;           // the best of all probes; each result also has the ceilings of its rounds
  std::optional<GpuInfo> gpu;  // if the GPU was measured, not the CPU
  std::string baseline;        // the other library, or why there is none; "" when it was left out
  std::string commit, date, accumulation = "fast";
  std::vector<BenchResult> results;
  std::optional<Regret> regret;            // when all kernels were measured
  std::vector<std::string> left_out = {};  // layers, or their activation types, that no kernel supports, with the reasons
};

/// The layers of a checkpoint, each distinct (N, K, scheme, bias, act-order) once and on its real weights; the name says how many modules
/// are equal. The cases read from `checkpoint`, which must outlive them.
Result<std::vector<BenchCase>> cases_from_checkpoint(const Checkpoint& checkpoint, const std::string& layer,
                                                     const AskedActivations& asked, std::span<const std::int64_t> m_list);
/// The lines of a shape file in each of the schemes, with random codes and scales. A line that gives M overrides `m_list`. `prescale`: each
/// again with a prescale.
Result<std::vector<BenchCase>> cases_from_shapes(const std::filesystem::path& file, const std::string& layer,
                                                 std::span<const std::string> schemes, std::span<const std::int64_t> m_list,
                                                 bool prescale = false);

/// A decoder's block of that shape in each of the schemes, with random codes and scales.
Result<std::vector<BlockCase>> cases_from_block(const BlockShape& shape, std::span<const std::string> schemes,
                                                std::span<const std::int64_t> m_list);

/// A layer of experts of that shape in each of the schemes, likewise. Errors: invalid_argument for sizes that contradict each other or a
/// routing.
Result<std::vector<MoeCase>> cases_from_moe(const MoeShape& shape, std::span<const Routing> routings,
                                            std::span<const std::string> schemes, std::span<const std::int64_t> m_list);

/// The lines of a shape file of convolutions, likewise. Schemes without activations get `quantize`; lines without B run with each of
/// `batches`.
struct ConvCasesSpec {
  std::filesystem::path file;
  std::string layer;
  std::vector<std::string> schemes;
  ActScheme act_scheme = {};
  std::vector<std::int64_t> batches = {1};
  ImageLayout input = ImageLayout::nchw, output = ImageLayout::nchw;
};
Result<std::vector<BenchCase>> cases_from_conv_shapes(const ConvCasesSpec& spec);

std::string benchmark_text(const Benchmark& benchmark, bool colour);
Json benchmark_json(const Benchmark& benchmark);

struct Comparison {  // NOLINT(bugprone-exception-escape): a Json takes memory to be destroyed
  std::string text;
  Json json;
  double worst = 0;  // the smallest ratio of old to new time; above 1 is faster
};
/// Matches the results of two JSON files by layer, M, scheme, type and backend, and by kernel where a file has several.
Result<Comparison> compare_benchmarks(const std::filesystem::path& before, const std::filesystem::path& after, bool colour);

}  // namespace nibble::cli
