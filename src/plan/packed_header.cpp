#include "nibble/packed_header.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "json/json_values.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "layouts/layout.hpp"
#include "nibble/version.hpp"

namespace nibble {
namespace {

constexpr std::string_view kMagic = "NIBBLE01";
/// Raised when the header or the bytes of any layout change their meaning.
constexpr int kVersion = 1;
constexpr std::size_t kLargestHeader = std::size_t{1} << 40;

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (const std::byte b : bytes) {
    out += kDigits[std::to_integer<std::size_t>(b >> 4)];
    out += kDigits[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  return out;
}

std::optional<std::vector<std::byte>> from_hex(std::string_view text) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  if (text.size() % 2 != 0) return std::nullopt;
  std::vector<std::byte> out(text.size() / 2);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    out[i] = static_cast<std::byte>(16 * high + low);
  }
  return out;
}

Json tensor_json(const Tensor& t) { return {{"dtype", std::string(name(t.dtype))}, {"bytes", hex(t.bytes)}}; }

template <class... Args>
Status corrupt(fmt::format_string<Args...> format, Args&&... args) {
  return error(StatusCode::corrupt_data, "packed weight: {}; pack the layer again",
               fmt::format(format, std::forward<Args>(args)...));
}

/// Checked access to the members of the header.
class Members {
 public:
  explicit Members(const Json& json) : json_(json) {}

  bool has(const char* key) const { return json_.contains(key); }
  Result<std::string> text(const char* key) const {
    const auto it = json_.find(key);
    if (it == json_.end() || !it->is_string()) return corrupt("its header has no text {}", key);
    return it->get<std::string>();
  }
  Result<std::int64_t> integer(const char* key) const {
    const auto it = json_.find(key);
    if (it == json_.end()) return corrupt("its header has no {}", key);
    return integer(*it, key);
  }
  static Result<std::int64_t> integer(const Json& value, const char* key) {
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{1} << 62))
      return corrupt("{} in its header is no integer", key);
    return value.get<std::int64_t>();
  }
  Result<float> number(const char* key) const {
    const auto it = json_.find(key);
    if (it == json_.end() || !it->is_number()) return corrupt("its header has no number {}", key);
    return it->get<float>();
  }
  Result<std::vector<std::int64_t>> integers(const char* key, std::int64_t count) const {
    const auto it = json_.find(key);
    if (it == json_.end() || !it->is_array() || it->size() != static_cast<std::size_t>(count))
      return corrupt("its header has no {} integers {}", count, key);
    std::vector<std::int64_t> out;
    for (const Json& value : *it) {
      NIBBLE_ASSIGN_OR_RETURN(const std::int64_t v, integer(value, key));
      out.push_back(v);
    }
    return out;
  }
  Result<DType> dtype(const char* key) const {
    NIBBLE_ASSIGN_OR_RETURN(const std::string token, text(key));
    const auto found = parse_dtype(token);
    if (!found) return corrupt("{} in its header is no element type", key);
    return *found;
  }
  /// f32, f16 or bf16 [size]; empty where there is none.
  Result<Tensor> floats(const char* key, std::int64_t size) const {
    if (!has(key)) return Tensor();
    const auto it = json_.find(key);
    if (!it->is_object()) return corrupt("{} in its header is no tensor", key);
    const Members members(*it);
    NIBBLE_ASSIGN_OR_RETURN(const DType type, members.dtype("dtype"));
    NIBBLE_ASSIGN_OR_RETURN(const std::string digits, members.text("bytes"));
    auto bytes = from_hex(digits);
    if (!is_compute_float(type) || !bytes || bytes->size() != static_cast<std::size_t>(size * bits(type) / 8))
      return corrupt("{} in its header is not {} elements of f32, f16 or bf16", key, size);
    Tensor t;
    t.dtype = type;
    t.shape = {size};
    t.bytes = std::move(*bytes);
    return t;
  }

 private:
  const Json& json_;
};

Result<Json> parsed(std::string_view header) {
  NIBBLE_ASSIGN_OR_RETURN(const std::size_t size, packed_header_size(header));
  if (size != header.size()) return corrupt("its header says {} bytes and has {}", size, header.size());
  header.remove_prefix(kPackedPrefix);
  bool too_deep = false;
  Json json = Json::parse(
      header,
      [&](int depth, Json::parse_event_t, Json&) {
        too_deep = too_deep || depth > kMaxJsonDepth;
        return !too_deep;
      },
      false);
  if (json.is_discarded() || too_deep || !json.is_object()) return corrupt("its header is no JSON object");
  return json;
}

