// Any bytes as the header of a packed weight: refused, or a weight that can be unpacked and has that header. The packed bytes are as many
// as the weights of the seeds have.
#include "nibble/packed_header.hpp"

#include <memory>

#include "core/buffer.hpp"
#include "fuzz/fuzz.hpp"
#include "nibble/nibble.hpp"

using namespace nibble;

namespace {

PackedWeight seed(const char* scheme, bool act_order, const PackedWeight::Spec& spec = LinearSpec{.m_max = 4}) {
  std::vector<float> w(32 * 64);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(i % 17) - 8;
  QuantTensor q = *quantize(ConstTensorView(w.data(), {32, 64}), scheme);
  if (act_order)
    for (std::int32_t k = 0; k < 64; ++k) q.g_idx.push_back(k % 2);
  q.bias = Tensor(DType::f16, {32});
  if (act_order) q.prescale = Tensor(DType::f32, {64});
  return *std::visit([&](const auto& s) { return pack(q, s); }, spec);
}

std::vector<PackedWeight>& weights() {
  static std::vector<PackedWeight> all{
      seed("u4zg32", true),
      seed("s8c", false),
      seed("e4m3b16x32", false),
      seed("u4b8c", false),
      seed("u4zg32", false, LinearSpec{.epilogue = {.activation = Activation::silu, .glu = true}, .norm = {.kind = Norm::rms}}),
      seed("s8c", false, ConvSpec{.geometry = {.in_channels = 64, .out_channels = 32, .height = 4, .width = 4}})};
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string header(reinterpret_cast<const char*>(data), size);
  if (size >= kPackedPrefix)  // a mutation may have changed the size of the input
    for (std::size_t i = 0; i < 8; ++i) header[8 + i] = static_cast<char>(size >> (8 * i) & 0xff);
  (void)fuzz::ok(packed_layout(header).status());
  for (const PackedWeight& weight : weights()) {
    const auto owner = std::make_shared<int>(0);
    const auto read = packed_from_bytes(header, weight.bytes(), Backend::cpu, owner);
    if (!fuzz::ok(read.status())) continue;
    const auto again = packed_from_bytes(*packed_header(*read), weight.bytes(), Backend::cpu, owner);
    fuzz::require(again.ok() && again->spec() == read->spec() && again->desc().scheme == read->desc().scheme);
    fuzz::require(unpack(*read).ok());
  }
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> headers;
  for (const PackedWeight& weight : weights()) headers.push_back(*packed_header(weight));
  return headers;
}
