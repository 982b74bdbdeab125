// FP8: one e4m3 byte a weight, as two formats that differ in the name and the meaning of their config.
//
//   float-quantized    weight            e4m3  [N,K]           compressed-tensors; ModelOpt FP8, FP8_PER_CHANNEL_PER_TOKEN and
//                      weight_scale      f32   see below       FP8_PB_WO; Quark; FBGEMM; Hugging Face "fp8" without blocks
//   fp8                weight            e4m3  [N,K]           Hugging Face "fp8" (DeepSeek, Qwen)
//                      weight_scale_inv  f32   see below       a multiplier, whatever it is called
//   both               input_scale, pre_quant_scale            see act_scales.hpp
//                      bias              f16   [N]             optional
//                      weight.transposed e4m3  [K,N]           in place of weight, of experts that are stored together (stacks.hpp)
//
//   scales  [], [1] or [1,1]          one
//           [N] or [N,1]              one per channel
//           [N,G]                     one per group of input channels
//           [⌈N/bn⌉,⌈K/bk⌉]           one per block, [⌈N/bn⌉,1,⌈K/bk⌉,1] or [] from ModelOpt; the config gives bn and bk, else 128
//
//   W[n,k] = q·s
//
// Source: vllm-project/compressed-tensors src/compressed_tensors/compressors; claims.hpp;
// huggingface/transformers src/transformers/integrations/{finegrained_fp8,fbgemm_fp8}.py.
#include <algorithm>
#include <cstring>
#include <limits>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/act_scales.hpp"
#include "checkpoint/config/claims.hpp"
#include "checkpoint/config/ct_config.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kFloatMethods[] = {"compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "fp8", "auto-round"};
constexpr std::string_view kFp8Methods[] = {"fp8", "auto-round"};
constexpr std::string_view kColumns = "weight.transposed";
constexpr StoredTensor kFloatTensors[] = {{"weight", axes::kCodes},
                                          {"weight_scale", axes::kGroups},
                                          {kColumns},
                                          {"weight_zero_point", axes::kGroups},
                                          {"input_scale"},
                                          {"input_zero_point"},
                                          {"pre_quant_scale", axes::kK},
                                          {"bias", axes::kN}};
constexpr StoredTensor kFp8Tensors[] = {
    {"weight", axes::kCodes}, {"weight_scale_inv", axes::kGroups}, {kColumns}, {"input_scale"}, {"activation_scale"},
    {"bias", axes::kN}};
constexpr GroupShape kUsualBlock = GroupShape::block(128, 128);

struct Variant {
  std::string_view format, scales;
  std::span<const std::string_view> methods;
};
constexpr Variant kFloat{"float-quantized", "weight_scale", kFloatMethods}, kHf{"fp8", "weight_scale_inv", kFp8Methods};

/// The claims of a config that is not in the form of compressed-tensors.
std::optional<Scheme> claims(const ModuleTensors& tensors, const QuantConfig& config, DType scale) {
  const auto scheme = [&](GroupShape weight, ActScheme act) { return Scheme{{DType::e4m3, ZeroKind::none, weight, scale}, act}; };
  const ActScheme known{DType::e4m3, GroupShape::tensor()}, per_token{DType::e4m3, GroupShape::channel()};
  const std::string method = config_text(config.json, {"quant_method", "method"});
  if (method == "fbgemm_fp8") return scheme(GroupShape::channel(), per_token);
  if (method == "fp8") {
    if (const auto block = config_block(config.json, {"weight_block_size"}))
      return scheme(*block, {DType::e4m3, GroupShape::group(block->k)});
    const std::string acts = config_text(config.json, {"activation_scheme"});
    return scheme(GroupShape::tensor(), acts == "static" ? known : acts == "dynamic" ? per_token : ActScheme{});
  }
  if (method.ends_with("auto-round")) {
    const std::int64_t size = config_int(config.json, {"act_group_size"}).value_or(-1);
    const auto block = config_block(config.json, {"group_size"});
    const std::string type = config_text(config.json, {"act_data_type"});
    if (config_int(config.json, {"act_bits"}).value_or(16) != 8 || !type.starts_with("fp")) return std::nullopt;
    const bool dynamic = config_bool(config.json, {"act_dynamic"}).value_or(true);
    if (dynamic && size == 0) return std::nullopt;  // one scale per call
    return scheme(block                                           ? *block
                  : config_int(config.json, {"group_size"}) == -1 ? GroupShape::channel()
                                                                  : GroupShape::tensor(),
                  !dynamic ? known : ActScheme{DType::e4m3, configured_group(size)});
  }
  if (is_quark(config)) return quark_scheme(tensors.module, config, ZeroKind::none, scale);
  const std::string algorithm = modelopt_algorithm(tensors.module, config);
  if (algorithm == "fp8") return scheme(GroupShape::tensor(), known);
  if (algorithm == "fp8_per_channel_per_token") return scheme(GroupShape::channel(), per_token);
  if (algorithm == "fp8_pb_wo") return scheme(kUsualBlock, {});
  return std::nullopt;
}

