// Weights are cold, as in bench_layer: each product has copies of its own for when it is measured alone, and the block uses as many of them as
// it needs. Activations stay warm.
#include "bench/block.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

namespace nibble::cli {
namespace {

constexpr std::size_t kProducts = 4;
constexpr std::array<std::string_view, kProducts> kNames{"qkv", "o", "gate_up", "down"};

// A product of the block: D = epilogue(norm(A) · Wᵀ).
struct Product {
  std::string_view name;
  QuantTensor weight;
  Norm norm = Norm::none;
  bool glu = false, residual = false;

  LinearSpec spec(DType type, std::int64_t m, const ActScheme& act_scheme, Accumulation accumulation) const {
    return {.a_dtype = type,
            .m_max = m,
            .epilogue = {.activation = glu ? Activation::silu : Activation::none, .glu = glu, .residual = residual, .out = type},
            .act_scheme = act_scheme,
            .accumulation = accumulation,
            .norm = {.kind = norm}};
  }
  std::int64_t columns() const { return glu ? weight.n / 2 : weight.n; }
};
using Products = std::array<Product, kProducts>;

Result<Products> products_of(const BlockCase& block) {
  const BlockShape& s = block.shape;
  std::uint64_t seed = 0;
  const auto joined = [&](std::int64_t k, std::initializer_list<std::int64_t> rows) -> Result<QuantTensor> {
    std::vector<QuantTensor> parts;
    for (const std::int64_t n : rows) {
      auto part = block.weight(n, k, ++seed);
      if (!part.ok()) return part.status();
      parts.push_back(*std::move(part));
    }
    return parts.size() == 1 ? std::move(parts.front()) : join(parts);
  };
  std::array<Result<QuantTensor>, kProducts> weights{joined(s.hidden, {s.q(), s.kv(), s.kv()}), joined(s.q(), {s.hidden}),
                                                     joined(s.hidden, {s.intermediate, s.intermediate}),
                                                     joined(s.intermediate, {s.hidden})};
  Products products;
  for (std::size_t i = 0; i < kProducts; ++i) {
    if (!weights[i].ok()) return weights[i].status().with_context(kNames[i]);
    const bool reads_stream = i % 2 == 0;  // behind a norm; the others add to it
    products[i] = {.name = kNames[i],
                   .weight = *std::move(weights[i]),
                   .norm = reads_stream ? Norm::rms : Norm::none,
                   .glu = kNames[i] == "gate_up",
                   .residual = !reads_stream};
  }
  return products;
}

// The activations of a block in one piece of memory, and its copy on the host, in which results are compared.
class Activations {
 public:
  static constexpr std::size_t kAlignment = 256;

  Activations(const BlockShape& s, DType type, std::int64_t m) : type_(type), m_(m) {
    for (const std::int64_t count :
         {m * s.hidden, m * s.q(), 2 * s.hidden, m * (s.q() + 2 * s.kv()), m * s.hidden, m * s.intermediate, m * s.hidden}) {
      offsets_.push_back(host.size());
      const std::size_t bytes = static_cast<std::size_t>(count * bits(type) / 8);
      host.resize((host.size() + bytes + kAlignment - 1) / kAlignment * kAlignment);
    }
    const Tensor given = activations(type, 1, std::max({m * s.hidden, m * s.q(), 2 * s.hidden}));
    for (const auto& [part, count] : {std::pair(x, m * s.hidden), {mixed, m * s.q()}, {norms, 2 * s.hidden}})
      std::copy_n(given.bytes.begin(), count * bits(type) / 8, at(host.data(), part));
  }

  enum Part : std::size_t { x, mixed, norms, qkv, h, inner, y };
  std::byte* at(std::byte* memory, Part part) const { return memory + offsets_[part]; }
  TensorView matrix(std::byte* memory, Part part, std::int64_t columns) const { return {at(memory, part), type_, {m_, columns}}; }
  ConstTensorView norm(std::byte* memory, int which, std::int64_t hidden) const {
    return {at(memory, norms) + which * hidden * bits(type_) / 8, type_, {hidden}};
  }

  std::vector<std::byte> host;

