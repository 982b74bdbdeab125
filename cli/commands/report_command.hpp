// From benchmark results to a report: inspects and verifies the checkpoint, gathers everything, writes the page.
#pragma once

#include <filesystem>
#include <string>

#include "commands/bench.hpp"

namespace nibble::cli {

struct ReportRequest {
  std::filesystem::path output;
  std::filesystem::path checkpoint;  // empty: the benchmark is of shapes, there is nothing to inspect
  std::filesystem::path reference;   // empty: no quantization error
  std::string title, layer;
  DType a_dtype = DType::f32;
  AskedActivations act_scheme = {};
};

Status write_report(const ReportRequest& request, const Benchmark& benchmark, Executor& executor);

}  // namespace nibble::cli
