// nibble bench --compare: two results of the same layers, side by side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "commands/bench.hpp"
#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

struct Row {
  std::string name, scheme, a_dtype, d_dtype, backend, calls, operation, kernel;
  std::int64_t m = 0, n = 0, k = 0;
  double median_us = 0;

  std::string layer_key() const {
    return fmt::format("{}\n{} {} {} {} {} {} {} {} {}", name, m, n, k, scheme, a_dtype, d_dtype, backend, calls, operation);
  }
};

// The sizes and the routing of a layer of experts; "" of other layers.
std::string moe_key(const Json& result) {
  const auto moe = result.find("moe");
  if (moe == result.end()) return "";
  std::string key = " experts";
  for (const char* field : {"experts", "top_k", "intermediate", "routing"}) key += " " + moe->at(field).dump();
  return key;
}

Result<std::vector<Row>> read_results(const std::filesystem::path& path) {
  std::string text;
  if (Status read = read_file(path, text); !read.ok()) return read;
  const auto corrupt = [&](const std::string& why) {
    return Status(StatusCode::corrupt_data, fmt::format("{} is not a benchmark result of schema 1: {}", path.string(), why));
  };
  try {
    const Json json = Json::parse(text, [](int depth, auto, const auto&) { return depth <= kMaxJsonDepth; });
    if (json.at("schema") != 1) return corrupt("schema is " + json.at("schema").dump());
    std::vector<Row> rows;
    for (const Json& r : json.at("results")) {
      const std::string a_dtype = r.at("a_dtype");
      const std::string d_dtype = r.value("d_dtype", a_dtype == "e4m3" ? "bf16" : a_dtype);  // older files do not say
      rows.push_back({r.at("name"), r.at("scheme"), a_dtype, d_dtype, r.at("backend"), r.value("calls", "back-to-back"),
                      r.value("operation", "linear") + (r.value("transposed", false) ? " transposed" : "") +
                          (r.value("glu", false) ? " glu" : "") + r.value("norm", "") +
                          (r.value("prescale", false) ? " prescale" : "") + (r.contains("block") ? " block" : "") + moe_key(r),
                      r.at("kernel"), r.at("m"), r.at("n"), r.at("k"), r.at("median_us")});
      if (!(rows.back().median_us > 0))
        return corrupt(fmt::format("median_us of {} is {}", rows.back().name, r.at("median_us").dump()));
    }
    return rows;
  } catch (const Json::exception& error) {
    return corrupt(error.what());
  }
}

// The result in `rows` that measured the same as `wanted`: the same kernel if it is there, else the only one for that layer.
const Row* find_match(const std::vector<Row>& rows, const Row& wanted, bool only_one) {
  const Row* match = nullptr;
  std::size_t same_layer = 0;
  for (const Row& row : rows) {
    if (row.layer_key() != wanted.layer_key()) continue;
    if (row.kernel == wanted.kernel) return &row;
    ++same_layer;
    match = &row;
  }
  return only_one && same_layer == 1 ? match : nullptr;
}

}  // namespace

Result<Comparison> compare_benchmarks(const std::filesystem::path& before, const std::filesystem::path& after, bool colour) {
  const auto old_rows = read_results(before);
  if (!old_rows.ok()) return old_rows.status();
  const auto new_rows = read_results(after);
  if (!new_rows.ok()) return new_rows.status();
  std::map<std::string, int> per_layer;
  for (const Row& row : *old_rows) ++per_layer[row.layer_key()];

  using enum Table::Align;
  Table table({{"layer"},
               {"M", right},
               {.title = "scheme", .fold = true},
               {.title = "activations", .fold = true},
               {.title = "kernel", .fold = true},
               {"before µs", right},
               {"after µs", right},
               {"speed-up", right}});
  Comparison comparison;
  comparison.worst = INFINITY;
  double sum_of_logs = 0;
  Json results = Json::array(), unmatched = Json::array();
  std::string missing;
  for (const Row& row : *old_rows) {
    const Row* now = find_match(*new_rows, row, per_layer[row.layer_key()] == 1);
    if (now == nullptr) {
      missing += fmt::format("not in {}: {}, M={}, {} to {}, {}, {}\n", after.string(), printable(row.name), row.m, row.scheme,
                             row.d_dtype, row.kernel, row.calls);
      unmatched.push_back({{"name", row.name},
                           {"m", row.m},
                           {"scheme", row.scheme},
                           {"a_dtype", row.a_dtype},
                           {"calls", row.calls},
                           {"kernel", row.kernel}});
      continue;
    }
    const double ratio = row.median_us / now->median_us;
    comparison.worst = std::min(comparison.worst, ratio);
    sum_of_logs += std::log(ratio);
    results.push_back({{"name", row.name},
                       {"m", row.m},
                       {"n", row.n},
                       {"k", row.k},
                       {"scheme", row.scheme},
                       {"a_dtype", row.a_dtype},
                       {"calls", row.calls},
                       {"kernel_before", row.kernel},
                       {"kernel", now->kernel},
                       {"before_us", row.median_us},
                       {"after_us", now->median_us},
                       {"speed_up", ratio}});
    const std::string kernel = row.kernel == now->kernel ? row.kernel : row.kernel + " → " + now->kernel;
    table.add({printable(row.name) + (row.calls == "back-to-back" ? "" : fmt::format(" ({})", row.calls)),
               std::to_string(row.m),
               row.scheme,
               row.a_dtype,
               kernel,
               fmt::format("{:.1f}", row.median_us),
               fmt::format("{:.1f}", now->median_us),
               {fmt::format("{:.3f}", ratio), ratio < 1 ? Style::warn : Style::good}});
  }
  if (results.empty()) {
    return Status(StatusCode::invalid_argument,
                  fmt::format("{} and {} have no result in common", before.string(), after.string()));
  }
  const double mean = std::exp(sum_of_logs / static_cast<double>(results.size()));
  comparison.text = table.render(colour) + missing +
                    fmt::format("{} compared: geometric mean of the speed-ups {:.3f}, worst {:.3f}\n",
                                counted(results.size(), "result"), mean, comparison.worst);
  comparison.json = {{"schema", 1},
                     {"before", before.string()},
                     {"after", after.string()},
                     {"geometric_mean", mean},
                     {"worst", comparison.worst},
                     {"results", results},
                     {"unmatched", unmatched}};
  return comparison;
}

}  // namespace nibble::cli