 private:
  DType type_;
  std::int64_t m_;
  std::vector<std::size_t> offsets_;
};

// Where the operands of product i are.
struct Places {
  Activations::Part a, d, residual;
};
constexpr std::array<Places, kProducts> kPlaces{{{Activations::x, Activations::qkv, Activations::x},
                                                 {Activations::mixed, Activations::h, Activations::x},
                                                 {Activations::h, Activations::inner, Activations::h},
                                                 {Activations::inner, Activations::y, Activations::h}}};

struct Views {
  ConstTensorView a;
  TensorView d;
  Operands operands;
};
Views views_of(const Products& products, std::size_t i, const Activations& activations, std::byte* memory) {
  const Product& product = products[i];
  const Places& place = kPlaces[i];
  Views views{activations.matrix(memory, place.a, product.weight.k), activations.matrix(memory, place.d, product.columns()), {}};
  if (product.norm != Norm::none)
    views.operands.norm_weight = activations.norm(memory, static_cast<int>(i) / 2, product.weight.k);
  if (product.residual) views.operands.residual = activations.matrix(memory, place.residual, product.columns());
  return views;
}

// ---- comparison

// The activations that a product multiplies, [rows,K]: normalized, rounded to the type of A, quantized.
Result<std::vector<double>> multiplied(const Product& product, const ConstTensorView& a, const Operands& operands,
                                       const ActScheme& scheme, std::int64_t rows) {
  const std::int64_t k = a.dim(1);
  Tensor normalized(a.dtype, {rows, k});
  for (std::int64_t m = 0; m < rows; ++m) {
    double scale = 1;
    if (product.norm != Norm::none) {
      double squares = 0;
      for (std::int64_t i = 0; i < k; ++i) squares += value_at(a, m, i) * value_at(a, m, i);
      scale = 1 / std::sqrt(squares / static_cast<double>(k) + static_cast<double>(NormSpec().eps));
    }
    ConstTensorView weight = operands.norm_weight;
    for (std::int64_t i = 0; i < k; ++i) {
      const double factor = weight.empty() ? 1 : value_at(weight, 0, i);
      normalized.set(m * k + i, static_cast<float>(value_at(a, m, i) * scale * factor));
    }
  }
  std::vector<double> values(static_cast<std::size_t>(rows * k));
  const auto fill = [&](auto value) {
    for (std::int64_t i = 0; i < rows * k; ++i) values[static_cast<std::size_t>(i)] = value(i);
  };
  if (scheme.codes == DType::none) {
    fill([&](std::int64_t i) { return static_cast<double>(normalized.at(i)); });
    return values;
  }
  const bool known = scheme.group == GroupShape::tensor(), offset = scheme.zero == ZeroKind::offset;
  const std::int64_t block = scheme.group.k == 0 ? k : scheme.group.k, blocks = (k + block - 1) / block;
  Tensor codes(scheme.codes, {rows, k}), scales(DType::f32, {rows, blocks});
  Tensor zeros(offset ? DType::f32 : DType::s32, {rows, blocks});
  const auto of_blocks = [&](Tensor& t) {
    return scheme.group.k == 0 ? TensorView(t.bytes.data(), t.dtype, {rows})
                               : TensorView(t.bytes.data(), t.dtype, {rows, blocks});
  };
  ActOutputs out{.codes = TensorView(codes.bytes.data(), codes.dtype, {rows, k})};
  if (!known) out.scales = of_blocks(scales);
  if (!known && scheme.zero != ZeroKind::none) out.zeros = of_blocks(zeros);
  const Status quantized = quantize_activations(ConstTensorView(normalized.bytes.data(), a.dtype, {rows, k}), scheme, out,
                                                {.known = known ? product.weight.static_acts : std::nullopt});
  if (!quantized.ok()) return quantized;
  fill([&](std::int64_t i) {
    const std::int64_t at = i / k * blocks + i % k / block;
    const double code = code_value(scheme.codes, static_cast<std::uint8_t>(codes.bytes[static_cast<std::size_t>(i)]));
    if (known) return (code - product.weight.static_acts->zero) * static_cast<double>(product.weight.static_acts->scale);
    const double scale = scales.at(at);
    if (scheme.zero == ZeroKind::none) return code * scale;
    return offset ? code * scale + static_cast<double>(zeros.at(at)) : (code - zeros.as<std::int32_t>()[at]) * scale;
  });
  return values;
}

// Compares some outputs of a product with those in double precision. `nibble verify` has exact bounds: this finds operands in the wrong place.
Status compare(const Product& product, const Views& views, const ActScheme& scheme) {
  constexpr std::int64_t kRows = 4, kColumns = 64;
  constexpr double kMost = 0.01;  // of the norm of the outputs, whose rounding to bf16 is a fifth of that
  const std::int64_t rows = std::min(kRows, views.a.dim(0)), columns = product.columns(), shown = std::min(kColumns, columns);
  const auto a = multiplied(product, views.a, views.operands, scheme, rows);
  if (!a.ok()) return a.status();
  double error = 0, size = 0;
  for (std::int64_t column = 0; column < shown; ++column) {
    const std::int64_t n = column * columns / shown, k = product.weight.k;
    const auto sum = [&](std::int64_t m, std::int64_t row) {
      double total = 0;
      for (std::int64_t i = 0; i < k; ++i)
        total += (*a)[static_cast<std::size_t>(m * k + i)] * static_cast<double>(product.weight.value(row, i));
      return total;
    };
    for (std::int64_t m = 0; m < rows; ++m) {
      double expected = sum(m, n);
      if (product.glu) expected = expected / (1 + std::exp(-expected)) * sum(m, n + columns);
      if (product.residual) expected += value_at(views.operands.residual, m, n);
      error += std::pow(value_at(views.d, m, n) - expected, 2);
      size += expected * expected;
    }
  }
  if (const double off = std::sqrt(error / size); !(off <= kMost))
    return {
        StatusCode::internal,
        fmt::format("{} of the block is {:.3g} from the result in double precision, relative to its norm, expected at most {}; "
                    "nibble verify checks the kernels",
                    product.name, off, kMost)};
  return {};
}

Status compare_all(const Products& products, Activations& activations, const std::byte* memory, const ActScheme& scheme,
                   BenchMachine& machine) {
  if (Status fetched = machine.fetch(activations.host, memory); !fetched.ok()) return fetched;
  for (std::size_t i = 0; i < kProducts; ++i)
    if (Status same = compare(products[i], views_of(products, i, activations, activations.host.data()), scheme); !same.ok())
      return same;
  return {};
}

// ---- measurement

// Bytes that a product moves: W, A, D and the residual once each.
double bytes_of(const Product& product, const PackedWeight& weight, DType type, std::int64_t m) {
  const std::int64_t columns = product.columns();
  const double elements =
      static_cast<double>(m) * static_cast<double>(product.weight.k + columns + (product.residual ? columns : 0));
  return static_cast<double>(weight.bytes().size()) + bits(type) / 8.0 * elements;
}

struct Packed {
  std::array<Copies, kProducts> copies;
  std::size_t blocks = 1;  // copies that the whole block uses

