// nibble's own form, for what no other program's form holds: float offsets and float zero points beside codes of 2 to 8 bits.
//
//   weight_codes   s32  [N, ⌈K·b/32⌉]  row n is the stream of its codes, the first one in the lowest bits
//   weight_scale   f16  [rows, G]      or bf16, f32; rows and G as the scheme's group divides N and K, or of "ci" Ci/groups
//   weight_zero    u8   [rows, G]      "z": integer zero points; s8 where codes are; "f": f16, bf16 or f32
//   weight_offset  f16  [rows, G]      "o": or bf16, f32
//   weight_scheme  u8   [length]       the scheme's name in ASCII, "u4og32": what shapes do not show
//   weight_shape   s64  [2]            N, K; of a convolution [4]: Co, Ci/groups, Kh, Kw, rows in the order kh, kw, ci
//   bias           f16  [N]            optional
//
//   W[n,k] = q·s,  (q − z)·s  or  q·s + o
//
// Every module says its scheme itself, so that layers may have different ones and the config needs none.
#include <algorithm>
#include <cstring>
#include <string>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/codec_util.hpp"
#include "checkpoint/io/bits.hpp"
#include "core/printable.hpp"

namespace nibble::codec {
namespace {

constexpr std::string_view kName = "nibble-codes";
constexpr std::string_view kMethods[] = {kName};
constexpr Axis kWords[] = {Axis::n, Axis::k_words};
constexpr StoredTensor kTensors[] = {{"weight_codes", kWords},
                                     {"weight_scale", axes::kGroups},
                                     {"weight_zero", axes::kGroups},
                                     {"weight_offset", axes::kGroups},
                                     {"weight_scheme"},
                                     {"weight_shape", axes::kSizes},
                                     {"bias", axes::kN}};

/// The tensor of zero points or offsets; "" of schemes without.
std::string_view zeros_suffix(ZeroKind zero) {
  if (zero == ZeroKind::none) return "";
  return zero == ZeroKind::offset ? "weight_offset" : "weight_zero";
}

/// Codes of 2 to 8 bits, with weights alone: a name has no type of scales, which is that of their tensor.
Result<WeightScheme> read_scheme(const ModuleTensors& tensors) {
  constexpr std::int64_t kLongest = 64;  // of a name, several times
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_scheme", {DType::u8}, {-1}));
  const ConstTensorView& view = *tensors.find("weight_scheme");
  const std::string name(static_cast<const char*>(view.data), static_cast<std::size_t>(std::min(view.dim(0), kLongest)));
  const Result<Scheme> scheme = Scheme::parse(name, tensors.find("weight_scale")->dtype);
  if (!scheme.ok() || view.dim(0) > kLongest || scheme->weight.is_dense() || scheme->act.codes != DType::none)
    return error(StatusCode::corrupt_data, "{}.weight_scheme is {}, expected the scheme of a quantized weight, such as u4og32",
                 tensors.module, shown(name));
  return scheme->weight;
}

Result<Module> analyse(const ModuleTensors& tensors, const QuantConfig& config) {
  Module m;
  m.format = kName;
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_scale", kFloats, {-1, -1}));
  NIBBLE_ASSIGN_OR_RETURN(m.scheme, read_scheme(tensors));
  NIBBLE_RETURN_IF_ERROR(read_weight_shape(tensors, m));
  const std::int64_t words = words_of(Packing::dense, bits(m.scheme.codes), m.k);
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_codes", {DType::s32}, {m.n, words}));
  const Extent filter = m.filter.value_or(Extent{});
  const std::int64_t rows = m.scheme.group.rows(m.n), groups = m.scheme.group.cols(m.k, filter.h * filter.w);
  NIBBLE_RETURN_IF_ERROR(expect(tensors, "weight_scale", kFloats, {rows, groups}));
  const std::string_view zeros = zeros_suffix(m.scheme.zero);
  if (m.scheme.zero == ZeroKind::integer)
    NIBBLE_RETURN_IF_ERROR(expect(tensors, zeros, {m.scheme.codes == DType::s8 ? DType::s8 : DType::u8}, {rows, groups}));
  else if (!zeros.empty())
    NIBBLE_RETURN_IF_ERROR(expect(tensors, zeros, kFloats, {rows, groups}));
  for (const std::string_view other : {"weight_zero", "weight_offset"})
    if (other != zeros && tensors.find(other) != nullptr)
      return error(StatusCode::corrupt_data, "{}.{} is {}, but weight_scheme says {}, which has none", tensors.module, other,
                   describe(*tensors.find(other)), m.scheme.name());
  NIBBLE_RETURN_IF_ERROR(check_bias(tensors, m.n));
  m.has_bias = tensors.find("bias") != nullptr;
  if (config_text(config.json, {"quant_method"}) == kName) claim(m, config, m.scheme);
  check_method(m, config, kMethods);
  return m;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  if (tensors.find("weight_codes") == nullptr || tensors.find("weight_scheme") == nullptr) return std::nullopt;
  return analyse(tensors, config);
}

std::optional<StoredCodes> codes(const ModuleTensors&, const Module& m, const QuantConfig&) {
  return StoredCodes{.suffix = "weight_codes", .order = CodeOrder::rows, .bits = bits(m.scheme.codes), .n = m.n, .k = m.k};
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig& config, std::vector<Note>&) {
  NIBBLE_ASSIGN_OR_RETURN(const Module m, analyse(tensors, config));
  QuantTensor q;
  q.scheme = m.scheme;
  q.n = m.n;
  q.k = m.k;
  q.filter = m.filter.value_or(Extent{});
  q.codes = read_codes(tensors, *codes(tensors, m, config));
  q.scales = copy_as(*tensors.find("weight_scale"), {q.scheme.group.rows(q.n), q.groups()});
  if (const std::string_view zeros = zeros_suffix(q.scheme.zero); !zeros.empty())
    q.zeros = copy_as(*tensors.find(zeros), q.scales.shape);
  if (q.scheme.zero == ZeroKind::integer && q.zeros.dtype == DType::u8) {
    const int limit = 1 << bits(q.scheme.codes);
    for (std::int64_t i = 0; i < q.zeros.numel(); ++i)
      if (const int z = q.zeros.as<std::uint8_t>()[i]; z >= limit)
        return error(StatusCode::corrupt_data, "{}.weight_zero: element {} is {}, which does not fit in the {} bits of {}",
                     tensors.module, i, z, bits(q.scheme.codes), q.scheme.name());
  }
  q.bias = read_bias(tensors, q.n);
  return q;
}

Result<std::vector<EncodedTensor>> encode(const QuantTensor& q, const ActScheme& act, bool conv) {
  NIBBLE_RETURN_IF_ERROR(check_writable(kName, q, FloatZeros::held, GroupsOfImages::held));
  NIBBLE_RETURN_IF_ERROR(check_weight_only(kName, q, act));
  const auto refuse = [&](std::string_view why) {
    return error(StatusCode::unsupported, "{} cannot hold {} [{},{}]: {}", kName, q.scheme.name(), q.n, q.k, why);
  };
  if (q.scheme.is_dense()) return refuse("codes have 2 to 8 bits");
  if (!q.g_idx.empty()) return refuse("it has no act-order; gptq and compressed-tensors have");
  const int b = bits(q.scheme.codes);
  const std::string name = q.scheme.name();
  Tensor scheme(DType::u8, {static_cast<std::int64_t>(name.size())});
  std::memcpy(scheme.bytes.data(), name.data(), name.size());
  std::vector<EncodedTensor> out;
  out.push_back({"weight_codes",
                 word_tensor(pack_rows(q.codes.data(), Packing::dense, b, q.n, q.k), q.n, words_of(Packing::dense, b, q.k))});
  out.push_back({"weight_scale", q.scales});
  if (!q.zeros.empty()) out.push_back({std::string(zeros_suffix(q.scheme.zero)), q.zeros});
  out.push_back({"weight_scheme", std::move(scheme)});
  out.push_back({"weight_shape", weight_shape(q, conv)});
  if (!q.bias.empty()) out.push_back({"bias", q.bias});
  return out;
}

Result<std::vector<EncodedTensor>> write(const QuantTensor& q, const ActScheme& act) { return encode(q, act, false); }
Result<std::vector<EncodedTensor>> write_conv(const QuantTensor& q, const ActScheme& act) { return encode(q, act, true); }

Result<Json> write_config(const WrittenCheckpoint& written) {
  NIBBLE_RETURN_IF_ERROR(check_weights_alone(kName, written));
  return Json{{"quant_method", kName}, {"modules_to_not_convert", not_quantized(written)}};
}

}  // namespace

const Format kNibbleCodes{kName,     "nibble's own: codes of 2 to 8 bits with float offsets or zero points, convolutions",
                          true,      kMethods,
                          kTensors,  detect,
                          read,      codes,
                          write,     write_config,
                          write_conv};

}  // namespace nibble::codec
