// compressed-tensors "int-quantized" (and naive-quantized, ModelOpt W8A16 and W8A8): one signed byte a weight.
//
//   weight             s8   [N,K]
//   weight_scale       f16  [N,G], [N,1], [N] or [1]; or bf16, f32
//   weight_zero_point  s8   like the scales; absent when symmetric
//   input_scale        f32  [1]  static activation scale; absent when activations are quantized while running, or not at all
//   bias               f16  [N]  optional
//
//   W[n,k] = (q − z)·s
//
// How activations are quantized is known to the config alone; it is in Module::claimed.
// Source: vllm-project/compressed-tensors src/compressed_tensors/compressors.
#include <string>

#include "formats/ct_config.hpp"
#include "formats/table.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"compressed-tensors", "modelopt"};
constexpr std::string_view kSuffixes[] = {"weight",      "weight_scale",     "weight_zero_point",
                                          "input_scale", "input_zero_point", "bias"};

Result<Module> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Module m;
  m.format = "int-quantized";
  NIBBLE_RETURN_IF_ERROR(refuse_online_transforms(tensors, config));
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight", {DType::s8}, {-1, -1}));
  m.n = tensors.find("weight")->dim(0);
  m.k = tensors.find("weight")->dim(1);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  const auto entries = ct_groups(config);
  const ConstTensorView* scale = tensors.find("weight_scale");
  NIBBLE_ASSIGN_OR_RETURN(m.scheme.group,
                          infer_scale_group(tensors, "weight_scale", m.n, m.k, ct_group_size(entries, m.k, scale), config));
  const ConstTensorView* zeros = tensors.find("weight_zero_point");
  if (zeros != nullptr && (zeros->dtype != DType::s8 || zeros->rank != scale->rank || zeros->shape != scale->shape))
    return error(StatusCode::corrupt_data, "{}.weight_zero_point is {}, expected s8 in the shape of weight_scale {}",
                 tensors.module, describe(*zeros), describe(*scale));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  m.scheme.codes = DType::s8;
  m.scheme.zero = zeros == nullptr ? ZeroKind::none : ZeroKind::integer;
  m.scheme.scale = scale->dtype;

  claim_ct(m, config, entries, [](const CtGroup& e) { return e.bits == 8 ? std::optional(DType::s8) : std::nullopt; });
  check_method(m, config, kMethods);
  const bool has_input_scale = tensors.find("input_scale") != nullptr;
  if (m.claimed) {
    const bool is_static = m.claimed->act.codes != DType::none && m.claimed->act.group == GroupShape::tensor();
    if (is_static != has_input_scale)
      note(m.notes, kWarning, "{} says {}, but input_scale is {}", config_name(config), m.claimed->name(),
           has_input_scale ? "present" : "missing");
  } else if (has_input_scale) {
    note(m.notes, kInfo, "input_scale is present: activations are quantized with one static scale");
  }
  if (tensors.find("input_zero_point") != nullptr)
    note(m.notes, kWarning, "input_zero_point is present: nibble quantizes activations symmetrically and does not use it");
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView* weight = tensors.find("weight");
  if (weight == nullptr || weight->dtype != DType::s8 || tensors.find("weight_scale") == nullptr) return std::nullopt;
  return analyse(tensors, config);
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>&) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, config));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(bytes_of(*tensors.find("weight")));
  q.codes.assign(codes, codes + m.n * m.k);
  const std::int64_t rows = m.scheme.group.rows(m.n);
  q.scales = copy_as(*tensors.find("weight_scale"), {rows, q.groups()});
  if (const ConstTensorView* zeros = tensors.find("weight_zero_point")) q.zeros = copy_as(*zeros, {rows, q.groups()});
  q.bias = read_bias(tensors, q.n);
  return q;
}

}  // namespace

const Format kIntQuantized{"int-quantized",
                           "compressed-tensors int-quantized: one signed byte a weight",
                           false,
                           kMethods,
                           kSuffixes,
                           detect,
                           read,
                           nullptr,
                           nullptr};

}  // namespace nibble::codec