  std::vector<std::span<const std::byte>> bytes() const {
    std::vector<std::span<const std::byte>> all;
    for (const Copies& product : copies)
      for (const PackedWeight& copy : *product) all.push_back(copy.bytes());
    return all;
  }
};
Result<Packed> pack_all(const Products& products, const BlockCase& block, DType type, const BenchSpec& spec,
                        BenchMachine& machine) {
  Packed packed;
  std::uint64_t bytes = 0;
  const std::int64_t most = *std::ranges::max_element(block.m);
  for (std::size_t i = 0; i < kProducts; ++i) {
    const auto pack_one = [&] {
      return pack(products[i].weight, products[i].spec(type, most, block.scheme.act, spec.accumulation),
                  {.kernel = spec.kernel, .executor = &machine.executor(), .backend = machine.backend()});
    };
    auto first = pack_one();
    if (!first.ok()) return first.status().with_context(products[i].name);
    bytes += first->bytes().size();
    auto copies = copies_of(*std::move(first), pack_one, machine.cold_bytes());
    if (!copies.ok()) return copies.status().with_context(products[i].name);
    packed.copies[i] = *std::move(copies);
  }
  packed.blocks = copies_in(machine.cold_bytes(), bytes);
  return packed;
}

// One M: plans, contestants for each way of calling, times, results.
Result<std::vector<BenchResult>> bench_m(const BlockCase& block, const Products& products, const Packed& packed, DType type,
                                         std::int64_t m, const BenchSpec& spec, BenchMachine& machine) {
  Activations activations(block.shape, type, m);
  const auto memory = machine.place(activations.host);
  if (!memory.ok()) return memory.status();
  std::vector<PlanCall> calls;
  for (std::size_t i = 0; i < kProducts; ++i) {
    auto plan = Plan::linear(packed.copies[i]->front(), products[i].spec(type, m, block.scheme.act, spec.accumulation),
                             {.kernel = spec.kernel, .threads = machine.executor().threads()});
    if (!plan.ok()) return plan.status().with_context(products[i].name);
    const Views views = views_of(products, i, activations, memory->get());
    calls.push_back({*std::move(plan), packed.copies[i], views.a, views.d, views.operands});
  }
  std::vector<BenchResult> results;
  for (const Calls way : spec.calls) {
    std::vector<Contestant> contestants;
    for (std::size_t i = 0; i <= kProducts; ++i) {
      const bool whole = i == kProducts;
      auto made = machine.sequence(whole ? "block" : std::string(calls[i].plan.kernel(m)), whole ? calls : std::vector{calls[i]},
                                   whole ? packed.blocks : packed.copies[i]->size(), way, *memory);
      if (!made.ok()) return made.status();
      contestants.push_back(*std::move(made));
    }
    if (results.empty()) {
      if (const auto ran = contestants.back().run(); !ran.ok()) return ran.status();
      if (Status same = compare_all(products, activations, memory->get(), block.scheme.act, machine); !same.ok()) return same;
    }
    Probes probes{.peak = machine.peak_for(type, block.scheme.act)};
    const auto timings = time_beside_probes(contestants, spec, machine, probes);
    if (!timings.ok()) return timings.status();
    double all_bytes = 0, all_operations = 0;
    for (std::size_t i = 0; i <= kProducts; ++i) {
      const bool whole = i == kProducts;
      BenchResult& result = results.emplace_back();
      result.block = block.shape;
      result.m = m, result.n = result.k = block.shape.hidden;
      result.name = "block";
      result.scheme = block.scheme.name();
      result.a_dtype = result.d_dtype = name(type);
      result.backend = name(machine.backend());
      result.calls = way;
      if (whole) {
        derive(result, (*timings)[i], probes, all_bytes, all_operations);
        continue;
      }
      const Product& product = products[i];
      const PackedWeight& weight = packed.copies[i]->front();
      result.name = product.name;
      result.n = product.weight.n, result.k = product.weight.k;
      result.kernel = contestants[i].name;
      result.layout = weight.layout();
      result.glu = product.glu;
      result.norm = product.norm;
      const double bytes = bytes_of(product, weight, type, m);
      const double operations = 2 * static_cast<double>(m) * static_cast<double>(result.n) * static_cast<double>(result.k);
      all_bytes += bytes, all_operations += operations;
      derive(result, (*timings)[i], probes, bytes, operations);
    }
  }
  return results;
}

}  // namespace

Result<LayerBench> bench_block(const BlockCase& block, const BenchSpec& spec, BenchMachine& machine,
                               const std::function<void(const std::string&)>& step) {
  const auto products = products_of(block);
  if (!products.ok()) return products.status();
  const auto measure = [&](DType type, const std::string& what, std::vector<BenchResult>& results) -> Status {
    step(what + " packing");
    const auto packed = pack_all(*products, block, type, spec, machine);
    if (!packed.ok()) return packed.status();
    machine.settle(packed->bytes());
    for (const std::int64_t m : block.m) {
      step(fmt::format("{} M={}", what, m));
      auto measured = bench_m(block, *products, *packed, type, m, spec, machine);
      if (!measured.ok()) return measured.status();
      std::ranges::move(*measured, std::back_inserter(results));
    }
    return {};
  };
  return bench_types("block", block.scheme, spec.acts, measure);
}

}  // namespace nibble::cli
