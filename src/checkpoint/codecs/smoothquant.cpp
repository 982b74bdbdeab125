// SmoothQuant as torch-int stores it: int8 from end to end, each layer with the product of its scales.
//
//   weight  s8   [N,K]
//   a       f32  []     s_x·s_w / s_y, or s_x·s_w where outputs are floats
//   b       f32  []     s_b / s_y, of a bias of integers
//   bias    s8   [1,N]  or [N]; s32, or a float without b; optional
//
//   y = a·(x·Wᵀ) + b·bias, where x are codes, and so is y unless outputs are floats
//
// The factors of the product are not stored, so a becomes the weight's scale and 1 that of the activations: W[n,k] = q·a, and inputs and
// outputs keep the checkpoint's units.
// Source: Guangxuan-Xiao/torch-int torch_int/nn/linear.py.
#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

constexpr StoredTensor kTensors[] = {{"weight", axes::kCodes}, {"a"}, {"b"}, {"bias", axes::kN}};

Result<Module> analyse(const ModuleTensors& tensors) {
  Module m;
  m.format = "smoothquant";
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight", {DType::s8}, {-1, -1}));
  m.n = tensors.find("weight")->dim(0);
  m.k = tensors.find("weight")->dim(1);
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  NIBBLE_RETURN_IF_ERROR(expect_scalar(tensors, "a", kFloats));
  m.has_bias = tensors.find("bias") != nullptr;
  if (m.has_bias) {
    const ConstTensorView& bias = *tensors.find("bias");
    const std::initializer_list<DType> types{DType::s8, DType::s32, DType::f32, DType::f16, DType::bf16};
    if (!expect(tensors, "bias", types, {1, m.n}).ok()) NIBBLE_RETURN_IF_ERROR(expect(tensors, "bias", types, {m.n}));
    if (tensors.find("b") != nullptr || !is_compute_float(bias.dtype))
      NIBBLE_RETURN_IF_ERROR(expect_scalar(tensors, "b", kFloats));
  }
  m.scheme = {DType::s8, ZeroKind::none, GroupShape::tensor(), tensors.find("a")->dtype};
  note(m.notes, kInfo,
       "a is the product of the scales of weights, activations and outputs: it stands as the weight's scale, and "
       "inputs and outputs are in the units of the checkpoint's int8 codes");
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig&) {
  const ConstTensorView* weight = tensors.find("weight");
  if (weight == nullptr || weight->dtype != DType::s8 || tensors.find("a") == nullptr) return std::nullopt;
  return analyse(tensors);
}

// docs: begin read
std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "weight", .order = CodeOrder::bytes, .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>&) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  q.codes = read_codes(tensors, *codes(tensors, m, config));
  q.scales = copy_as(*tensors.find("a"), {1, 1});
  q.static_acts = StaticActs{};
  if (!m.has_bias) return q;
  const Tensor bias = read_bias(tensors, m.n);
  const ConstTensorView* b = tensors.find("b");
  q.bias = Tensor(DType::f32, {m.n});
  for (std::int64_t n = 0; n < m.n; ++n) q.bias.set(n, bias.at(n) * (b == nullptr ? 1.0f : read_scalar(*b)));
  return q;
}
// docs: end read

}  // namespace

// docs: begin row
const Format kSmoothQuant{"smoothquant", "SmoothQuant (torch-int): int8 weights, one scale that includes the activations'",
                          false,         {},
                          kTensors,      detect,
                          read,          codes,
                          nullptr,       nullptr};
// docs: end row

}  // namespace nibble::codec
