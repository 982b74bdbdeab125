// Any canonical weight in any layout: refused, or packed and unpacked without a change, whatever its numbers are. Then its packed
// bytes are changed: unpacking and dequantizing may give other numbers, but read only those bytes.
#include <cmath>

#include "fuzz/fuzz.hpp"
#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "nibble/tensor.hpp"

using namespace nibble;

namespace {

constexpr const char* kSchemes[] = {"u4zg16",  "u4b8g32",   "u4zc",       "u2zg16", "u3b4g16", "u5zg8",   "u6b32g16",
                                    "u7zg32",  "u8b128g32", "u8zc",       "s8c",    "s8t",     "s8zg16",  "s8zc",
                                    "e4m3t",   "e4m3c",     "e4m3b16x32", "u4og16", "u4fg32",  "u2b2t",   "s8b8x16",
                                    "u4b8g64", "u4zg128",   "u8zb4x4",    "e5m2c",  "e2m1g32", "u4zb1x3", "u8b128t"};
constexpr DType kScales[] = {DType::f32, DType::f16, DType::bf16, DType::e4m3, DType::e8m0};
constexpr DType kZeros[] = {DType::u8, DType::s8, DType::f32, DType::f16, DType::bf16};

Tensor filled(DType dtype, std::vector<std::int64_t> shape, fuzz::Choices& choices) {
  Tensor tensor(dtype, std::move(shape));
  const std::string_view rest = choices.rest();
  for (std::size_t i = 0; i < tensor.bytes.size(); ++i)
    tensor.bytes[i] = rest.empty() ? std::byte{0x3c} : static_cast<std::byte>(rest[i % rest.size()]);
  return tensor;
}

QuantTensor weight_of(fuzz::Choices& choices) {
  QuantTensor q;
  const char* scheme = choices.of(kSchemes);
  q.scheme = Scheme::parse(scheme, choices.of(kScales))->weight;
  q.n = choices.below(80);
  q.k = choices.below(160);
  const DType zeros = choices.of(kZeros);
  const std::uint8_t parts = choices.byte();
  const std::vector<std::int64_t> blocks{q.scheme.group.rows(q.n), q.groups()};
  q.scales = filled(q.scheme.scale, blocks, choices);
  if (q.scheme.zero != ZeroKind::none) q.zeros = filled(zeros, blocks, choices);
  if ((parts & 1) != 0) q.bias = filled(DType::f16, {q.n}, choices);
  if ((parts & 2) != 0) q.prescale = filled(DType::f32, {q.k}, choices);
  if ((parts & 4) != 0)
    for (std::int64_t i = 0; i < q.k; ++i)
      q.g_idx.push_back(static_cast<std::int32_t>(i % std::max<std::int64_t>(1, q.groups())));
  const Tensor codes = filled(DType::u8, {q.n, q.k}, choices);
  const int mask = (1 << bits(q.scheme.codes)) - 1 + ((parts & 8) != 0 ? 0x80 : 0);  // bits too many are refused
  for (const std::byte code : codes.bytes) q.codes.push_back(static_cast<std::uint8_t>(static_cast<int>(code) & mask));
  return q;
}

/// Bit for bit; a NaN is a NaN.
bool same(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.shape != b.shape || a.bytes.empty()) return a.dtype == b.dtype && a.shape == b.shape;
  const std::size_t size = a.numel() == 0 ? 0 : a.bytes.size() / static_cast<std::size_t>(a.numel());
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const auto at = static_cast<std::size_t>(i) * size;
    const bool nan = std::isnan(a.at(i)) && std::isnan(b.at(i));
    if (!nan && std::memcmp(a.bytes.data() + at, b.bytes.data() + at, size) != 0) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto executor = make_executor(1);
  static const auto kLayouts = layout_table();
  fuzz::Choices choices(data, size);
  const Layout& layout = *choices.of(kLayouts);
  const QuantTensor q = weight_of(choices);
  const bool valid = fuzz::ok(q.validate());
  const auto packed = pack(q, {.layout = std::string(layout.name), .executor = executor.get(), .backend = Backend::cpu});
  fuzz::require(!fuzz::ok(packed.status()) || valid);
  if (!packed.ok()) return 0;
  const auto back = unpack(*packed);
  fuzz::require(back.ok() && back->codes == q.codes && same(back->scales, q.scales) && same(back->zeros, q.zeros) &&
                back->g_idx == q.g_idx);
  const std::span<const std::byte> bytes = packed->bytes();
  auto* writable = const_cast<std::byte*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size(); ++i) writable[i] ^= static_cast<std::byte>(data[i % size]);
  (void)fuzz::ok(unpack(*packed).status());
  const auto plan = Plan::dequantize(*packed, {.out = DType::bf16});
  if (!fuzz::ok(plan.status())) return 0;
  Tensor w(DType::bf16, {q.n, q.k});
  fuzz::require(fuzz::ok(plan->run(*packed, {}, TensorView(w.bytes.data(), w.dtype, {q.n, q.k}), {}, {}, executor.get())));
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  for (std::size_t scheme = 0; scheme < std::size(kSchemes); ++scheme)
    for (const int parts : {0, 3, 4})
      for (std::size_t layout = 0; layout < layout_table().size(); ++layout) {
        std::string seed;
        for (const int choice : {static_cast<int>(layout), static_cast<int>(scheme), parts % 3, 33, 128, 0, parts})
          seed += static_cast<char>(choice);
        seeds.push_back(seed + "<<nibble<<0123");
      }
  return seeds;
}