std::string act_name(const ActScheme& act) {
  if (act.codes == DType::none) return "";
  const std::string whole = Scheme{{DType::s8, ZeroKind::none, GroupShape::channel()}, act}.name();
  return whole.substr(0, whole.find('_'));
}

Result<LinearSpec> spec_of(const Members& members) {
  LinearSpec spec;
  NIBBLE_ASSIGN_OR_RETURN(spec.a_dtype, members.dtype("a_dtype"));
  NIBBLE_ASSIGN_OR_RETURN(spec.epilogue.out, members.dtype("out"));
  NIBBLE_ASSIGN_OR_RETURN(spec.m_max, members.integer("m_max"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string act, members.text("act_scheme"));
  if (!act.empty()) {
    const auto scheme = Scheme::parse(act + "_s8c");
    if (!scheme) return corrupt("'{}' in its header is no scheme of activations", act.substr(0, 40));
    spec.act_scheme = scheme->act;
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string accumulation, members.text("accumulation"));
  if (accumulation != "fast" && accumulation != "precise")
    return corrupt("accumulation in its header is neither fast nor precise");
  spec.accumulation = accumulation == "precise" ? Accumulation::precise : Accumulation::fast;
  if (spec.m_max < 1 || spec.m_max > kMaxSize) return corrupt("m_max={} in its header", spec.m_max);
  return spec;
}

/// Fills perm: a permutation in which the input channels of a group are in order.
Status read_order(const Members& members, PackedWeightHeader& weight) {
  if (!members.has("perm")) return {};
  if (weight.scheme.group.n != 1 || weight.scheme.group.k == 0)
    return corrupt("its header has act-order, {} has no groups along K", weight.scheme.name());
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::int64_t> perm, members.integers("perm", weight.k));
  std::vector<bool> seen(perm.size());
  for (std::size_t i = 0; i < perm.size(); ++i) {
    const bool inside = perm[i] >= 0 && perm[i] < weight.k;
    const bool in_order = static_cast<std::int64_t>(i) % weight.group_size() == 0 || perm[i] > perm[i - 1];
    if (!inside || !in_order || seen[static_cast<std::size_t>(perm[i])])
      return corrupt("the order of its input channels is none: {} at {}", perm[i], i);
    seen[static_cast<std::size_t>(perm[i])] = true;
    weight.perm.push_back(static_cast<std::int32_t>(perm[i]));
  }
  return {};
}

/// Whether the CPU's W8A8 kernels read PackedWeightHeader::channel_sums of such a weight.
bool has_sums(const WeightScheme& scheme) {
  return scheme.group.k == 0 && info(scheme.codes).kind != DTypeKind::floating &&
         (scheme.zero == ZeroKind::none || scheme.zero == ZeroKind::integer);
}

Status read_sums(const Members& members, PackedWeightHeader& weight) {
  if (!members.has("channel_sums") && (!has_sums(weight.scheme) || weight.layout->backend != Backend::cpu)) return {};
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::int64_t> sums, members.integers("channel_sums", weight.n));
  constexpr std::int64_t kRowBlock = 32;  // as pack() has it
  weight.channel_sums.resize(static_cast<std::size_t>((weight.n + kRowBlock - 1) / kRowBlock * kRowBlock));
  std::ranges::copy(sums, weight.channel_sums.begin());
  return {};
}

