// ModelOpt INT4-AWQ (W4A16_AWQ, W4A8_AWQ): 4-bit codes, two output channels a byte.
//
//   weight           u8    [N/2,K]  row 2i of W in the low nibbles of row i, row 2i + 1 in the high ones; two's complement, −8 … 7
//   weight_scale     f32   [N,G]    or f16, bf16; G divides K
//   weight_scale_2   f32   []       W4A8: largest |q·s| / 448, one for layers with the same input
//   pre_quant_scale  bf16  [K]      optional; where a norm is in front, it has been folded into that
//   input_scale      f32   []       W4A8; see act_scales.hpp
//   bias             f16   [N]      optional
//
//   W[n,k] = q·s
//
// weight_scale is not divided by weight_scale_2: ModelOpt quantizes the weight twice, to int4 with s and what that gives to e4m3 in
// steps of s_2, of which the file has the int4 codes. TensorRT-LLM's kernels do the second step while running, e4m3(q·s / s_2), and
// multiply sums by s_2. nibble leaves that rounding out.
// Source: NVIDIA/Model-Optimizer modelopt/torch/export/{quant_utils,unified_export_hf,model_config}.py;
// NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/linear.py.
#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/act_scales.hpp"
#include "checkpoint/config/claims.hpp"
#include "checkpoint/io/bits.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"modelopt"};
constexpr Axis kPairs[] = {Axis::n_pairs, Axis::k};
constexpr StoredTensor kTensors[] = {{"weight", kPairs}, {"weight_scale", axes::kGroups}, {"weight_scale_2"},
                                     {"input_scale"},    {"pre_quant_scale", axes::kK},   {"bias", axes::kN}};

bool is_int4(std::string_view algorithm) { return algorithm == "w4a16_awq" || algorithm == "w4a8_awq"; }

Status check_scale(const ModuleTensors& tensors, std::int64_t n, std::int64_t k) {
  const ConstTensorView* scale = tensors.find("weight_scale");
  if (scale != nullptr && one_of(scale->dtype, kFloats) && scale->rank == 2 && scale->dim(0) == n && scale->dim(1) >= 1 &&
      scale->dim(1) <= k)
    return {};
  return error(
      StatusCode::corrupt_data,
      "{}.weight_scale is {}, expected f16|bf16|f32 [{},groups] beside the weight {}, which has two output channels a byte",
      tensors.module, scale == nullptr ? "missing" : describe(*scale), n, describe(*tensors.find("weight")));
}

/// Groups of one size: ModelOpt cuts K into as many equal runs as there are scales.
Result<GroupShape> scale_group(const ModuleTensors& tensors, std::int64_t k, std::optional<std::int64_t> configured,
                               const QuantConfig& config) {
  const std::int64_t groups = tensors.find("weight_scale")->dim(1);
  if (configured && groups > 1 && configured_group(*configured).cols(k) == groups && k % *configured != 0)
    return error(StatusCode::corrupt_data, "{}: K={} is no multiple of group_size={} in {}", tensors.module, k, *configured,
                 config_name(config));
  return infer_group(tensors, k, groups, configured, config);
}

Result<Module> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Module m;
  m.format = "modelopt-int4";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight", {DType::u8}, {-1, -1}));
  m.n = 2 * tensors.find("weight")->dim(0);
  m.k = tensors.find("weight")->dim(1);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(check_scale(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  const auto size = modelopt_group_size(tensors.module, config);
  m.scheme.codes = DType::u4b8;
  m.scheme.zero = ZeroKind::none;
  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group, scale_group(tensors, m.k, size, config));
  m.scheme.scale = tensors.find("weight_scale")->dtype;

  const std::string algorithm = modelopt_algorithm(tensors.module, config);
  const bool fp8_acts = algorithm == "w4a8_awq";
  if (is_int4(algorithm)) {
    const GroupShape group = size ? configured_group(*size) : m.scheme.group;  // the config.json of ModelOpt 0.47 says no size
    claim(m, config, {DType::u4b8, ZeroKind::none, group, m.scheme.scale},
          fp8_acts ? ActScheme{DType::e4m3, GroupShape::tensor()} : ActScheme{});
  }
  if (tensors.find("weight_scale_2") != nullptr) {
    NIBBLE_RETURN_IF_ERROR(expect_scalar(tensors, "weight_scale_2", kFloats));
    note(m.notes, kInfo,
         "TensorRT-LLM rounds these weights to e4m3 in steps of weight_scale_2 while it runs them; nibble does not: "
         "W is the code times weight_scale");
  } else if (fp8_acts) {
    note(m.notes, kWarning, "{} says {}, but weight_scale_2 is missing", config_name(config), algorithm);
  }
  check_method(m, config, kMethods);
  NIBBLE_RETURN_IF_ERROR(analyse_activations(tensors, m, config));
  return m;
}

/// Bytes are of this format where each row of them has two rows of scales, or where the config says so.
std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView *weight = tensors.find("weight"), *scale = tensors.find("weight_scale");
  if (weight == nullptr || weight->dtype != DType::u8 || weight->rank > 2 || is_quark(config)) return std::nullopt;
  if (scale != nullptr && one_of(scale->dtype, {DType::u8, DType::e4m3, DType::e8m0})) return std::nullopt;
  const bool two_scales = scale != nullptr && scale->rank == 2 && weight->rank == 2 && scale->dim(0) == 2 * weight->dim(0);
  if (!two_scales && !is_int4(modelopt_algorithm(tensors.module, config))) return std::nullopt;
  return analyse(tensors, config);
}

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "weight", .order = CodeOrder::row_pairs, .bits = 4, .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, config));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  q.codes = read_codes(tensors, *codes(tensors, m, config));
  q.scales = copy_as(*tensors.find("weight_scale"), {q.n, q.groups()});
  q.bias = read_bias(tensors, q.n);
  read_activations(tensors, m, q, notes);
  return q;
}

}  // namespace

const Format kModelOptInt4{"modelopt-int4",
                           "ModelOpt INT4-AWQ: W4A16_AWQ and W4A8_AWQ, two output channels a byte",
                           false,
                           kMethods,
                           kTensors,
                           detect,
                           read,
                           codes,
                           nullptr,
                           nullptr};

}  // namespace nibble::codec
