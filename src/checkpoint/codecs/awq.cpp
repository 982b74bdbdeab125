// AutoAWQ "gemm": 4-bit codes, eight output channels a word, input channels down the rows.
//
//   qweight  s32  [K, N/8]   column n in nibble {0,4,1,5,2,6,3,7}[n % 8] of word n / 8
//   qzeros   s32  [G, N/8]   the same
//   scales   f16  [G, N]     bf16 and f32 seen
//   bias     f16  [N]        optional
//
//   W[n,k] = (q − z)·s,  z as stored
//
// The exllama versions keep these tensors on disk; gemv is recognised and refused; gemv_fast, llm-awq and marlin are in
// unsupported.cpp. Quark writes these names with other orders and signed codes too, which are refused.
// Source: casper-hansen/AutoAWQ awq/modules/linear/{gemm,gemv,exllama}.py, awq/utils/packing_utils.py;
// amd/Quark quark/torch/export/main_export/quant_config_parser.py.
#include <cstring>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"awq", "awq_marlin", "auto-round", "intel/auto-round"};
constexpr Axis kWords[] = {Axis::k, Axis::n_words}, kZeros[] = {Axis::k_groups, Axis::n_words},
               kScales[] = {Axis::k_groups, Axis::n};
constexpr StoredTensor kTensors[] = {{"qweight", kWords}, {"qzeros", kZeros}, {"scales", kScales}, {"bias", axes::kN}};

/// Whether the config says zero_point=false, or AutoRound's equivalent.
bool claims_symmetric(const QuantConfig& config) {
  if (const auto zero_point = config_bool(config.json, {"zero_point"})) return !*zero_point;
  return config_bool(config.json, {"sym"}).value_or(false);
}

Result<Module> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Module m;
  m.format = "awq";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "scales", kFloats, {-1, -1}));
  const ConstTensorView& scales = *tensors.find("scales");
  const std::int64_t groups = scales.dim(0);
  m.n = scales.dim(1);
  if (m.n % 8 != 0)
    return error(StatusCode::corrupt_data,
                 "{}.scales is {}; AWQ has eight output channels a word, so N={} must be a multiple of 8", tensors.module,
                 describe(scales), m.n);
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "qweight", {DType::s32}, {-1, m.n / 8}));
  m.k = tensors.find("qweight")->dim(0);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "qzeros", {DType::s32}, {groups, m.n / 8}));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;

  const auto group_size = config_int(config.json, {"group_size", "q_group_size"});
  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group, infer_group(tensors, m.k, groups, group_size, config));
  const bool symmetric = claims_symmetric(config);
  m.scheme.codes = symmetric ? DType::u4b8 : DType::u4;
  m.scheme.zero = symmetric ? ZeroKind::none : ZeroKind::integer;
  m.scheme.scale = scales.dtype;

  const auto claimed_bits = config_int(config.json, {"bits", "w_bit"});
  const auto claimed_codes = code_type(claimed_bits.value_or(0), symmetric);
  if (claimed_codes && group_size) claim(m, config, {*claimed_codes, m.scheme.zero, configured_group(*group_size), scales.dtype});
  if (const std::string version = config_text(config.json, {"version"}); !version.empty() && version != "gemm")
    note(m.notes, kInfo, "{} says version \"{}\", the tensors are gemm", config_name(config), version);
  check_method(m, config, kMethods);
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView* qweight = tensors.find("qweight");
  const ConstTensorView* qzeros = tensors.find("qzeros");
  const ConstTensorView* scales = tensors.find("scales");
  if (qweight == nullptr || qzeros == nullptr || scales == nullptr) return std::nullopt;
  if (qweight->dtype != DType::s32 || qweight->rank != 2 || scales->rank != 2) return std::nullopt;

  const std::int64_t words = qweight->dim(1), n = scales->dim(1);
  const std::string version = config_text(config.json, {"version"});
  if (words == n) {  // the shape of GPTQ
    if (version.starts_with("exllama") && config_text(config.json, {"quant_method"}) == "awq")
      return error(
          StatusCode::unsupported,
          "{}: recognised but not yet supported: AWQ {} weights in the order of its kernel (qweight {}); keep the file as it "
          "was before loading",
          tensors.module, version, describe(*qweight));
    return std::nullopt;
  }
  const std::string order = config_text(config.json, {"pack_method"});  // a key of Quark
  if (!order.empty() && (order != "reorder" || claims_symmetric(config)))
    return error(StatusCode::unsupported, "{}: recognised but not yet supported: AWQ by Quark with {} (qweight {}, scales {})",
                 tensors.module, order != "reorder" ? "another order of codes (pack_method)" : "signed codes (zero_point=false)",
                 describe(*qweight), describe(*scales));
  if (words == n / 8) return analyse(tensors, config);
  if (qweight->dim(0) == scales->dim(0))
    return error(StatusCode::unsupported,
                 "{}: recognised but not yet supported: AWQ gemv (qweight {}, scales {}); use the gemm version", tensors.module,
                 describe(*qweight), describe(*scales));
  for (const int width : {2, 3, 8})
    if (words == words_of(width == 3 ? Packing::padded : Packing::dense, width, n) || words == words_of(Packing::dense, width, n))
      return error(StatusCode::unsupported, "{}: recognised but not yet supported: AWQ of {} bits (qweight {}, scales {})",
                   tensors.module, width, describe(*qweight), describe(*scales));
  return std::nullopt;
}

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "qweight", .order = CodeOrder::awq, .bits = 4, .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, config));
  const ConstTensorView& scales = *tensors.find("scales");
  QuantTensor q;
  q.scheme = {DType::u4, ZeroKind::integer, m.scheme.group, scales.dtype};
  q.n = m.n;
  q.k = m.k;
  q.codes = read_codes(tensors, *codes(tensors, m, config));
  const std::int64_t groups = scales.dim(0);
  q.zeros = zeros_tensor(
      decode_all({.order = CodeOrder::awq, .bits = 4, .n = m.n, .k = groups}, bytes_of(*tensors.find("qzeros"))), m.n, groups);
  q.scales = transposed(scales);
  if (m.scheme.zero == ZeroKind::none) fold_symmetric(q, notes);
  q.bias = read_bias(tensors, q.n);
  return q;
}

