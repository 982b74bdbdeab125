// Merges the explanations of a layer at a few round values of M, and of its modes.
#include "commands/explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "terminal/table.hpp"

namespace nibble::cli {
namespace {

constexpr std::int64_t kRoundM[] = {1, 16, 256, 1024};
constexpr std::int64_t kMaxM = 1024;

KernelInfo info_of(std::string_view kernel) {
  for (const KernelInfo& info : kernels()) {
    if (info.name == kernel) return info;
  }
  return {};
}

bool on_gpu(Backend backend) { return backend == Backend::cuda; }

Result<Explanation> ask(const WeightDesc& weight, const KernelQuestion& question, std::int64_t m_max) {
  const LinearSpec spec{.a_dtype = question.a_dtype,
                        .m_max = m_max,
                        .epilogue = {.bias = question.bias, .out = question.a_dtype},
                        .act_scheme = question.act_scheme,
                        .accumulation = question.accumulation};
  auto explanation = question.gpu ? explain(weight, spec, *question.gpu)
                                  : explain(weight, spec, {.backend = question.backend}, {.machine = question.machine});
  if (!explanation.ok()) return explanation.status();
  // The reason against a kernel of the other backend is the backend, not the layout.
  for (Explanation::Bucket& bucket : explanation->buckets) {
    for (Explanation::Candidate& candidate : bucket.candidates) {
      const KernelInfo info = info_of(candidate.kernel);
      if (on_gpu(info.backend) == on_gpu(question.backend)) continue;
      const Status here = runs_here(info.isa);
      candidate.refusal = here.ok() ? fmt::format("runs on the {}: --backend {}", on_gpu(info.backend) ? "GPU" : "CPU",
                                                  on_gpu(info.backend) ? "cuda" : "cpu")
                                    : here.message();
    }
  }
  return explanation;
}

// Blocks of the weight's own groups where activations can have them, else of 128.
std::int32_t block_for(const WeightScheme& scheme) {
  const std::int32_t group = scheme.group.k;
  return group >= 32 && group <= 256 && group % 8 == 0 ? group : 128;
}

// The modes of this layer at a few round values of M: weight-only, quantized activations, and the dense layer at the roofline.
std::vector<ModeCost> costs_of_modes(const WeightDesc& weight, KernelQuestion question) {
  const GroupShape blocks = GroupShape::group(block_for(weight.scheme));
  const ActScheme modes[] = {{},
                             {DType::s8},
                             {DType::s8, GroupShape::channel(), ZeroKind::integer},
                             {DType::s8, blocks},
                             {DType::s8, blocks, ZeroKind::integer},
                             {DType::e4m3}};
  std::vector<ModeCost> costs;
  for (const ActScheme& mode : modes) {
    question.act_scheme = mode;
    const std::string name = Scheme{weight.scheme, mode}.name();
    ModeCost cost{mode.codes == DType::none ? "weight-only" : name.substr(0, name.find('_')), {}, {}};
    for (std::int64_t m : kRoundM) {
      const auto explanation = ask(weight, question, m);
      if (!explanation.ok() || info_of(explanation->buckets.back().steps.back()).backend == Backend::reference) continue;
      cost.m.push_back(m);
      cost.us.push_back(explanation->buckets.back().cost_us);
    }
    if (!cost.m.empty()) costs.push_back(std::move(cost));
  }
  if (question.machine) {
    ModeCost dense{"dense f32", {}, {}};
    for (std::int64_t m : kRoundM) {
      const double weights = static_cast<double>(weight.n) * static_cast<double>(weight.k);
      const double read_us = 4e-3 * weights / question.machine->read_gbytes_per_s;
      const double compute_us = 2e-3 * static_cast<double>(m) * weights / question.machine->f32_gflops;
      dense.m.push_back(m);
      dense.us.push_back(std::max(read_us, compute_us));
    }
    costs.push_back(std::move(dense));
  }
  return costs;
}

struct Range {
  std::int64_t low, high;
};
std::string text_of(const Range& m) { return m.low == m.high ? fmt::format("{}", m.low) : fmt::format("{}–{}", m.low, m.high); }
std::string m_range(const Explanation::Bucket& bucket) { return text_of({bucket.m_low, bucket.m_high}); }

bool runs(const Explanation::Bucket& bucket, std::string_view kernel) {
  return std::find(bucket.steps.begin(), bucket.steps.end(), kernel) != bucket.steps.end();
}

std::string microseconds(double us) { return us < 1000 ? fmt::format("{:.3g}", us) : fmt::format("{:.0f}", us); }

// A row per mode: predicted µs, and the speed-up over weight-only.
std::string modes_text(const ExplainedShape& shape, bool colour) {
  using enum Table::Align;
  if (shape.modes.size() < 2) return "";
  std::vector<Table::Column> columns{{"predicted µs"}};
  for (std::int64_t m : shape.modes.front().m) columns.push_back({fmt::format("M={}", m), right});
  Table table(std::move(columns));
  for (const ModeCost& mode : shape.modes) {
    std::vector<Cell> row{mode.mode};
    for (std::size_t i = 0; i < mode.us.size(); ++i) {
      const double ratio = shape.modes.front().us[i] / mode.us[i];
      row.emplace_back(microseconds(mode.us[i]) + (&mode == &shape.modes.front() ? "" : fmt::format(" · {:.2f}×", ratio)));
    }
    table.add(std::move(row));
  }
  return table.render(colour);
}

// "instead of" for those that could run, "refused" with the reason for those that could not: once for all kernels that share it, such as
// those of a missing GPU.
std::string others_text(const ExplainedShape& shape) {
  std::map<std::string_view, std::map<std::string, std::vector<Range>>> refusals;  // kernel → reason → for which M
  std::map<std::string_view, std::string> slower;
  std::vector<std::string_view> order;
  for (const Explanation::Bucket& bucket : shape.explanation.buckets) {
    for (const Explanation::Candidate& candidate : bucket.candidates) {
      if (runs(bucket, candidate.kernel)) continue;
      if (std::find(order.begin(), order.end(), candidate.kernel) == order.end()) order.push_back(candidate.kernel);
      if (candidate.accepted) {
        std::string& list = slower[candidate.kernel];
        list += fmt::format("{}{} µs at M={}", list.empty() ? "" : ", ", microseconds(candidate.cost_us), bucket.m_high);
      } else {
        std::vector<Range>& ranges = refusals[candidate.kernel][candidate.refusal];
        if (!ranges.empty() && ranges.back().high + 1 == bucket.m_low)
          ranges.back().high = bucket.m_high;
        else
          ranges.push_back({bucket.m_low, bucket.m_high});
      }
    }
  }
  const auto always = [&](std::string_view kernel) { return refusals[kernel].size() == 1 && !slower.contains(kernel); };
  std::map<std::string, int> shared;  // a reason → the number of kernels that have only this one
  for (std::string_view kernel : order)
    if (always(kernel)) ++shared[refusals[kernel].begin()->first];
  std::string text;
  for (std::string_view kernel : order) {
    if (slower.contains(kernel)) text += fmt::format("  {}: predicted {}\n", kernel, slower[kernel]);
    for (const auto& [reason, ranges] : refusals[kernel]) {
      const int kernels = always(kernel) ? std::exchange(shared[reason], 0) : 1;
      if (kernels == 0) continue;  // reported already
      std::string where;
      for (const Range& range : ranges) where += (where.empty() ? " for M " : ", ") + text_of(range);
      text += fmt::format("  {}{}: refused{}: {}\n", kernel, kernels == 1 ? "" : fmt::format(" and {} more", kernels - 1),
                          always(kernel) ? "" : where, reason);
    }
  }
  return text.empty() ? "" : "instead of\n" + text;
}

}  // namespace

Result<ExplainedShape> explain_shape(const WeightDesc& weight, const KernelQuestion& question) {
  const auto whole = ask(weight, question, kMaxM);
  if (!whole.ok()) return whole.status();
  std::set<std::int64_t> ends(std::begin(kRoundM), std::end(kRoundM));
  for (const Explanation::Bucket& bucket : whole->buckets) ends.insert(bucket.m_high);

  ExplainedShape shape;
  shape.n = weight.n;
  shape.k = weight.k;
  shape.scheme = Scheme{weight.scheme, question.act_scheme}.name();
  shape.act_order = weight.act_order;
  shape.bias = question.bias;
  shape.layout = whole->layout;
  shape.modes = costs_of_modes(weight, question);
  std::int64_t low = 1;
  for (std::int64_t high : ends) {
    auto explanation = ask(weight, question, high);
    if (!explanation.ok()) return explanation.status();
    Explanation::Bucket& bucket = explanation->buckets.back();
    bucket.m_low = low;
    bucket.m_high = high;
    shape.explanation.buckets.push_back(std::move(bucket));
    low = high + 1;
  }
  return shape;
}

std::string explained_text(const ExplainedShape& shape, bool colour) {
  using enum Table::Align;
  std::string text = styled(fmt::format("N={} K={} {}{}{}", shape.n, shape.k, shape.scheme, shape.act_order ? " act-order" : "",
                                        shape.bias ? " bias" : ""),
                            Style::bold, colour);
  text += fmt::format(", {}, packed as {}\n", counted(shape.modules, "module"), shape.layout);
  Table table({{"M", right}, {"predicted µs", right}, {"runs"}});
  for (const Explanation::Bucket& bucket : shape.explanation.buckets) {
    table.add({m_range(bucket), microseconds(bucket.cost_us), {fmt::format("{}", fmt::join(bucket.steps, " → ")), Style::good}});
    if (!bucket.unaligned.empty())
      table.add({"", "", {fmt::format("{}, if rows of A are not 16-byte aligned", bucket.unaligned)}});
  }
  return text + table.render(colour) + modes_text(shape, colour) + others_text(shape);
}

Json explained_json(const ExplainedShape& shape) {
  Json buckets = Json::array();
  for (const Explanation::Bucket& bucket : shape.explanation.buckets) {
    Json candidates = Json::array();
    for (const Explanation::Candidate& candidate : bucket.candidates) {
      Json json = {{"kernel", candidate.kernel}, {"accepted", candidate.accepted}};
      if (candidate.accepted) {
        json["predicted_us"] = candidate.cost_us;
      } else {
        json["refusal"] = candidate.refusal;
      }
      candidates.push_back(json);
    }
    buckets.push_back({{"m_low", bucket.m_low},
                       {"m_high", bucket.m_high},
                       {"steps", bucket.steps},
                       {"predicted_us", bucket.cost_us},
                       {"candidates", candidates}});
    if (!bucket.unaligned.empty()) buckets.back()["unaligned"] = bucket.unaligned;
  }
  Json modes = Json::array();
  for (const ModeCost& mode : shape.modes) modes.push_back({{"mode", mode.mode}, {"m", mode.m}, {"predicted_us", mode.us}});
  return {{"n", shape.n},           {"k", shape.k},
          {"scheme", shape.scheme}, {"act_order", shape.act_order},
          {"bias", shape.bias},     {"modules", shape.modules},
          {"layout", shape.layout}, {"buckets", buckets},
          {"modes", modes}};
}

}  // namespace nibble::cli
