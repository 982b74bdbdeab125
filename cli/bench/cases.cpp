// The layers to measure, from a checkpoint or a list of shapes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "commands/bench.hpp"
#include "commands/commands.hpp"
#include "commands/inspect.hpp"
#include "commands/option_checks.hpp"
#include "commands/shapes.hpp"

namespace nibble::cli {
namespace {

// A small generator, the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state_ >> 33);
  }
  float uniform(float low, float high) { return low + (high - low) * static_cast<float>(next()) * 0x1p-31f; }

 private:
  std::uint64_t state_;
};

std::vector<std::uint8_t> random_codes(DType codes, std::int64_t count, std::uint64_t seed) {
  const unsigned mask = (1u << bits(codes)) - 1;
  std::vector<std::uint8_t> usable;  // a NaN is not a weight
  for (unsigned code = 0; code <= mask; ++code) {
    if (std::isfinite(code_value(codes, static_cast<std::uint8_t>(code)))) usable.push_back(static_cast<std::uint8_t>(code));
  }
  std::vector<std::uint8_t> out(static_cast<std::size_t>(count));
  constexpr std::int64_t kChunk =
      1 << 18;  // each has its own generator, so that the weight does not depend on the number of threads
  default_executor().parallel_for((count + kChunk - 1) / kChunk, [&](std::int64_t chunk) {
    Random random(seed << 32 | static_cast<std::uint64_t>(chunk));
    const std::int64_t end = std::min(count, (chunk + 1) * kChunk);
    for (std::int64_t i = chunk * kChunk; i < end; ++i) out[static_cast<std::size_t>(i)] = usable[random.next() % usable.size()];
  });
  return out;
}

// Scales are `scale` in the mean.
Result<QuantTensor> random_weight(std::int64_t n, std::int64_t k, const Scheme& both, std::uint64_t seed, float scale = 0.01f,
                                  const Extent& filter = {}) {
  const WeightScheme& scheme = both.weight;
  Random random(seed);
  QuantTensor q;
  q.scheme = scheme;
  q.n = n;
  q.k = k;
  q.filter = filter;
  if (scheme.is_dense()) {  // numbers from −0.03 to 0.03, of any value and sign
    Tensor floats(scheme.codes, {n, k});
    for (std::int64_t i = 0; i < floats.numel(); ++i) floats.set(i, random.uniform(-0.03f, 0.03f));
    q.codes.resize(floats.bytes.size());
    std::memcpy(q.codes.data(), floats.bytes.data(), q.codes.size());
    return q;
  }
  q.codes = random_codes(scheme.codes, n * k, seed);
  const std::vector<std::int64_t> shape = {scheme.group.rows(n), q.groups()};
  q.scales = Tensor(scheme.scale, shape);
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) q.scales.set(i, random.uniform(0.5f * scale, 1.5f * scale));
  if (scheme.zero != ZeroKind::none) {
    const bool integer = scheme.zero == ZeroKind::integer;
    const auto last_code = static_cast<float>((1 << bits(scheme.codes)) - 1);
    q.zeros = Tensor(!integer ? scheme.scale : info(scheme.codes).kind == DTypeKind::sint ? DType::s8 : DType::u8, shape);
    for (std::int64_t i = 0; i < q.zeros.numel(); ++i) {
      const float zero = random.uniform(0.25f, 0.75f) * last_code;
      q.zeros.set(i, integer ? std::floor(zero) : scheme.zero == ZeroKind::real ? zero : -scale * zero);
    }
  }
  if (both.act.group == GroupShape::tensor()) q.static_acts = {0.03f, both.act.zero == ZeroKind::none ? 0 : 11};
  if (Status valid = q.validate(); !valid.ok()) return valid;
  return q;
}

// A factor for each input channel.
Result<QuantTensor> with_prescale(Result<QuantTensor> q) {
  if (!q.ok()) return q;
  Random random(1);
  q->prescale = Tensor(DType::f32, {q->k});
  for (std::int64_t i = 0; i < q->k; ++i) q->prescale.set(i, random.uniform(0.5f, 1.5f));
  return q;
}

// The scale with which random codes of [N,k] make results about as large as the activations.
float unit_scale(DType codes, std::int64_t k) {
  double sum = 0, squares = 0, count = 0;
  for (unsigned code = 0; code < 1u << bits(codes); ++code) {
    const double value = code_value(codes, static_cast<std::uint8_t>(code));
    if (!std::isfinite(value)) continue;
    sum += value, squares += value * value, ++count;
  }
  const double mean = sum / count;
  return static_cast<float>(1 / std::sqrt((squares / count - mean * mean) * static_cast<double>(k)));
}