/// AWQ scales are 16-bit: f32 scales are narrowed when that changes none of them.
Result<Tensor> sixteen_bit_scales(const QuantTensor& q) {
  if (q.scales.dtype != DType::f32) return q.scales;
  Tensor half(DType::f16, q.scales.shape);
  for (std::int64_t i = 0; i < half.numel(); ++i) {
    const float s = q.scales.at(i);
    half.set(i, s);
    if (half.at(i) != s)
      return error(StatusCode::unsupported,
                   "awq cannot hold {}: its scales are 16-bit and the f32 scale {} at row {}, group {} is no f16",
                   q.scheme.name(), s, i / q.groups(), i % q.groups());
  }
  return half;
}

Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_writable("awq", q));
  NIBBLE_RETURN_IF_ERROR(check_weight_only("awq", q, act));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "awq cannot hold {} [{},{}]: {}", q.scheme.name(), q.n, q.k, why);
  };
  const bool asymmetric = q.scheme.codes == DType::u4 && q.scheme.zero == ZeroKind::integer;
  const bool symmetric = q.scheme.codes == DType::u4b8 && q.scheme.zero == ZeroKind::none;
  if (!asymmetric && !symmetric) return refuse("it has 4-bit codes with integer zero points, or symmetric ones (u4b8)");
  if (!q.g_idx.empty()) return refuse("it has no act-order (g_idx)");
  if (q.n % 8 != 0) return refuse("N must be a multiple of 8");
  if (q.scheme.group.n != 1) return refuse("scales are per output channel");
  if (q.scheme.group.k != 0 && q.k % q.scheme.group.k != 0) return refuse("K must be a multiple of the group size");

  NIBBLE_ASSIGN_OR_RETURN(const Tensor scales, sixteen_bit_scales(q));
  const std::int64_t groups = q.groups();
  std::vector<std::uint8_t> zeros(static_cast<std::size_t>(groups * q.n), 8);
  if (asymmetric) std::memcpy(zeros.data(), by_group(q.zeros).bytes.data(), zeros.size());
  std::vector<EncodedTensor> out;
  out.push_back({"qweight", word_tensor(pack_awq(transpose(q.codes, q.n, q.k).data(), q.k, q.n), q.k, q.n / 8)});
  out.push_back({"qzeros", word_tensor(pack_awq(zeros.data(), groups, q.n), groups, q.n / 8)});
  out.push_back({"scales", by_group(scales)});
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<Json> write_config(const WrittenCheckpoint& written) {
  NIBBLE_RETURN_IF_ERROR(check_uniform("awq", written));
  const std::vector<WrittenModule>& modules = written.modules;
  bool zero_point = false;
  for (const WrittenModule& module : modules) zero_point |= module.scheme.zero == ZeroKind::integer;
  return Json{{"quant_method", "awq"},
              {"version", "gemm"},
              {"bits", 4},
              {"group_size", modules.empty() ? 128 : config_group_size(modules.front().scheme.group)},
              {"zero_point", zero_point},
              {"modules_to_not_convert", not_quantized(written)}};
}

}  // namespace

const Format kAwq{"awq",    "AutoAWQ gemm: 4-bit codes with integer zero points per group",
                  true,     kMethods,
                  kTensors, detect,
                  read,     codes,
                  write,    write_config};

}  // namespace nibble::codec
