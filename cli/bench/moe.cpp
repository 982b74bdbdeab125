// Calls follow one another, each with ids of its own, so that the experts of a call come from memory: the experts that many tokens have are
// others in each call. A layer that would fit into the caches has copies, which the calls use in rotation. Activations stay warm.
//
// Counted are the packed bytes of the experts that a call's tokens have, each once, and the operations of T · top_k pairs of token and expert.
#include "bench/moe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

namespace nibble::cli {
namespace {

constexpr std::size_t kLeastCalls = 4, kMostCalls = 256;

// Different weights among the experts, which are many and large; neighbours differ.
constexpr std::int64_t kWeights = 4;
struct Weights {
  std::vector<QuantTensor> gate_up, down;
};
Result<Weights> weights_of(const MoeCase& layer) {
  const MoeShape& s = layer.shape;
  Weights weights;
  std::uint64_t seed = 0;
  for (std::int64_t i = 0; i < std::min(kWeights, s.experts); ++i) {
    std::vector<QuantTensor> parts;
    for (const auto& [n, k] : {std::pair(s.intermediate, s.hidden), {s.intermediate, s.hidden}, {s.hidden, s.intermediate}}) {
      auto part = layer.weight(n, k, ++seed);
      if (!part.ok()) return part.status();
      parts.push_back(*std::move(part));
    }
    auto gate_up = join(std::span(parts).first(2));
    if (!gate_up.ok()) return gate_up.status().with_context("gate_up");
    weights.gate_up.push_back(*std::move(gate_up));
    weights.down.push_back(std::move(parts.back()));
  }
  return weights;
}

const QuantTensor& of_expert(const std::vector<QuantTensor>& weights, std::int64_t expert) {
  return weights[static_cast<std::size_t>(expert) % weights.size()];
}

// The operands of all calls in one piece of memory, and its copy on the host.
class Memory {
 public:
  Memory(const MoeShape& s, DType type, std::int64_t tokens, const std::vector<std::vector<std::int32_t>>& ids)
      : shape_(s), type_(type), tokens_(tokens), pairs_(tokens * s.top_k) {
    const auto matrix = static_cast<std::size_t>(tokens * s.hidden * bits(type) / 8);
    const auto indices = static_cast<std::size_t>(pairs_) * sizeof(std::int32_t);
    pitch_ = padded(indices);
    weights_ = padded(matrix), ids_ = weights_ + padded(indices), d_ = ids_ + ids.size() * pitch_;
    host.resize(d_ + padded(matrix));
    const Tensor x = nibble::cli::activations(type, 1, tokens * s.hidden);
    std::ranges::copy(x.bytes, host.begin());
    std::fill_n(reinterpret_cast<float*>(host.data() + weights_), pairs_, 1.0f / static_cast<float>(s.top_k));
    for (std::size_t i = 0; i < ids.size(); ++i) std::memcpy(host.data() + ids_ + i * pitch_, ids[i].data(), indices);
  }

  ConstTensorView x(const std::byte* memory) const { return {memory, type_, {tokens_, shape_.hidden}}; }
  TensorView d(std::byte* memory) const { return {memory + d_, type_, {tokens_, shape_.hidden}}; }
  MoeOperands operands(const std::byte* memory, std::size_t call) const {
    return {.ids = ConstTensorView(memory + ids_ + call * pitch_, DType::s32, {tokens_, shape_.top_k}),
            .weights = ConstTensorView(memory + weights_, DType::f32, {tokens_, shape_.top_k})};
  }

  std::vector<std::byte> host;