/// The blocks to which the scales belong; an ambiguous shape is resolved by `preferred`, the config's.
Result<GroupShape> infer_scale_shape(const ModuleTensors& tensors, const Variant& v, const Module& m,
                                     std::optional<GroupShape> preferred, std::optional<std::int64_t> group_size,
                                     const QuantConfig& config) {
  const ConstTensorView& scale = *tensors.find(v.scales);
  const bool flat = scale.rank == 4 && scale.dim(1) == 1 && scale.dim(3) == 1;
  const bool single = scale.rank == 0;  // ModelOpt's, of one block
  const bool matrix = one_of(scale.dtype, kFloats) && (scale.rank == 2 || flat || single);
  const std::int64_t rows = !matrix ? 0 : single ? 1 : scale.dim(0), cols = !matrix ? 0 : single ? 1 : scale.dim(flat ? 2 : 1);
  const auto fits = [&](const GroupShape& block) { return block.rows(m.n) == rows && block.cols(m.k) == cols; };
  if (matrix && preferred && preferred->n >= 1 && preferred->k > 0 && fits(*preferred)) return *preferred;
  if (flat || (matrix && rows != m.n && (rows != 1 || cols != 1))) {
    if (fits(kUsualBlock)) return kUsualBlock;
    if (rows >= 1 && cols >= 1 && m.n % rows == 0 && m.k % cols == 0)
      return GroupShape::block(static_cast<std::int32_t>(m.n / rows), static_cast<std::int32_t>(m.k / cols));
    return error(StatusCode::corrupt_data, "{}.{} is {}; W[{},{}] cannot be cut into that many blocks{}", tensors.module,
                 v.scales, describe(scale), m.n, m.k,
                 preferred ? fmt::format(", {}×{} of {} included", preferred->n, preferred->k, config_name(config)) : "");
  }
  return infer_scale_group(tensors, v.scales, m.n, m.k, group_size, config);
}

Result<Module> analyse(const ModuleTensors& tensors, const Variant& v, const QuantConfig& config) {
  Module m;
  m.format = v.format;
  NIBBLE_RETURN_IF_ERROR(refuse_online_transforms(tensors, config));
  const bool columns = tensors.find(kColumns) != nullptr;
  const std::string_view weight = columns ? kColumns : "weight";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, weight, {DType::e4m3}, {-1, -1}));
  m.n = tensors.find(weight)->dim(columns ? 1 : 0);
  m.k = tensors.find(weight)->dim(columns ? 0 : 1);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  const ConstTensorView& scale = *tensors.find(v.scales);
  const auto entries = ct_groups(config, CtType::floating);
  const std::optional<Scheme> claimed = claims(tensors, config, scale.dtype);
  std::optional<GroupShape> block = claimed ? std::optional(claimed->weight.group) : std::nullopt;
  for (const CtGroup& entry : entries)
    if (!block && entry.strategy == "block") block = entry.block;
  if (!block && v.format == kHf.format && config.source.empty()) block = kUsualBlock;
  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group, infer_scale_shape(tensors, v, m, block, ct_group_size(entries, m.k, &scale), config));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  m.scheme.codes = DType::e4m3;
  m.scheme.zero = ZeroKind::none;
  m.scheme.scale = scale.dtype;
  if (claimed)
    claim(m, config, claimed->weight, claimed->act);
  else
    claim_ct(m, tensors.module, config, entries,
             [](const CtGroup& e) { return e.bits == 8 ? std::optional(DType::e4m3) : std::nullopt; });
  check_method(m, config, v.methods);
  NIBBLE_RETURN_IF_ERROR(analyse_activations(tensors, m, config));
  return m;
}

/// Scales that are only powers of two (MXFP8) belong to another format.
std::optional<Result<Module>> detect(const ModuleTensors& tensors, const Variant& v, const QuantConfig& config) {
  const ConstTensorView *weight = tensors.find("weight"), *scale = tensors.find(v.scales);
  if (weight == nullptr) weight = tensors.find(kColumns);
  if (weight == nullptr || weight->dtype != DType::e4m3 || scale == nullptr || one_of(scale->dtype, {DType::u8, DType::e8m0}) ||
      is_quark_transposed(tensors.module, config, *scale))
    return std::nullopt;
  return analyse(tensors, v, config);
}

