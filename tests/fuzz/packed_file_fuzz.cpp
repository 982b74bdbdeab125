// Any bytes as a file of packed weights: refused, or its weights load, and unpacking, dequantizing and running them read only what is
// theirs, whatever the packed bytes are.
#include <fstream>
#include <iterator>
#include <span>

#include "fuzz/fuzz.hpp"
#include "fuzz/scratch.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

using namespace nibble;
using fuzz::require;

namespace {

const fuzz::Scratch& scratch() {
  static const fuzz::Scratch made;
  return made;
}

constexpr std::size_t kAlignment = 64;

/// A file of this header, padded so that the data is aligned.
std::string file(std::string_view header, std::string_view data) {
  const std::size_t length = (8 + header.size() + kAlignment - 1) / kAlignment * kAlignment - 8;
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>(length >> shift & 0xff);
  return bytes.append(header).append(length - header.size(), ' ').append(data);
}

/// The same with as little padding as there can be, or else nothing: behind the padding of a header, data begins.
std::string repaired(std::string_view input) {
  const std::size_t end = input.find("}  ");
  if (end == std::string_view::npos || end < 8) return {};
  const std::size_t data = input.find_first_not_of(' ', end + 1);
  return file(input.substr(8, end - 7), data == std::string_view::npos ? std::string_view() : input.substr(data));
}

void run(const PackedWeight& weight, const ActScheme& act, Executor& executor) {
  const auto plan = Plan::linear(weight, LinearSpec{.act_scheme = act});
  if (!fuzz::ok(plan.status())) return;
  const Tensor a(DType::f32, {1, weight.k()});
  Tensor d(DType::f32, {1, weight.n()});
  std::vector<std::byte> workspace(plan->workspace_bytes());
  require(fuzz::ok(plan->run(weight, ConstTensorView(a.as<float>(), {1, weight.k()}), TensorView(d.as<float>(), {1, weight.n()}),
                             {}, workspace, &executor)));
}

void check(std::string_view input) {
  static const auto executor = make_executor(1);
  scratch().write("x.nibble", input);
  const auto opened = PackedFile::open(scratch().root / "x.nibble");
  if (!fuzz::ok(opened.status())) return;
  require(PackedFile::recognises(scratch().root / "x.nibble"));
  for (const PackedModule& module : opened->modules()) {
    require(opened->find(module.name) == &module);
    const auto weight = opened->load(module.name);
    if (!fuzz::ok(weight.status())) continue;
    require(weight->bytes().size() == module.bytes && weight->n() == module.desc.n && weight->k() == module.desc.k);
    const auto q = unpack(*weight);
    require(fuzz::ok(q.status()) && q->n == module.desc.n);
    const auto plan = Plan::dequantize(*weight, {});
    if (fuzz::ok(plan.status())) {
      Tensor w(DType::f32, {q->n, q->k});
      require(fuzz::ok(plan->run(*weight, {}, TensorView(w.as<float>(), {q->n, q->k}), {}, {}, executor.get())));
    }
    run(*weight, {}, *executor);
    run(*weight, {DType::s8, GroupShape::channel(), ZeroKind::integer}, *executor);
  }
}

std::string saved(const QuantTensor& q, const PackOptions& options, const LinearSpec& spec = {}) {
  const auto weight = pack(q, spec, options);
  require(weight.ok());
  const std::pair<std::string, PackedWeight> weights[] = {{"a.b", *weight}};
  require(save_packed(scratch().root / "seed.nibble", weights, {.overwrite = true}).ok());
  std::ifstream in(scratch().root / "seed.nibble", std::ios::binary);
  return repaired(std::string(std::istreambuf_iterator<char>(in), {}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  check(input);
  if (const std::string better = repaired(input); !better.empty() && better != input) check(better);
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  using testing::random_weight;
  const WeightScheme u4{DType::u4, ZeroKind::integer, GroupShape::group(8), DType::f16};
  const WeightScheme s8{DType::s8, ZeroKind::none, GroupShape::channel(), DType::f32};
  const WeightScheme e4m3{DType::e4m3, ZeroKind::none, GroupShape::block(2, 8), DType::f32};
  const WeightScheme offsets{DType::u4, ZeroKind::offset, GroupShape::group(16), DType::bf16};
  std::vector<std::string> seeds;
  for (const LayoutInfo& layout : layouts())
    for (const WeightScheme& scheme : {u4, s8, e4m3, offsets}) {
      const QuantTensor q = random_weight(scheme, 3, 16, 1, {.act_order = true, .prescale = true, .bias = true});
      if (pack(q, {.layout = std::string(layout.name)}).ok()) seeds.push_back(saved(q, {.layout = std::string(layout.name)}));
    }
  QuantTensor q = random_weight(s8, 2, 8, 1);
  q.static_acts = StaticActs{0.5f, 3};
  q.scale2 = 2.0f;
  q.act_limit = 1.0f;
  seeds.push_back(saved(
      q, {}, {.m_max = 2, .epilogue = {.activation = Activation::silu}, .act_scheme = {DType::s8, {0, 0}, ZeroKind::integer}}));
  return seeds;
}
