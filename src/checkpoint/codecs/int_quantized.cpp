// compressed-tensors "int-quantized" (and naive-quantized, ModelOpt W8A16 and W8A8, Quark int8): one signed byte a weight.
//
//   weight             s8   [N,K], or of a convolution [Co,Ci/groups,Kh,Kw]
//   weight_scale       f16  [N,G], [N,1], [N] or [1]; or bf16, f32; of a convolution [Co,1,1,1] or [1]
//   weight_zero_point  s8   like the scales; absent when symmetric
//   input_scale, input_zero_point, pre_quant_scale    see act_scales.hpp
//   bias               f16  [N]  optional
//
//   W[n,k] = (q − z)·s
//
// With a config of fewer bits (W4A8, ...) codes and zero points have so many bits, each in a byte of its own.
// Only the config says whether activations are quantized while running; see Module::claimed.
// Source: vllm-project/compressed-tensors src/compressed_tensors/compressors; claims.hpp.
#include <algorithm>
#include <cstring>
#include <string>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/act_scales.hpp"
#include "checkpoint/config/claims.hpp"
#include "checkpoint/config/ct_config.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kMethods[] = {"compressed-tensors", "modelopt", "quark"};

/// Convolutions have no scales of groups: the format does not define the order of a filter's weights.
Result<GroupShape> conv_scale_group(const ModuleTensors& tensors, std::int64_t n) {
  const ConstTensorView& scale = *tensors.find("weight_scale");
  for (const auto& shape : {std::vector<std::int64_t>{n, 1, 1, 1}, {n, 1}, {n}}) {
    const bool same = scale.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), scale.shape.begin());
    if (same && one_of(scale.dtype, kFloats) && (n > 1 || scale.rank == 4)) return GroupShape::channel();
  }
  if (expect_scalar(tensors, "weight_scale", kFloats).ok()) return GroupShape::tensor();
  return error(StatusCode::corrupt_data, "{}.weight_scale is {}, expected a float [{},1,1,1] or [1] beside the weight {}",
               tensors.module, describe(scale), n, describe(*tensors.find("weight")));
}

/// The bits of the codes in the bytes, by the config of this module, or of all.
int code_bits(const ModuleTensors& tensors, const QuantConfig& config, const std::vector<CtGroup>& entries, bool conv) {
  const CtGroup* entry = ct_entry(config, entries, tensors.module, conv, nullptr);
  if (entry == nullptr && !entries.empty() &&
      std::ranges::all_of(entries, [&](const CtGroup& e) { return e.bits == entries.front().bits; }))
    entry = &entries.front();
  const std::int64_t width = entry == nullptr ? 8 : entry->bits.value_or(8);
  return code_type(width, true) ? static_cast<int>(width) : 8;
}

/// Signed bytes as codes of `width` bits that count from 0.
Status count_from_zero(const ModuleTensors& tensors, std::string_view what, int width, std::span<std::uint8_t> codes) {
  const int middle = 1 << (width - 1);
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const int value = static_cast<std::int8_t>(codes[i]);
    if (value < -middle || value >= middle)
      return error(StatusCode::corrupt_data, "{}.{}: element {} is {}, but num_bits={} in the config means {} to {}",
                   tensors.module, what, i, value, width, -middle, middle - 1);
    codes[i] = static_cast<std::uint8_t>(value + middle);
  }
  return {};
}

/// Codes of rows in the order kh, kw, ci, as [Co,Ci/groups,Kh,Kw]; or back.
std::vector<std::uint8_t> reordered(std::span<const std::uint8_t> codes, std::int64_t k, Extent filter, bool back) {
  const std::int64_t elements = filter.h * filter.w, channels = k / elements;
  std::vector<std::uint8_t> out(codes.size());
  for (std::size_t row = 0; row < codes.size(); row += static_cast<std::size_t>(k))
    for (std::int64_t e = 0; e < elements; ++e)
      for (std::int64_t c = 0; c < channels; ++c) {
        const std::size_t at = row + static_cast<std::size_t>(e * channels + c),
                          oihw = row + static_cast<std::size_t>(c * elements + e);
        out[back ? at : oihw] = codes[back ? oihw : at];
      }
  return out;
}

