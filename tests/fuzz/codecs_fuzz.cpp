// Codecs on hostile modules: whatever suffixes, dtypes, shapes and config a file has, detection and reading answer with a Status
// or with a valid QuantTensor, and what can be written again reads as the same tensor.
//
// Input: lines "suffix dtype dim dim ...", an empty line, a config as JSON, a zero byte, and bytes that fill the tensors in turn.
#include "fuzz/fuzz.hpp"

#include <sstream>

#include "golden/memory_module.hpp"

namespace {

using namespace nibble;
using fuzz::require;
using nibble::testing::MemoryModule;

constexpr std::int64_t kMaxElements = 1 << 12;

MemoryModule parse(std::string_view input) {
  const std::size_t zero = std::min(input.find('\0'), input.size());
  std::istringstream text{std::string(input.substr(0, zero))};
  const std::string_view data = input.substr(std::min(zero + 1, input.size()));
  MemoryModule m;
  std::size_t next = 0;
  for (std::string line; std::getline(text, line) && !line.empty() && m.tensors.size() < 16;) {
    std::istringstream words(line);
    std::string suffix, token;
    words >> suffix >> token;
    const DType dtype = parse_dtype(token).value_or(DType::s32);
    std::vector<std::int64_t> shape;
    std::int64_t elements = 1;
    for (std::int64_t dim = 0; shape.size() < 4 && words >> dim;) {
      // The file reader has checked that the bytes exist, so sizes beyond them are not tested here.
      if (dim < 0 || (dim > 0 && elements > kMaxElements / dim)) break;
      shape.push_back(dim);
      elements *= dim;
    }
    Tensor tensor(dtype, shape);
    for (std::byte& b : tensor.bytes) b = data.empty() ? std::byte{0} : static_cast<std::byte>(data[next++ % data.size()]);
    m.tensors.push_back({suffix, std::move(tensor)});
  }
  const std::string config{std::istreambuf_iterator<char>(text), {}};
  m.config.json = Json::parse(
      config, [](int depth, auto, const auto&) { return depth <= kMaxJsonDepth; }, false);
  return m;
}

/// The inverse of parse().
std::string print(const MemoryModule& m) {
  std::string text, data;
  for (const auto& [suffix, tensor] : m.tensors) {
    text += suffix + " " + std::string(name(tensor.dtype));
    for (const std::int64_t dim : tensor.shape) text += " " + std::to_string(dim);
    text += "\n";
    data.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return text + "\n" + m.config.json.dump() + '\0' + data;
}

/// Activation schemes that some format could have for this weight.
std::vector<ActScheme> acts_for(const QuantTensor& q) {
  const DType codes = q.scheme.codes == DType::e4m3 ? DType::e4m3 : DType::s8;
  if (!q.static_acts) return {{}, {codes, GroupShape::channel()}, {codes, GroupShape::group(q.scheme.group.k)}};
  return {{codes, GroupShape::tensor(), q.static_acts->zero == 0 ? ZeroKind::none : ZeroKind::integer}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const MemoryModule m = parse({reinterpret_cast<const char*>(data), size});
  std::vector<Note> notes;
  const auto q = m.read(notes);
  if (!fuzz::ok(q.status())) return 0;
  require(q->validate().ok());
  for (const codec::Format& format : codec::format_table()) {
    if (!format.can_write) continue;
    for (const ActScheme& act : acts_for(*q)) {
      const auto written = nibble::testing::write_module(format, *q, act);
      if (!written.ok()) continue;
      const auto back = written->read(notes);
      require(back.ok() && back->codes == q->codes && back->g_idx == q->g_idx && back->static_acts == q->static_acts);
    }
  }
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  std::vector<std::string> seeds;
  const auto add = [&](std::string_view format, DType codes, GroupShape group, ZeroKind zero, bool act_order) {
    QuantTensor q;
    q.scheme = {codes, zero, group, DType::f16};
    q.n = 32;
    q.k = 64;
    q.codes.assign(32 * 64, 2);
    q.scales = Tensor(DType::f16, {32, q.groups()});
    if (zero != ZeroKind::none) q.zeros = Tensor(zero == ZeroKind::integer ? DType::u8 : DType::f16, {32, q.groups()});
    if (act_order)
      for (std::int32_t k = 0; k < 64; ++k) q.g_idx.push_back(k % static_cast<std::int32_t>(q.groups()));
    const auto written = nibble::testing::write_module(*codec::find_format(format), q);
    require(written.ok());
    seeds.push_back(print(*written));
    std::vector<Note> notes;
    const auto back = parse(seeds.back()).read(notes);
    require(back.ok() && back->scheme == q.scheme && back->codes == q.codes);
  };
  add("awq", DType::u4, GroupShape::group(32), ZeroKind::integer, false);
  add("gptq", DType::u3b4, GroupShape::group(32), ZeroKind::none, true);
  add("gptq", DType::u8b128, GroupShape::channel(), ZeroKind::none, false);
  add("compressed-tensors", DType::u4b8, GroupShape::group(16), ZeroKind::none, true);
  add("compressed-tensors", DType::u5, GroupShape::channel(), ZeroKind::integer, false);
  add("nibble-codes", DType::u4, GroupShape::group(32), ZeroKind::offset, false);
  add("nibble-codes", DType::u3, GroupShape::channel(), ZeroKind::integer, false);
  add("nibble-codes", DType::u2, GroupShape::group(16), ZeroKind::real, false);
  seeds.push_back("weight s8 6 10\nweight_scale bf16 6 1\nweight_zero_point s8 6 1\ninput_scale f32 1\n\n{}");
  seeds.push_back("weight s8 6 10\nweight_scale f32 6\ninput_scale f32\ninput_zero_point s8 1\npre_quant_scale f16 10\n\n{}");
  seeds.push_back(
      "weight u8 3 8\nweight_scale f32 6 2\nweight_scale_2 f32\ninput_scale f32\npre_quant_scale bf16 8\n\n"
      "{\"quant_method\":\"modelopt\",\"quantization\":{\"quant_algo\":\"W4A8_AWQ\",\"group_size\":4}}");
  seeds.push_back("weight s8 6 10\na f32\nb f32 1\nbias s8 1 6\n\n{}");
  seeds.push_back(
      "weight e4m3 6 10\nweight_scale bf16 6 1\ninput_scale f32\n\n{\"quant_method\":\"fbgemm_fp8\",\"activation_scale_ub\":9}");
  seeds.push_back(
      "weight e4m3 6 10\nweight_scale f32 1 1 1 "
      "1\n\n{\"quant_method\":\"modelopt\",\"quantization\":{\"quant_algo\":\"FP8_PB_WO\"}}");
  seeds.push_back(
      "weight e4m3 6 10\nweight_scale_inv f32 2 3\nbias f16 6\n\n{\"quant_method\":\"fp8\",\"weight_block_size\":[4,4]}");
  seeds.push_back(
      "weight e4m3 6 12\nweight_scale f32 3 "
      "3\n\n{\"config_groups\":{\"g\":{\"weights\":{\"num_bits\":8,\"type\":\"float\",\"strategy\":\"block\","
      "\"block_structure\":[2,4]},\"input_activations\":{\"num_bits\":8,\"type\":\"float\",\"dynamic\":true,\"strategy\":"
      "\"group\",\"group_size\":4}}}}");
  seeds.push_back("weight bf16 6 10\nbias bf16 6\n\n{}");
  return seeds;
}