std::optional<StoredCodes> codes(const ModuleTensors& tensors, const Module& m, const QuantConfig&) {
  if (tensors.find("weight") == nullptr) return std::nullopt;
  return StoredCodes{.suffix = "weight", .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Variant& v, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, v, config));
  if (const ConstTensorView* zeros = tensors.find("weight_zero_point")) {
    const std::span bytes(bytes_of(*zeros), storage_bytes(zeros->dtype, static_cast<std::uint64_t>(zeros->numel())));
    if (!std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; }))
      return error(StatusCode::unsupported, "{}.weight_zero_point is not all zero: e4m3 with zero points is not supported",
                   tensors.module);
  }
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  if (const ConstTensorView* columns = tensors.find(kColumns)) {
    const Tensor rows = transposed(*columns);
    q.codes.resize(rows.bytes.size());
    std::memcpy(q.codes.data(), rows.bytes.data(), rows.bytes.size());
  } else {
    q.codes = read_codes(tensors, *codes(tensors, m, config));
  }
  q.scales = copy_as(*tensors.find(v.scales), {m.scheme.group.rows(m.n), q.groups()});
  q.bias = read_bias(tensors, q.n);
  read_activations(tensors, m, q, notes);
  if (m.claimed && m.claimed->act.codes != DType::none && config_text(config.json, {"quant_method"}) == "fbgemm_fp8") {
    const auto limit = config_number(config.json, {"activation_scale_ub"});
    if (limit && *limit > 0 && *limit <= std::numeric_limits<float>::max())
      q.act_limit = static_cast<float>(*limit);
    else if (limit)
      note(notes, kWarning, "{} says activation_scale_ub={}, which is no limit: ignored it", config_name(config), *limit);
  }
  return q;
}

Status refuse(const Variant& v, const QuantTensor& q, const ActScheme& act, std::string_view why) {
  return error(StatusCode::unsupported, "{} cannot hold {} [{},{}]: {}", v.format, Scheme{q.scheme, act}.name(), q.n, q.k, why);
}

Result<std::vector<EncodedTensor>> write_float(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_ct_writable("float-quantized", q, act));
  if (q.scheme.codes != DType::e4m3 || q.scheme.zero != ZeroKind::none)
    return refuse(kFloat, q, act, "codes are e4m3 without zero points");
  if (q.scheme.group.n == 0 && q.scheme.group.k != 0)
    return refuse(kFloat, q, act, "scales are per tensor, channel, group or block");
  std::vector<EncodedTensor> out;
  out.push_back({"weight", code_tensor(q)});
  out.push_back({"weight_scale", ct_scale(q.scales, q.scheme.group)});
  encode_activations(q, act, out);
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<Json> write_float_config(const WrittenCheckpoint& written) { return ct_config("float-quantized", written); }

Result<std::vector<EncodedTensor>> write_fp8(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_writable("fp8", q));
  const GroupShape& group = q.scheme.group;
  if (q.scheme.codes != DType::e4m3 || q.scheme.zero != ZeroKind::none || group.n < 1 || group.k < 1)
    return refuse(kHf, q, act, "nibble writes e4m3 with a scale per block; float-quantized holds others");
  if (act != ActScheme{DType::e4m3, GroupShape::group(group.k)} || q.static_acts)
    return refuse(kHf, q, act,
                  fmt::format("its activations are quantized per token and {} input channels (e4m3g{})", group.k, group.k));
  Tensor scales(DType::f32, q.scales.shape);
  for (std::int64_t i = 0; i < scales.numel(); ++i) scales.set(i, q.scales.at(i));
  std::vector<EncodedTensor> out;
  out.push_back({"weight", code_tensor(q)});
  out.push_back({"weight_scale_inv", std::move(scales)});
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<Json> write_fp8_config(const WrittenCheckpoint& written) {
  NIBBLE_RETURN_IF_ERROR(check_uniform("fp8", written));
  const GroupShape block = written.modules.empty() ? kUsualBlock : written.modules.front().scheme.group;
  return Json{{"quant_method", "fp8"},
              {"activation_scheme", "dynamic"},
              {"fmt", "e4m3"},
              {"weight_block_size", {block.n, block.k}},
              {"modules_to_not_convert", not_quantized(written)}};
}

template <const Variant& V>
std::optional<Result<Module>> detect_as(const ModuleTensors& tensors, const QuantConfig& config) {
  return detect(tensors, V, config);
}
template <const Variant& V>
Result<QuantTensor> read_as(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  return read(tensors, V, config, notes);
}

}  // namespace

const Format kFloatQuantized{"float-quantized",
                             "compressed-tensors float-quantized: FP8 weights; ModelOpt, Quark and FBGEMM FP8 are read",
                             true,
                             kFloatMethods,
                             kFloatTensors,
                             detect_as<kFloat>,
                             read_as<kFloat>,
                             codes,
                             write_float,
                             write_float_config};
const Format kFp8{"fp8",        "Hugging Face fp8: FP8 weights, a scale per block of 128×128",
                  true,         kFp8Methods,
                  kFp8Tensors,  detect_as<kHf>,
                  read_as<kHf>, codes,
                  write_fp8,    write_fp8_config};

}  // namespace nibble::codec
