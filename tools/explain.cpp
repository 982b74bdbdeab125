// A plan knows one packed weight; here its explanations for several layouts are put together.
#include "explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "table.hpp"

namespace nibble::tools {
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

Result<Explanation> explain(const PackedWeight& weight, const KernelQuestion& question, std::int64_t m_max) {
  LinearSpec spec{.act = question.act, .m_max = m_max, .epilogue = {}, .quantize = question.quantize};
  spec.epilogue.bias = weight.has_bias();
  spec.epilogue.out = question.act;
  PlanOptions options;
  options.machine = question.machine;
  const auto plan = Plan::linear(weight, spec, options);
  if (!plan.ok()) return plan.status();
  Explanation explanation = plan->explain();
  // What is wrong with a kernel of the other backend is not the layout.
  for (Explanation::Bucket& bucket : explanation.buckets) {
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

// The weight in every layout that a linear kernel of the backend reads: the chosen one first.
Result<std::vector<PackedWeight>> pack_in_all_layouts(const QuantTensor& q, const KernelQuestion& question) {
  PackOptions options;
  options.m_max = kMaxM;
  options.backend = question.backend;
  options.quantize = question.quantize;
  auto chosen = pack(q, options);
  if (!chosen.ok()) return chosen.status();
  std::vector<PackedWeight> packed = {*chosen};
  std::set<std::string_view> done = {chosen->layout()};
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.op != Op::linear || on_gpu(kernel.backend) != on_gpu(question.backend) || !done.insert(kernel.layout).second)
      continue;
    options.layout = kernel.layout;
    if (auto other = pack(q, options); other.ok()) packed.push_back(*std::move(other));
  }
  return packed;
}

// The last bucket of the chosen layout for M up to `m`, with every other kernel judged on the layout it reads.
Result<Explanation::Bucket> bucket_at(std::span<const PackedWeight> packed, const KernelQuestion& question, std::int64_t m) {
  auto chosen = explain(packed.front(), question, m);
  if (!chosen.ok()) return chosen.status();
  Explanation::Bucket bucket = chosen->buckets.back();
  for (const PackedWeight& weight : packed.subspan(1)) {
    const auto other = explain(weight, question, m);
    if (!other.ok()) continue;
    for (const Explanation::Candidate& judged : other->buckets.back().candidates) {
      if (info_of(judged.kernel).layout != weight.layout()) continue;
      for (Explanation::Candidate& candidate : bucket.candidates) {
        if (candidate.kernel == judged.kernel) candidate = judged;
      }
    }
  }
  return bucket;
}

std::string m_range(const Explanation::Bucket& bucket) {
  return bucket.m_low == bucket.m_high ? fmt::format("{}", bucket.m_low) : fmt::format("{}–{}", bucket.m_low, bucket.m_high);
}

bool runs(const Explanation::Bucket& bucket, std::string_view kernel) {
  return std::find(bucket.steps.begin(), bucket.steps.end(), kernel) != bucket.steps.end();
}

std::string microseconds(double us) { return us < 1000 ? fmt::format("{:.3g}", us) : fmt::format("{:.0f}", us); }

// "instead of" for those that could run, "refused" with the reason for those that could not.
std::string others_text(const ExplainedShape& shape) {
  std::map<std::string_view, std::map<std::string, std::string>> refusals;  // kernel → reason → the first range of M
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
        refusals[candidate.kernel].try_emplace(candidate.refusal, m_range(bucket));
      }
    }
  }
  std::string text;
  for (std::string_view kernel : order) {
    if (slower.contains(kernel)) text += fmt::format("  {}: predicted {}\n", kernel, slower[kernel]);
    for (const auto& [reason, range] : refusals[kernel]) {
      const bool always = refusals[kernel].size() == 1 && !slower.contains(kernel);
      text += fmt::format("  {}: refused{}: {}\n", kernel, always ? "" : " for M " + range, reason);
    }
  }
  return text.empty() ? "" : "instead of\n" + text;
}

}  // namespace

Result<ExplainedShape> explain_shape(const QuantTensor& q, const KernelQuestion& question) {
  const auto packed = pack_in_all_layouts(q, question);
  if (!packed.ok()) return packed.status();
  const auto whole = explain(packed->front(), question, kMaxM);
  if (!whole.ok()) return whole.status();
  std::set<std::int64_t> ends(std::begin(kRoundM), std::end(kRoundM));
  for (const Explanation::Bucket& bucket : whole->buckets) ends.insert(bucket.m_high);

  ExplainedShape shape;
  shape.n = q.n;
  shape.k = q.k;
  shape.scheme = Scheme{q.scheme, question.quantize}.name();
  shape.act_order = !q.g_idx.empty();
  shape.bias = !q.bias.empty();
  shape.layout = packed->front().layout();
  std::int64_t low = 1;
  for (std::int64_t high : ends) {
    auto bucket = bucket_at(*packed, question, high);
    if (!bucket.ok()) return bucket.status();
    bucket->m_low = low;
    bucket->m_high = high;
    shape.explanation.buckets.push_back(*std::move(bucket));
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
  }
  return text + table.render(colour) + others_text(shape);
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
  }
  return {{"n", shape.n},           {"k", shape.k},
          {"scheme", shape.scheme}, {"act_order", shape.act_order},
          {"bias", shape.bias},     {"modules", shape.modules},
          {"layout", shape.layout}, {"buckets", buckets}};
}

}  // namespace nibble::tools