/// The claims of a config that is not in the form of compressed-tensors.
std::optional<Scheme> claims(const ModuleTensors& tensors, const QuantConfig& config, ZeroKind zero, DType scale) {
  if (is_quark(config)) return quark_scheme(tensors.module, config, zero, scale);
  const std::string algorithm = modelopt_algorithm(tensors.module, config);
  const WeightScheme weight{DType::s8, ZeroKind::none, GroupShape::channel(), scale};
  if (algorithm == "w8a16") return Scheme{weight, {}};
  if (algorithm == "w8a8_sq_per_channel") return Scheme{weight, {DType::s8, GroupShape::tensor()}};
  return std::nullopt;
}

Result<Module> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Module m;
  m.format = "int-quantized";
  NIBBLE_RETURN_IF_ERROR(refuse_online_transforms(tensors, config));
  const ConstTensorView& weight = *tensors.find("weight");
  const bool conv = weight.rank == 4;
  if (conv)
    NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight", {DType::s8}, {-1, -1, -1, -1}));
  else
    NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight", {DType::s8}, {-1, -1}));
  m.n = weight.dim(0);
  m.k = weight.dim(1);
  if (conv) {
    m.filter = Extent{weight.dim(2), weight.dim(3)};
    m.k *= m.filter->h * m.filter->w;  // the file has all of them
  }
  NIBBLE_RETURN_IF_ERROR(check_dimensions(tensors, m.n, m.k));
  const auto entries = ct_groups(config, CtType::integer);
  const ConstTensorView* scale = tensors.find("weight_scale");
  if (conv) {
    NIBBLE_ASSIGN_OR_RETURN(m.scheme.group, conv_scale_group(tensors, m.n));
  } else {
    NIBBLE_ASSIGN_OR_RETURN(m.scheme.group,
                            infer_scale_group(tensors, "weight_scale", m.n, m.k, ct_group_size(entries, m.k, scale), config));
  }
  const ConstTensorView* zeros = tensors.find("weight_zero_point");
  if (zeros != nullptr && (zeros->dtype != DType::s8 || zeros->rank != scale->rank || zeros->shape != scale->shape))
    return error(StatusCode::corrupt_data, "{}.weight_zero_point is {}, expected s8 in the shape of weight_scale {}",
                 tensors.module, describe(*zeros), describe(*scale));
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  const int width = code_bits(tensors, config, entries, conv);
  m.scheme.codes = width == 8 ? DType::s8 : *code_type(width, zeros == nullptr);
  m.scheme.zero = zeros == nullptr ? ZeroKind::none : ZeroKind::integer;
  m.scheme.scale = scale->dtype;

  if (const auto claimed = claims(tensors, config, m.scheme.zero, scale->dtype))
    claim(m, config, claimed->weight, claimed->act);
  else
    claim_ct(m, tensors.module, config, entries, [](const CtGroup& e) {
      return e.bits == 8 ? std::optional(DType::s8) : code_type(e.bits.value_or(0), e.symmetric);
    });
  check_method(m, config, kMethods);
  NIBBLE_RETURN_IF_ERROR(analyse_activations(tensors, m, config));
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const ConstTensorView *weight = tensors.find("weight"), *scale = tensors.find("weight_scale");
  if (weight == nullptr || weight->dtype != DType::s8 || scale == nullptr) return std::nullopt;
  if (is_quark_transposed(tensors.module, config, *scale)) return std::nullopt;
  return analyse(tensors, config);
}

