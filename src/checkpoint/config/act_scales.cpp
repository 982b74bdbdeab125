// See act_scales.hpp.
#include "checkpoint/config/act_scales.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/config/claims.hpp"
#include "checkpoint/io/json.hpp"

namespace nibble::codec {
namespace {

std::string_view scale_suffix(const ModuleTensors& tensors) {
  return tensors.find("activation_scale") != nullptr ? "activation_scale" : "input_scale";
}

/// "act_bits=4": the first key, at any depth, with which a producer's config says that activations are quantized.
std::string says_activations(const Json& json) {
  static constexpr std::string_view kKeys[] = {"input_activations", "input_tensors", "activation_scheme",
                                               "activations",       "act_bits",      "activation_bits"};
  for (auto it = json.begin(); it != json.end(); ++it) {
    const Json& value = *it;
    const bool none = value.is_null() || value.empty() || (value.is_string() && value.get_ref<const std::string&>() == "none") ||
                      (value.is_number() && value.get<double>() >= 16);
    if (!none && json.is_object() && std::ranges::find(kKeys, it.key()) != std::end(kKeys))
      return fmt::format("{}={}", it.key(), storage::dump(value).substr(0, 60));
    if (!value.is_structured()) continue;
    if (std::string found = says_activations(value); !found.empty()) return found;
  }
  return {};
}

}  // namespace

void find_other_activations(const ModuleTensors& tensors, Module& m, const QuantConfig& config) {
  const bool known = m.claimed && m.claimed->act.codes != DType::none;
  const bool by_layer = m.claimed && (config_child(config.json, "config_groups").is_object() || is_quark(config));
  if (m.other_acts.empty() && !known && !by_layer && tensors.find(scale_suffix(tensors)) == nullptr)
    m.other_acts = says_activations(config.json);
  if (m.other_acts.empty()) m.other_acts = quark_outputs(tensors.module, config);
  if (!m.other_acts.empty())
    note(m.notes, kWarning, "{} quantizes activations in a way that nibble does not know, and so does not run: {}",
         config_name(config), m.other_acts);
}

Status analyse_activations(const ModuleTensors& tensors, Module& m, const QuantConfig& config) {
  const std::string_view scale = scale_suffix(tensors);
  const bool has_scale = tensors.find(scale) != nullptr, has_zero = tensors.find("input_zero_point") != nullptr;
  if (has_scale) NIBBLE_RETURN_IF_ERROR(expect_scalar(tensors, scale, kFloats));
  if (has_zero)
    NIBBLE_RETURN_IF_ERROR(
        expect_scalar(tensors, "input_zero_point", {DType::s8, DType::e4m3, DType::f16, DType::bf16, DType::f32}));
  const std::int64_t channels = m.filter ? m.k / (m.filter->h * m.filter->w) : m.k;
  if (tensors.find("pre_quant_scale") != nullptr) NIBBLE_RETURN_IF_ERROR(expect(tensors, "pre_quant_scale", kFloats, {channels}));
  if (!m.claimed) {
    if (has_scale) note(m.notes, kInfo, "{} is present: activations are quantized with one static scale", scale);
    return {};
  }
  const ActScheme& act = m.claimed->act;
  const bool is_static = act.codes != DType::none && act.group == GroupShape::tensor();
  if (is_static != has_scale)
    note(m.notes, kWarning, "{} says {}, but {} is {}", config_name(config), m.claimed->name(), scale,
         has_scale ? "present" : "missing");
  else if (is_static && act.zero == ZeroKind::integer && !has_zero)
    note(m.notes, kWarning, "{} says {}, but input_zero_point is missing: took 0", config_name(config), m.claimed->name());
  return {};
}

void read_activations(const ModuleTensors& tensors, const Module& m, QuantTensor& q, std::vector<Note>& notes) {
  if (const ConstTensorView* prescale = tensors.find("pre_quant_scale")) {
    const std::int64_t elements = q.filter.h * q.filter.w;  // of the filter, which share the factors
    const Tensor channels = copy_as(*prescale, {q.k / elements});
    q.prescale = Tensor(channels.dtype, {q.k});
    for (std::int64_t i = 0; i < elements; ++i)
      std::memcpy(q.prescale.bytes.data() + static_cast<std::size_t>(i) * channels.bytes.size(), channels.bytes.data(),
                  channels.bytes.size());
  }
  const std::string_view suffix = scale_suffix(tensors);
  const ConstTensorView* scale = tensors.find(suffix);
  if (scale == nullptr) return;
  const float s = read_scalar(*scale);
  const ConstTensorView* zero = tensors.find("input_zero_point");
  const float z = zero == nullptr ? 0.0f : read_scalar(*zero);
  const auto useless = [&](std::string_view what, float value, std::string_view why) {
    note(notes, Note::Severity::error, "{} is {}, {}: static activations cannot be used", what, value, why);
  };
  if (!(s > 0.0f && std::isfinite(s))) return useless(suffix, s, "not a positive number");
  if (!(z >= -128.0f && z <= 127.0f && z == std::nearbyint(z)))
    return useless("input_zero_point", z, "not a whole number of 8 bits");
  const bool symmetric = m.claimed && m.claimed->act.zero == ZeroKind::none;
  if (z != 0.0f && (m.scheme.codes == DType::e4m3 || (m.claimed && m.claimed->act.codes == DType::e4m3)))
    return useless("input_zero_point", z, "but e4m3 has none");
  if (z != 0.0f && symmetric) note(notes, kWarning, "input_zero_point is {}, but activations are called symmetric: kept it", z);
  q.static_acts = StaticActs{s, static_cast<std::int32_t>(z)};
}

void encode_activations(const QuantTensor& q, const ActScheme& act, std::vector<EncodedTensor>& out) {
  if (!q.static_acts) return;
  Tensor scale(DType::f32, {1});
  scale.set(0, q.static_acts->scale);
  out.push_back({"input_scale", std::move(scale)});
  if (act.zero == ZeroKind::none && q.static_acts->zero == 0) return;
  Tensor zero(DType::s8, {1});
  zero.set(0, static_cast<float>(q.static_acts->zero));
  out.push_back({"input_zero_point", std::move(zero)});
}

}  // namespace nibble::codec
