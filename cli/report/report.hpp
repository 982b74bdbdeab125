// The HTML report: one self-contained page about a checkpoint, for people.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "nibble/checkpoint.hpp"
#include "nibble/device.hpp"
#include "nibble/quantize.hpp"
#include "nibble/verify.hpp"

namespace nibble::cli {

/// One layer run with M rows of activations; weights cold, the median of many runs.
struct ReportTiming {
  std::int64_t m = 1;
  double median_us = 0;
  double gbytes_per_s = 0;                     // weights, activations and outputs moved
  double gflops = 0;                           // 2·M·N·K
  Ceiling ceiling = Ceiling::read;             // what limits this shape
  Ceiling peak = Ceiling::f32;                 // the peak it is compared with
  double roofline_percent = 0;                 // of what the ceiling allows
  std::map<std::string, double> baselines_us;  // the same product by other libraries: "OpenBLAS f32" → µs
};

struct ReportLayer {
  std::string name;
  std::int64_t n = 0, k = 0;
  std::string scheme;
  std::string mode;  // distinguishes modes of the same layer: "u4b8g128 × bf16"; empty when there is only one
  double bits_per_weight = 0;
  std::string kernel;
  std::vector<Note> notes;
  std::optional<QuantError> error;  // against the original weights, where they are known
  std::optional<VerifyReport> verify;
  std::vector<ReportTiming> timings;
};

/// Missing values (0, "", empty, nullopt) are left out of the page.
struct ReportData {
  std::string title;
  std::string date;
  std::string version, commit;  // of nibble
  std::string checkpoint;       // path
  std::vector<std::string> formats;
  std::int64_t parameters = 0;
  std::uint64_t bytes_before = 0, bytes_after = 0;  // before: the same tensors unquantized
  double bits_per_weight = 0;
  DeviceInfo device;
  Roofline roofline;
  std::vector<Note> notes;  // on the checkpoint as a whole
  std::vector<ReportLayer> layers;
};

std::string render_report(const ReportData& data);

}  // namespace nibble::cli