 private:
  static std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  MoeShape shape_;
  DType type_;
  std::int64_t tokens_, pairs_;
  std::size_t weights_ = 0, ids_ = 0, d_ = 0, pitch_ = 0;  // x is at 0
};

// Compares some channels of some tokens with those in double precision, which leaves out what quantizing activations adds: that is a few
// per cent. `nibble verify` has exact bounds: this finds ids and operands in the wrong place.
Status compare(const MoeCase& layer, const Weights& weights, const Memory& memory, const std::vector<std::int32_t>& ids) {
  constexpr std::int64_t kTokens = 2, kChannels = 16;
  const double most = layer.scheme.act.codes == DType::none ? 0.02 : 0.15;  // of the norm of the results
  const MoeShape& s = layer.shape;
  auto* const bytes = const_cast<std::byte*>(memory.host.data());
  const ConstTensorView x = memory.x(bytes), d = memory.d(bytes);
  const std::int64_t tokens = x.dim(0), channels = std::min(kChannels, s.hidden);
  double error = 0, size = 0;
  for (std::int64_t i = 0; i < std::min(kTokens, tokens); ++i) {
    const std::int64_t t = i * (tokens - 1);
    std::vector<double> expected(static_cast<std::size_t>(channels));
    for (std::int64_t j = 0; j < s.top_k; ++j) {
      const std::int32_t expert = ids[static_cast<std::size_t>(t * s.top_k + j)];
      const QuantTensor &gate_up = of_expert(weights.gate_up, expert), &down = of_expert(weights.down, expert);
      std::vector<double> inner(static_cast<std::size_t>(s.intermediate));
      default_executor().parallel_for(s.intermediate, [&](std::int64_t n) {
        double gate = 0, up = 0;
        for (std::int64_t k = 0; k < s.hidden; ++k) {
          gate += value_at(x, t, k) * static_cast<double>(gate_up.value(n, k));
          up += value_at(x, t, k) * static_cast<double>(gate_up.value(n + s.intermediate, k));
        }
        inner[static_cast<std::size_t>(n)] = gate / (1 + std::exp(-gate)) * up;
      });
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t k = 0; k < s.intermediate; ++k)
          expected[static_cast<std::size_t>(c)] += inner[static_cast<std::size_t>(k)] *
                                                   static_cast<double>(down.value(c * s.hidden / channels, k)) /
                                                   static_cast<double>(s.top_k);
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const double wanted = expected[static_cast<std::size_t>(c)];
      error += std::pow(value_at(d, t, c * s.hidden / channels) - wanted, 2);
      size += wanted * wanted;
    }
  }
  if (const double off = std::sqrt(error / size); !(off <= most))
    return {StatusCode::internal,
            fmt::format("the layer of experts is {:.3g} from the result in double precision, relative to its norm, expected at "
                        "most {}; nibble verify checks the kernels",
                        off, most)};
  return {};
}

// The layer packed, as many copies as leave the caches.
struct PackedLayer {
  std::vector<PackedExperts> gate_up, down;

  std::vector<std::span<const std::byte>> bytes() const {
    std::vector<std::span<const std::byte>> all;
    for (const auto* each : {&gate_up, &down})
      for (const PackedExperts& copy : *each)
        for (std::int64_t e = 0; e < copy.count(); ++e) all.push_back(copy[e].bytes());
    return all;
  }
  std::size_t expert_bytes() const { return gate_up.front()[0].bytes().size() + down.front()[0].bytes().size(); }
};
Result<PackedLayer> pack_all(const MoeCase& layer, const Weights& weights, DType type, const BenchSpec& spec,
                             BenchMachine& machine) {
  const std::int64_t most = *std::ranges::max_element(layer.m);
  const LinearSpec second{.a_dtype = type,
                          .m_max = most,
                          .epilogue = {.out = type},
                          .act_scheme = layer.scheme.act,
                          .accumulation = spec.accumulation};
  LinearSpec first = second;
  first.epilogue = {.activation = Activation::silu, .glu = true, .out = type};
  const PackOptions options{.kernel = spec.kernel, .executor = &machine.executor(), .backend = machine.backend()};
  PackedLayer packed;
  for (std::size_t copies = 1; packed.down.size() < copies;) {
    for (const bool gate_up : {true, false}) {
      auto made = pack_experts(
          layer.shape.experts,
          [&](std::int64_t e) -> Result<QuantTensor> { return of_expert(gate_up ? weights.gate_up : weights.down, e); },
          gate_up ? first : second, options);
      if (!made.ok()) return made.status().with_context(gate_up ? "gate_up" : "down");
      (gate_up ? packed.gate_up : packed.down).push_back(*std::move(made));
    }
    copies = copies_in(machine.cold_bytes(), packed.gate_up.front().nbytes() + packed.down.front().nbytes());
  }
  return packed;
}

// One routing of some tokens: the plan, the time of its calls, the result.
Result<std::vector<BenchResult>> bench_tokens(const MoeCase& layer, const Weights& weights, const PackedLayer& packed, DType type,
                                              Routing routing, std::int64_t tokens, const BenchSpec& spec,
                                              BenchMachine& machine) {
  const MoeShape& s = layer.shape;
  std::vector<std::vector<std::int32_t>> ids;
  double hit = 0;
  std::size_t calls = kMostCalls;
  for (std::size_t i = 0; i < calls; ++i) {
    ids.push_back(routed(routing, s, tokens, i));
    const auto experts = static_cast<double>(std::set(ids.back().begin(), ids.back().end()).size());
    if (i == 0)
      calls = std::clamp(copies_in(machine.cold_bytes(), static_cast<std::uint64_t>(experts) * packed.expert_bytes()),
                         kLeastCalls, kMostCalls);
    hit += experts / static_cast<double>(calls);
  }
  Memory memory(s, type, tokens, ids);
  const auto place = machine.place(memory.host);
  if (!place.ok()) return place.status();
  const auto plan =
      MoePlan::make(packed.gate_up.front(), packed.down.front(), {.tokens_max = tokens, .top_k = s.top_k, .out = type},
                    {.kernel = spec.kernel, .threads = machine.executor().threads()});
  if (!plan.ok()) return plan.status();
  MoeCalls all{
      .plan = *plan, .gate_up = packed.gate_up, .down = packed.down, .x = memory.x(place->get()), .d = memory.d(place->get())};
  for (std::size_t i = 0; i < calls; ++i) all.operands.push_back(memory.operands(place->get(), i));

  // The rows for which the products choose their kernels: on the CPU those of an expert, in the mean.
  const std::int64_t pairs = tokens * s.top_k;
  const std::int64_t rows = machine.backend() == Backend::cuda
                                ? pairs
                                : std::clamp<std::int64_t>(std::llround(static_cast<double>(pairs) / hit), 1, tokens);
  const std::string first(plan->gate_up_plan().kernel(rows)), second(plan->down_plan().kernel(rows));
  std::vector<BenchResult> results;
  for (const Calls way : spec.calls) {
    auto contestant = machine.experts(first == second ? first : fmt::format("{}, {}", first, second), all, way, *place);
    if (!contestant.ok()) return contestant.status();
    if (results.empty()) {
      if (const auto ran = contestant->run(); !ran.ok()) return ran.status();
      if (Status fetched = machine.fetch(memory.host, place->get()); !fetched.ok()) return fetched;
      if (Status same = compare(layer, weights, memory, ids.back()); !same.ok()) return same;
    }
    Probes probes{.peak = machine.peak_for(type, layer.scheme.act)};
    const auto timings = time_beside_probes(std::span(&*contestant, 1), spec, machine, probes);
    if (!timings.ok()) return timings.status();
    BenchResult& result = results.emplace_back();
    result.name = "experts";
    result.moe = MoeResult{.shape = s, .routing = routing, .hit = hit, .bytes = hit * static_cast<double>(packed.expert_bytes())};
    result.m = tokens, result.n = s.hidden, result.k = s.hidden;
    result.scheme = layer.scheme.name();
    result.a_dtype = result.d_dtype = name(type);
    result.backend = name(machine.backend());
    result.kernel = contestant->name;
    result.layout = packed.gate_up.front()[0].layout();
    result.calls = way;
    const double operations =
        6 * static_cast<double>(pairs) * static_cast<double>(s.hidden) * static_cast<double>(s.intermediate);
    derive(result, timings->front(), probes, result.moe->bytes, operations);
  }
  return results;
}

}  // namespace