Result<PackedWeightHeader> header_of(const Members& members) {
  NIBBLE_ASSIGN_OR_RETURN(const std::int64_t version, members.integer("version"));
  if (version != kVersion)
    return error(StatusCode::unsupported, "packed weight of version {}, nibble {} reads version {}; pack the layer again",
                 version, NIBBLE_VERSION, kVersion);
  PackedWeightHeader weight;
  NIBBLE_ASSIGN_OR_RETURN(const std::string layout, members.text("layout"));
  weight.layout = find_layout(layout);
  if (weight.layout == nullptr)
    return error(StatusCode::unsupported, "packed weight in the layout {}, which nibble {} does not have; pack the layer again",
                 layout.substr(0, 40), NIBBLE_VERSION);
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme, members.text("scheme"));
  NIBBLE_ASSIGN_OR_RETURN(const DType scale, members.dtype("scale"));
  const auto parsed_scheme = Scheme::parse(scheme, scale);
  if (!parsed_scheme || parsed_scheme->act.codes != DType::none)
    return corrupt("'{}' is no scheme of weights", scheme.substr(0, 40));
  weight.scheme = parsed_scheme->weight;
  if (bits(weight.scheme.codes) == 0 || bits(weight.scheme.codes) > 8 || info(scale).kind != DTypeKind::floating ||
      bits(scale) < 8)
    return corrupt("{} with scales of {} is no weight", scheme, name(scale));
  NIBBLE_ASSIGN_OR_RETURN(weight.n, members.integer("n"));
  NIBBLE_ASSIGN_OR_RETURN(weight.k, members.integer("k"));
  if (weight.n < 1 || weight.k < 1 || !check_sizes({{"N", weight.n}, {"K", weight.k}}) ||
      !check_elements("W", {weight.n, weight.k}))
    return corrupt("W[{},{}] is no weight", weight.n, weight.k);
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<std::int64_t> filter, members.integers("filter", 2));
  weight.filter = {filter[0], filter[1]};
  if (filter[0] < 1 || filter[1] < 1 || weight.k % filter[0] != 0 || weight.k / filter[0] % filter[1] != 0)
    return corrupt("K={} is no multiple of the {}x{} elements of its filter", weight.k, filter[0], filter[1]);
  if (members.has("zero_type")) {
    NIBBLE_ASSIGN_OR_RETURN(weight.zero_type, members.dtype("zero_type"));
  }
  const bool integer = weight.zero_type == DType::u8 || weight.zero_type == DType::s8;
  const bool fits = weight.scheme.zero == ZeroKind::none      ? weight.zero_type == DType::none
                    : weight.scheme.zero == ZeroKind::integer ? integer
                                                              : is_compute_float(weight.zero_type);
  if (!fits) return corrupt("zero points of {} do not go with {}", name(weight.zero_type), scheme);
  if (const std::string why = refusal(*weight.layout, weight.scheme, weight.zero_type, weight.k); !why.empty())
    return corrupt("layout {} cannot hold it: {}", layout, why);
  if (members.has("scale2")) {
    NIBBLE_ASSIGN_OR_RETURN(weight.scale2, members.number("scale2"));
  }
  if (members.has("act_limit")) {
    NIBBLE_ASSIGN_OR_RETURN(weight.act_limit, members.number("act_limit"));
    if (!(*weight.act_limit > 0)) return corrupt("the activations' limit {} is not positive", *weight.act_limit);
  }
  if (members.has("act_scale")) {
    StaticActs acts;
    NIBBLE_ASSIGN_OR_RETURN(acts.scale, members.number("act_scale"));
    NIBBLE_ASSIGN_OR_RETURN(const std::int64_t zero, members.integer("act_zero"));
    if (!(acts.scale > 0 && std::isfinite(acts.scale)) || zero < -128 || zero > 127)
      return corrupt("the activations' scale {} or zero point {} is none", acts.scale, zero);
    acts.zero = static_cast<std::int32_t>(zero);
    weight.static_acts = acts;
  }
  NIBBLE_RETURN_IF_ERROR(read_order(members, weight));
  NIBBLE_ASSIGN_OR_RETURN(weight.prescale, members.floats("prescale", weight.k));
  if (!weight.prescale.empty())
    for (std::int64_t k = 0; k < weight.k; ++k) weight.prescale_f32.push_back(weight.prescale.at(k));
  NIBBLE_ASSIGN_OR_RETURN(weight.bias, members.floats("bias", weight.n));
  return weight;
}

}  // namespace