StoredCodes stored_codes(const Module& m) { return {.suffix = "weight", .n = m.n, .k = m.k}; }

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return m.filter || bits(m.scheme.codes) < 8 ? std::nullopt : std::optional(stored_codes(m));
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>& notes) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, config));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  q.codes = read_codes(tensors, stored_codes(m));
  if (m.filter) {
    q.filter = *m.filter;
    q.codes = reordered(q.codes, q.k, q.filter, true);
  }
  const std::int64_t rows = m.scheme.group.rows(m.n);
  q.scales = copy_as(*tensors.find("weight_scale"), {rows, q.groups()});
  if (const ConstTensorView* zeros = tensors.find("weight_zero_point")) q.zeros = copy_as(*zeros, {rows, q.groups()});
  if (const int width = bits(m.scheme.codes); width < 8) {
    q.zeros.dtype = q.zeros.empty() ? q.zeros.dtype : DType::u8;
    NIBBLE_RETURN_IF_ERROR(count_from_zero(tensors, "weight", width, q.codes));
    NIBBLE_RETURN_IF_ERROR(
        count_from_zero(tensors, "weight_zero_point", width, {q.zeros.as<std::uint8_t>(), q.zeros.bytes.size()}));
  }
  q.bias = read_bias(tensors, q.n);
  read_activations(tensors, m, q, notes);
  return q;
}

Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act) {
  NIBBLE_RETURN_IF_ERROR(check_ct_writable("int-quantized", q, act));
  const GroupShape& group = q.scheme.group;
  const int width = bits(q.scheme.codes);
  const bool narrow = width < 8 && q.scheme.codes == code_type(width, q.scheme.zero == ZeroKind::none);
  if ((q.scheme.codes != DType::s8 && !narrow) || (group.n != 1 && group != GroupShape::tensor()))
    return error(StatusCode::unsupported,
                 "int-quantized cannot hold {}: codes are s8 or of fewer bits, scales per tensor, channel or group",
                 q.scheme.name());
  const auto as_signed = [&](Tensor t) {
    t.dtype = DType::s8;
    if (narrow)
      for (std::byte& code : t.bytes) code = static_cast<std::byte>(std::to_integer<int>(code) - (1 << (width - 1)));
    return t;
  };
  Tensor codes(DType::s8, {q.n, q.k});
  std::memcpy(codes.bytes.data(), q.codes.data(), q.codes.size());
  std::vector<EncodedTensor> out;
  out.push_back({"weight", as_signed(std::move(codes))});
  out.push_back({"weight_scale", ct_scale(q.scales, group)});
  if (!q.zeros.empty()) out.push_back({"weight_zero_point", as_signed(ct_scale(q.zeros, group))});
  encode_activations(q, act, out);
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<std::vector<EncodedTensor>> write_conv(const QuantTensor& q, const ActScheme& act) {
  if (q.scheme.group.k != 0)
    return error(
        StatusCode::unsupported,
        "int-quantized cannot hold a convolution of {}: its scales are per tensor or channel; compressed-tensors has groups",
        q.scheme.name());
  NIBBLE_ASSIGN_OR_RETURN(std::vector<EncodedTensor> out, write(q, act));
  const std::int64_t elements = q.filter.h * q.filter.w;
  for (EncodedTensor& part : out) {
    if (part.suffix == "weight") {
      const std::span rows(part.tensor.as<std::uint8_t>(), part.tensor.bytes.size());
      const auto codes = reordered(rows, q.k, q.filter, false);
      std::memcpy(part.tensor.bytes.data(), codes.data(), codes.size());
      part.tensor.shape = {q.n, q.k / elements, q.filter.h, q.filter.w};
    } else if ((part.suffix == "weight_scale" || part.suffix == "weight_zero_point") && q.scheme.group == GroupShape::channel()) {
      part.tensor.shape = {q.n, 1, 1, 1};  // which multiplies the weight as it is
    }
  }
  return out;
}

Result<Json> write_config(const WrittenCheckpoint& written) { return ct_config("int-quantized", written); }

}  // namespace

const Format kIntQuantized{"int-quantized",
                           "compressed-tensors int-quantized: one signed byte a weight, W8A8 and W8A16",
                           true,
                           kMethods,
                           kByteTensors,
                           detect,
                           read,
                           codes,
                           write,
                           write_config,
                           write_conv};

}  // namespace nibble::codec