std::vector<std::int32_t> routed(Routing routing, const MoeShape& shape, std::int64_t tokens, std::uint64_t seed) {
  const auto experts = static_cast<std::size_t>(shape.experts), top_k = static_cast<std::size_t>(shape.top_k);
  std::mt19937_64 random(seed);
  std::vector<std::size_t> order(experts);  // from the most to the least popular expert: another in each call
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<double> logarithms(experts);
  for (std::size_t i = 0; i < experts; ++i) {
    double& logarithm = logarithms[order[i]];
    if (routing == Routing::zipf) logarithm = -std::log(static_cast<double>(i + 1));
    if (routing == Routing::hot && i == 0)
      logarithm = std::log(static_cast<double>(experts));  // half of the tokens have it first
    if (routing == Routing::empty && i == 0) logarithm = -INFINITY;
  }
  std::vector<std::int32_t> ids;
  std::vector<std::pair<double, std::int32_t>> scores(experts);
  for (std::int64_t t = 0; t < tokens; ++t) {
    // The top_k largest of log p + Gumbel noise are a draw without repetition.
    for (std::size_t e = 0; e < experts; ++e) {
      const double uniform = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
      scores[e] = {logarithms[e] - std::log(-std::log(uniform)), static_cast<std::int32_t>(e)};
    }
    std::ranges::partial_sort(scores, scores.begin() + static_cast<std::ptrdiff_t>(top_k), std::greater());
    for (std::size_t j = 0; j < top_k; ++j) ids.push_back(scores[j].second);
  }
  return ids;
}

Result<LayerBench> bench_moe(const MoeCase& layer, const BenchSpec& spec, BenchMachine& machine,
                             const std::function<void(const std::string&)>& step) {
  const auto weights = weights_of(layer);
  if (!weights.ok()) return weights.status();
  const auto measure = [&](DType type, const std::string& what, std::vector<BenchResult>& results) -> Status {
    step(what + " packing");
    const auto packed = pack_all(layer, *weights, type, spec, machine);
    if (!packed.ok()) return packed.status();
    machine.settle(packed->bytes());
    for (const Routing routing : layer.routings)
      for (const std::int64_t tokens : layer.m) {
        step(fmt::format("{} {} M={}", what, name(routing), tokens));
        auto measured = bench_tokens(layer, *weights, *packed, type, routing, tokens, spec, machine);
        if (!measured.ok()) return measured.status();
        std::ranges::move(*measured, std::back_inserter(results));
      }
    return {};
  };
  return bench_types("experts", layer.scheme, spec.acts, measure);
}

}  // namespace nibble::cli