// Makes weights [N,K] of a scheme whose products are about as large as their activations.
std::function<Result<QuantTensor>(std::int64_t, std::int64_t, std::uint64_t)> unit_weights(const Scheme& scheme) {
  return [scheme](std::int64_t n, std::int64_t k, std::uint64_t seed) {
    return random_weight(n, k, scheme, seed, unit_scale(scheme.weight.codes, k));
  };
}

Result<Scheme> parse_scheme(const std::string& text) {
  auto scheme = Scheme::parse(text);
  if (!scheme.ok()) {
    static const std::vector<std::string> kUsual = {"u4b8g32",
                                                    "u4b8g64",
                                                    "u4b8g128",
                                                    "u4zg32",
                                                    "u4zg64",
                                                    "u4zg128",
                                                    "u8b128g128",
                                                    "u8b128c",
                                                    "s8c",
                                                    "s8t",
                                                    "e4m3c",
                                                    "e4m3t",
                                                    "e4m3b128x128",
                                                    "s8r_u4b8g128",
                                                    "s8r_u4zg128",
                                                    "s8g128_u4b8g128",
                                                    "s8g128_u4zg128",
                                                    "s8r_s8c",
                                                    "s8t_s8c",
                                                    "s8zr_s8c",
                                                    "s8og32_u4zg32",
                                                    "e4m3r_e4m3c",
                                                    "e4m3t_e4m3t",
                                                    "e4m3g128_e4m3b128x128"};
    const Status& why = scheme.status();
    return Status(why.code(), fmt::format("--scheme: {}{}", why.message(), nearest_of(text, kUsual)));
  }
  if (Status known = check_activations("--scheme", text, scheme->act); !known.ok()) return known;
  return scheme;
}

}  // namespace

Result<std::vector<BenchCase>> cases_from_checkpoint(const Checkpoint& checkpoint, const std::string& layer,
                                                     const AskedActivations& asked, std::span<const std::int64_t> m_list) {
  const auto pattern = compile_pattern("--layer", layer);
  if (!pattern.ok()) return pattern.status();
  struct Group {
    const Module* first = nullptr;
    std::vector<std::string> modules;
  };
  std::map<std::string, Group> groups;
  std::vector<Group*> order;
  for (const Module& module : checkpoint.modules()) {
    if (!module.quantized() || module.filter || !pattern->search(module.name)) continue;
    Group& group = groups[shape_key(module) + Scheme{module.scheme, activations_for(module, asked)}.name()];
    group.modules.push_back(module.name);
    if (group.first != nullptr) continue;
    group.first = &module;
    order.push_back(&group);
  }
  if (order.empty()) {
    if (Status readable = usable_whole(checkpoint); !readable.ok()) return readable;
    return Status(
        StatusCode::invalid_argument,
        fmt::format("{} has no quantized linear layer{}; convolutions are measured by --conv FILE", checkpoint.path().string(),
                    layer.empty() ? " to measure; nibble quantize makes some" : " whose name matches --layer"));
  }
  std::vector<BenchCase> cases;
  for (const Group* group : order) {
    std::string name = group->first->name;
    if (group->modules.size() > 1) name = fmt::format("{} ×{}", without_numbers(name), group->modules.size());
    const Module& module = *group->first;
    cases.push_back({.name = std::move(name),
                     .load = [&checkpoint, &module] { return checkpoint.read(module); },
                     .m = {m_list.begin(), m_list.end()},
                     .act_scheme = activations_for(module, asked),
                     .modules = group->modules});
  }
  return cases;
}

Result<std::vector<BenchCase>> cases_from_shapes(const std::filesystem::path& file, const std::string& layer,
                                                 std::span<const std::string> schemes, std::span<const std::int64_t> m_list,
                                                 bool prescale) {
  const auto pattern = compile_pattern("--layer", layer);
  if (!pattern.ok()) return pattern.status();
  const auto shapes = read_shapes(file);
  if (!shapes.ok()) return shapes.status();
  std::vector<BenchCase> cases;
  for (const std::string& text : schemes) {
    const auto scheme = parse_scheme(text);
    if (!scheme.ok()) return scheme.status();
    std::uint64_t seed = 0;
    for (const Shape& shape : *shapes) {
      if (!pattern->search(shape.name)) continue;
      std::vector<std::int64_t> m(m_list.begin(), m_list.end());
      if (shape.m) m = {*shape.m};
      ++seed;
      cases.push_back({.name = shape.name,
                       .load = [shape, scheme = *scheme, seed] { return random_weight(shape.n, shape.k, scheme, seed); },
                       .m = std::move(m),
                       .act_scheme = scheme->act});
      if (!prescale) continue;
      cases.push_back(cases.back());
      cases.back().load = [plain = cases.back().load] { return with_prescale(plain()); };
    }
  }
  if (cases.empty()) return Status(StatusCode::invalid_argument, fmt::format("{} has no layer to measure", file.string()));
  return cases;
}

