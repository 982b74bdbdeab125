// MXFP4 as gpt-oss has it, for the experts of a layer together (stacks.hpp): of one
//
//   blocks  u8  [N,K/32,16]  32 e2m1 codes of a row, two to a byte, the first one in the low half
//   scales  u8  [N,K/32]     exponents: 2^(scale − 127), which is e8m0
//   bias    bf16 [N]         optional
//
//   W[n,k] = e2m1(code)·2^(scale − 127)
//
// Source: huggingface/transformers src/transformers/integrations/mxfp4.py; openai/gpt-oss gpt_oss/torch/weights.py.
#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"mxfp4"};
constexpr StoredTensor kTensors[] = {{"blocks"}, {"scales"}, {"bias", axes::kN}};
constexpr std::int64_t kGroup = 32;
constexpr WeightScheme kScheme{DType::e2m1, ZeroKind::none, GroupShape::group(kGroup), DType::e8m0};

Result<Module> analyse(const ModuleTensors& tensors) {
  Module m;
  m.format = "mxfp4";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "blocks", {DType::u8}, {-1, -1, kGroup / 2}));
  const ConstTensorView& blocks = *tensors.find("blocks");
  m.n = blocks.dim(0);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, blocks.dim(1)));
  m.k = blocks.dim(1) * kGroup;
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "scales", {DType::u8, DType::e8m0}, {m.n, m.k / kGroup}));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  m.scheme = kScheme;
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView* blocks = tensors.find("blocks");
  if (blocks == nullptr || blocks->dtype != DType::u8 || tensors.find("scales") == nullptr) return std::nullopt;
  Result<Module> m = analyse(tensors);
  if (m.ok()) check_method(*m, config, kMethods);
  return m;
}

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "blocks", .order = CodeOrder::rows, .bits = 4, .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>&) {
  if (tensors.part) return error(StatusCode::unsupported, "module {} is of MXFP4, which is read whole", tensors.module);
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  q.codes = read_codes(tensors, *codes(tensors, m, config));
  q.scales = copy_as(*tensors.find("scales"), {q.n, q.groups()});
  q.scales.dtype = DType::e8m0;
  q.bias = read_bias(tensors, q.n);
  return q;
}

Result<std::vector<EncodedTensor>> encode(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(q.validate());
  NIBBLE_RETURN_IF_ERROR(check_weight_only(kMethods[0], q, act));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "mxfp4 cannot hold {} [{},{}]: {}", q.scheme.name(), q.n, q.k, why);
  };
  if (q.scheme != kScheme) return refuse("it has e2m1 codes in groups of 32 with scales of e8m0");
  if (!q.g_idx.empty()) return refuse("it has no act-order");
  if (q.scale2 || !q.prescale.empty() || q.act_limit)
    return refuse("it has no second-level scale, and no pre-scale or limit of activations");
  const std::int64_t groups = q.k / kGroup;
  Tensor blocks(DType::u8, {q.n, groups, kGroup / 2}), scales(DType::u8, {q.n, groups});
  for (std::size_t i = 0; i < blocks.bytes.size(); ++i)
    blocks.bytes[i] = static_cast<std::byte>(q.codes[2 * i] | q.codes[2 * i + 1] << 4);
  scales.bytes = q.scales.bytes;
  std::vector<EncodedTensor> out;
  out.push_back({"blocks", std::move(blocks)});
  out.push_back({"scales", std::move(scales)});
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<Json> write_config(const WrittenCheckpoint& written) {
  NIBBLE_RETURN_IF_ERROR(check_weights_alone(kMethods[0], written));
  return Json{{"quant_method", kMethods[0]}, {"modules_to_not_convert", not_quantized(written)}};
}

}  // namespace

const Format kMxfp4{.name = "mxfp4",
                    .summary = "MXFP4: 4-bit floats in blocks of 32 with exponents for scales, as gpt-oss has its experts",
                    .can_write = true,
                    .methods = kMethods,
                    .tensors = kTensors,
                    .detect = detect,
                    .read = read,
                    .codes = codes,
                    .encode = encode,
                    .write_config = write_config,
                    .experts_together = true};

}  // namespace nibble::codec