Result<std::string> packed_header(const PackedWeight& weight) try {
  const LinearSpec* const spec = std::get_if<LinearSpec>(&weight.spec());
  if (spec == nullptr || spec->epilogue != EpilogueSpec{.out = spec->epilogue.out} || spec->norm != NormSpec{})
    return error(StatusCode::unsupported,
                 "a header holds the specification of a linear layer whose epilogue is a type; W[{},{}] was packed for {}",
                 weight.n(), weight.k(), spec == nullptr ? "a convolution" : spec->epilogue.name());
  const PackedWeightHeader& data = weight.data();
  Json json = {{"version", kVersion},
               {"library", NIBBLE_VERSION},
               {"layout", std::string(data.layout->name)},
               {"scheme", data.scheme.name()},
               {"scale", std::string(name(data.scheme.scale))},
               {"n", data.n},
               {"k", data.k},
               {"filter", {data.filter.h, data.filter.w}},
               {"a_dtype", std::string(name(spec->a_dtype))},
               {"out", std::string(name(spec->epilogue.out))},
               {"m_max", spec->m_max},
               {"act_scheme", act_name(spec->act_scheme)},
               {"accumulation", spec->accumulation == Accumulation::precise ? "precise" : "fast"}};
  if (data.zero_type != DType::none) json["zero_type"] = std::string(name(data.zero_type));
  if (data.scale2) json["scale2"] = *data.scale2;
  if (data.act_limit) json["act_limit"] = *data.act_limit;
  if (data.static_acts) json["act_scale"] = data.static_acts->scale, json["act_zero"] = data.static_acts->zero;
  if (!data.perm.empty()) json["perm"] = data.perm;
  if (!data.prescale.empty()) json["prescale"] = tensor_json(data.prescale);
  if (!data.bias.empty()) json["bias"] = tensor_json(data.bias);
  if (!data.channel_sums.empty())
    json["channel_sums"] = std::vector<std::int64_t>(data.channel_sums.begin(), data.channel_sums.begin() + data.n);
  std::string header(kMagic);
  header.resize(kPackedPrefix);
  header += json.dump();
  header.resize((header.size() + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment, ' ');
  const std::uint64_t size = header.size();
  for (std::size_t i = 0; i < 8; ++i) header[kMagic.size() + i] = static_cast<char>(size >> (8 * i) & 0xff);
  return header;
} catch (...) {
  return caught();
}

Result<std::size_t> packed_header_size(std::string_view prefix) {
  if (prefix.size() < kPackedPrefix || prefix.substr(0, kMagic.size()) != kMagic)
    return error(StatusCode::corrupt_data, "no packed weight of nibble: it does not begin with {}", kMagic);
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < 8; ++i) size |= std::uint64_t{static_cast<unsigned char>(prefix[kMagic.size() + i])} << (8 * i);
  if (size < kPackedAlignment || size % kPackedAlignment != 0 || size > kLargestHeader)
    return corrupt("a header of {} bytes", size);
  return static_cast<std::size_t>(size);
}

Result<std::string> packed_layout(std::string_view header) try {
  NIBBLE_ASSIGN_OR_RETURN(const Json json, parsed(header));
  return Members(json).text("layout");
} catch (...) {
  return caught();
}

Result<PackedWeight> packed_from_bytes(std::string_view header, std::span<const std::byte> bytes, Backend memory,
                                       std::shared_ptr<void> owner) try {
  NIBBLE_ASSIGN_OR_RETURN(const Json json, parsed(header));
  const Members members(json);
  auto packed = std::make_shared<PackedWeightData>();
  {
    NIBBLE_ASSIGN_OR_RETURN(PackedWeightHeader read, header_of(members));
    static_cast<PackedWeightHeader&>(*packed) = std::move(read);
  }
  NIBBLE_ASSIGN_OR_RETURN(const LinearSpec spec, spec_of(members));
  const std::size_t size = packed->layout->size(packed->scheme, packed->zero_type, packed->n, packed->k);
  if (bytes.size() != size)
    return corrupt("{} bytes, W[{},{}] of {} in {} has {}", bytes.size(), packed->n, packed->k, packed->scheme.name(),
                   packed->layout->name, size);
  const bool on_device = memory == Backend::cuda;
  if (on_device && packed->layout->backend != Backend::cuda)
    return error(StatusCode::unsupported,
                 "packed weight in the layout {} of the CPU, in device memory; unpack it and pack it there",
                 packed->layout->name);
  const std::size_t alignment = on_device ? kPackedAlignment : Buffer::kAlignment;
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment != 0)
    return error(StatusCode::invalid_argument, "the bytes of a packed weight are not at a multiple of {} bytes; copy them to one",
                 alignment);
  if (on_device) {
    NIBBLE_RETURN_IF_ERROR(cuda::copy_parts(*packed));
    packed->bytes = Buffer(const_cast<std::byte*>(bytes.data()), bytes.size(), std::move(owner));
  } else {
    NIBBLE_RETURN_IF_ERROR(read_sums(members, *packed));
    packed->bytes = Buffer(bytes, std::move(owner));
  }
  return PackedWeight(std::move(packed), spec);
} catch (...) {
  return caught();
}

}  // namespace nibble