Result<std::vector<BlockCase>> cases_from_block(const BlockShape& shape, std::span<const std::string> schemes,
                                                std::span<const std::int64_t> m_list) {
  if (shape.heads % shape.kv_heads != 0)
    return Status(StatusCode::invalid_argument,
                  fmt::format("--block: {} heads cannot share {} heads of keys and values; give a divisor of HEADS as KV_HEADS",
                              shape.heads, shape.kv_heads));
  if (shape.q() + 2 * shape.kv() > kMaxSize)
    return Status(StatusCode::invalid_argument,
                  fmt::format("--block: q, k and v have {} channels; expected at most {}", shape.q() + 2 * shape.kv(), kMaxSize));
  std::vector<BlockCase> cases;
  for (const std::string& text : schemes) {
    const auto scheme = parse_scheme(text);
    if (!scheme.ok()) return scheme.status();
    cases.push_back({.shape = shape, .scheme = *scheme, .weight = unit_weights(*scheme), .m = {m_list.begin(), m_list.end()}});
  }
  return cases;
}

Result<std::vector<MoeCase>> cases_from_moe(const MoeShape& shape, std::span<const Routing> routings,
                                            std::span<const std::string> schemes, std::span<const std::int64_t> m_list) {
  if (shape.top_k > shape.experts)
    return Status(StatusCode::invalid_argument,
                  fmt::format("--moe: a token has {} of {} experts; give a TOP_K up to EXPERTS", shape.top_k, shape.experts));
  if (shape.top_k == shape.experts && std::ranges::find(routings, Routing::empty) != routings.end())
    return Status(
        StatusCode::invalid_argument,
        fmt::format("--routing empty: a token has all {} experts, so none is without one; give a smaller TOP_K", shape.experts));
  std::vector<MoeCase> cases;
  for (const std::string& text : schemes) {
    const auto scheme = parse_scheme(text);
    if (!scheme.ok()) return scheme.status();
    cases.push_back({.shape = shape,
                     .scheme = *scheme,
                     .weight = unit_weights(*scheme),
                     .m = {m_list.begin(), m_list.end()},
                     .routings = {routings.begin(), routings.end()}});
  }
  return cases;
}

Result<std::vector<BenchCase>> cases_from_conv_shapes(const ConvCasesSpec& spec) {
  const auto pattern = compile_pattern("--layer", spec.layer);
  if (!pattern.ok()) return pattern.status();
  const auto shapes = read_conv_shapes(spec.file);
  if (!shapes.ok()) return shapes.status();
  std::vector<BenchCase> cases;
  for (const std::string& text : spec.schemes) {
    auto scheme = parse_scheme(text);
    if (!scheme.ok()) return scheme.status();
    if (scheme->act.codes == DType::none) {
      scheme->act = spec.act_scheme;
    } else if (spec.act_scheme.codes != DType::none) {
      return Status(StatusCode::invalid_argument,
                    fmt::format("--act-scheme: scheme {} says how activations are quantized already", text));
    }
    std::uint64_t seed = 0;
    for (const ConvShape& shape : *shapes) {
      if (!pattern->search(shape.name)) continue;
      ++seed;
      cases.push_back({.name = shape.name,
                       .load = [g = shape.geometry, scheme = *scheme,
                                seed] { return random_weight(g.out_channels, g.k(), scheme, seed, 0.01f, g.filter); },
                       .m = shape.batch ? std::vector<std::int64_t>{*shape.batch} : spec.batches,
                       .act_scheme = scheme->act,
                       .conv = ConvShapes{shape.geometry, spec.input, spec.output}});
    }
  }
  if (cases.empty()) return Status(StatusCode::invalid_argument, fmt::format("{} has no layer to measure", spec.file.string()));
  return cases;
}

}  // namespace nibble::cli
