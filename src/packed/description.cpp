#include "packed/description.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble::packed {
namespace {

using storage::printable;

// ---- The members of each struct, by name: a member that is added does not compile until it is listed here ----

void members(GroupShape& value, auto&& visit) {
  auto& [n, k, all_elements] = value;
  visit("n", n), visit("k", k), visit("all_elements", all_elements);
}
void members(WeightScheme& value, auto&& visit) {
  auto& [codes, zero, group, scale] = value;
  visit("codes", codes), visit("zero", zero), visit("group", group), visit("scale", scale);
}
void members(ActScheme& value, auto&& visit) {
  auto& [codes, group, zero] = value;
  visit("codes", codes), visit("group", group), visit("zero", zero);
}
void members(StaticActs& value, auto&& visit) {
  auto& [scale, zero] = value;
  visit("scale", scale), visit("zero", zero);
}
void members(Extent& value, auto&& visit) {
  auto& [h, w] = value;
  visit("h", h), visit("w", w);
}
void members(Padding& value, auto&& visit) {
  auto& [top, bottom, left, right] = value;
  visit("top", top), visit("bottom", bottom), visit("left", left), visit("right", right);
}
void members(ConvGeometry& value, auto&& visit) {
  auto& [in_channels, out_channels, height, width, filter, stride, padding, dilation, groups] = value;
  visit("in_channels", in_channels), visit("out_channels", out_channels), visit("height", height), visit("width", width);
  visit("filter", filter), visit("stride", stride), visit("padding", padding), visit("dilation", dilation);
  visit("groups", groups);
}
void members(EpilogueSpec& value, auto&& visit) {
  auto& [sum_bias, row_scale, col_scale, bias, activation, clamp_low, clamp_high, negative_slope, glu, glu_limit, glu_offset,
         gate, residual, out, out_scale, out_zero, out_scales, out_low, out_high] = value;
  visit("sum_bias", sum_bias), visit("row_scale", row_scale), visit("col_scale", col_scale), visit("bias", bias);
  visit("activation", activation), visit("clamp_low", clamp_low), visit("clamp_high", clamp_high);
  visit("negative_slope", negative_slope), visit("glu", glu), visit("glu_limit", glu_limit), visit("glu_offset", glu_offset);
  visit("gate", gate), visit("residual", residual), visit("out", out);
  visit("out_scale", out_scale), visit("out_zero", out_zero), visit("out_scales", out_scales), visit("out_low", out_low);
  visit("out_high", out_high);
}
void members(NormSpec& value, auto&& visit) {
  auto& [kind, eps, weight_offset, bias, add] = value;
  visit("kind", kind), visit("eps", eps), visit("weight_offset", weight_offset), visit("bias", bias), visit("add", add);
}
void members(LinearSpec& value, auto&& visit) {
  auto& [a_dtype, m_max, epilogue, act_scheme, accumulation, norm] = value;
  visit("a_dtype", a_dtype), visit("m_max", m_max), visit("epilogue", epilogue), visit("act_scheme", act_scheme);
  visit("accumulation", accumulation), visit("norm", norm);
}
void members(ConvSpec& value, auto&& visit) {
  auto& [geometry, input, output, a_dtype, batch_max, epilogue, act_scheme, accumulation] = value;
  visit("geometry", geometry), visit("input", input), visit("output", output), visit("a_dtype", a_dtype);
  visit("batch_max", batch_max), visit("epilogue", epilogue), visit("act_scheme", act_scheme);
  visit("accumulation", accumulation);
}
void members(Description& value, auto&& visit) {
  PackedWeightHeader& header = value.header;
  visit("n", header.n), visit("k", header.k), visit("scheme", header.scheme), visit("zero_type", header.zero_type);
  visit("filter", header.filter), visit("scale2", header.scale2), visit("static_acts", header.static_acts);
  visit("act_limit", header.act_limit), visit("paired", header.paired), visit("bytes", value.bytes),
      visit("source", value.source);
}

// ---- Names of enumerators ----

constexpr std::pair<ZeroKind, std::string_view> kZeroKinds[] = {
    {ZeroKind::none, "none"}, {ZeroKind::integer, "integer"}, {ZeroKind::offset, "offset"}, {ZeroKind::real, "real"}};
constexpr std::pair<Accumulation, std::string_view> kAccumulations[] = {{Accumulation::fast, "fast"},
                                                                        {Accumulation::precise, "precise"}};

std::string_view text(ZeroKind zero) { return kZeroKinds[static_cast<std::size_t>(zero)].second; }
std::string_view text(Accumulation accumulation) { return kAccumulations[static_cast<std::size_t>(accumulation)].second; }
std::string_view text(DType dtype) { return name(dtype); }
std::string_view text(Activation activation) { return name(activation); }
std::string_view text(Norm kind) { return name(kind); }
std::string_view text(ImageLayout layout) { return name(layout); }

template <class E>
std::optional<E> named(std::string_view text, std::span<const std::pair<E, std::string_view>> names) {
  for (const auto& [value, name] : names)
    if (name == text) return value;
  return std::nullopt;
}
std::optional<ZeroKind> parse(std::string_view text, ZeroKind) { return named<ZeroKind>(text, kZeroKinds); }
std::optional<Accumulation> parse(std::string_view text, Accumulation) { return named<Accumulation>(text, kAccumulations); }
std::optional<DType> parse(std::string_view text, DType) { return text == name(DType::none) ? DType::none : parse_dtype(text); }
std::optional<Activation> parse(std::string_view text, Activation) { return parse_activation(text); }
std::optional<Norm> parse(std::string_view text, Norm) {
  for (const Norm kind : {Norm::none, Norm::rms, Norm::layer})
    if (name(kind) == text) return kind;
  return std::nullopt;
}
std::optional<ImageLayout> parse(std::string_view text, ImageLayout) {
  for (const ImageLayout layout : {ImageLayout::nchw, ImageLayout::nhwc})
    if (name(layout) == text) return layout;
  return std::nullopt;
}

// ---- Values → JSON ----

template <class T>
Json written(const T& value);
template <class T>
Json written(const std::optional<T>& value) {
  return value ? written(*value) : Json();
}

/// What is written with all of its members.
template <class T>
constexpr bool kComplete = std::is_same_v<T, WeightScheme> || std::is_same_v<T, ActScheme> || std::is_same_v<T, GroupShape> ||
                           std::is_same_v<T, StaticActs> || std::is_same_v<T, Extent> || std::is_same_v<T, Padding>;

/// An object of the members, or of those that differ from the members of a default value.
template <class T>
Json object_of(T value) {
  Json usual = Json::object(), json = Json::object();
  T other{};
  members(other, [&](const char* key, const auto& member) { usual[key] = written(member); });
  members(value, [&](const char* key, const auto& member) {
    if (Json part = written(member); kComplete<T> || part != usual[key]) json[key] = std::move(part);
  });
  return json;
}

template <class T>
Json written(const T& value) {
  if constexpr (std::is_same_v<T, float>) {  // JSON has no other numbers
    if (std::isfinite(value)) return static_cast<double>(value);
    return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  } else if constexpr (std::is_enum_v<T>) {
    return text(value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return value;
  } else {
    return object_of(value);
  }
}

// ---- JSON → values ----

Status wrong(const Json& json, std::string_view wanted) {
  return error(StatusCode::corrupt_data, "is {} where {} is expected", storage::dump_ascii(json).substr(0, 200), wanted);
}

template <class T>
Status read(const Json& json, T& value);
template <class T>
Status read(const Json& json, std::optional<T>& value) {
  return read(json, value.emplace());
}

/// Reads the members that the object has; the others keep their value. `others` are keys that are read elsewhere.
template <class T>
Status read_object(const Json& json, T& value, std::initializer_list<std::string_view> others = {}) {
  if (!json.is_object()) return wrong(json, "an object");
  Status status;
  std::size_t known = 0;
  for (const std::string_view key : others) known += json.contains(key) ? 1 : 0;
  members(value, [&](const char* key, auto& member) {
    const auto found = json.find(key);
    if (found == json.end()) return;
    ++known;
    if (const Status bad = read(*found, member); !bad.ok() && status.ok())
      status = bad.message().starts_with("is ") ? Status(bad.code(), fmt::format("{} {}", key, bad.message()))
                                                : Status(bad.code(), fmt::format("{}.{}", key, bad.message()));
  });
  NIBBLE_RETURN_IF_ERROR(status);
  if (known == json.size()) return {};
  std::string unknown;
  for (const auto& item : json.items()) {
    const std::string& key = item.key();
    bool found = std::ranges::find(others, std::string_view(key)) != others.end();
    members(value, [&](const char* name, const auto&) { found = found || key == name; });
    if (!found) unknown = key;
  }
  return error(StatusCode::corrupt_data, "has the unknown key {}", printable(unknown));
}

template <class T>
Status read(const Json& json, T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!json.is_boolean()) return wrong(json, "true or false");
    value = json.template get<bool>();
  } else if constexpr (std::is_integral_v<T>) {
    const bool whole = json.is_number_unsigned()
                           ? std::in_range<T>(json.template get<std::uint64_t>())
                           : json.is_number_integer() && std::in_range<T>(json.template get<std::int64_t>());
    if (!whole)
      return wrong(json,
                   fmt::format("a whole number from {} to {}", std::numeric_limits<T>::min(), std::numeric_limits<T>::max()));
    value = json.template get<T>();
  } else if constexpr (std::is_same_v<T, float>) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (json.is_number()) {
      const auto number = json.template get<double>();
      if (std::abs(number) > static_cast<double>(std::numeric_limits<float>::max())) return wrong(json, "a number that f32 has");
      value = static_cast<float>(number);
    } else if (json == "inf" || json == "-inf") {
      value = json == "inf" ? kInfinity : -kInfinity;
    } else if (json == "nan") {
      value = std::numeric_limits<float>::quiet_NaN();
    } else {
      return wrong(json, "a number");
    }
  } else if constexpr (std::is_enum_v<T>) {
    const std::optional<T> found = json.is_string() ? parse(json.template get_ref<const std::string&>(), T{}) : std::nullopt;
    if (!found) return wrong(json, "a name that this library knows");
    value = *found;
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (!json.is_string()) return wrong(json, "a text");
    value = json.template get<std::string>();
  } else {
    return read_object(json, value);
  }
  return {};
}

constexpr const char *kScheme = "scheme", *kLayout = "layout", *kLayoutVersion = "layout_version", *kLinear = "linear",
                     *kConv = "conv";

Result<const Layout*> layout_of(const Json& json) {
  std::string layout_name;
  int version = 0;
  for (const char* key : {kScheme, kLayout, kLayoutVersion})
    if (!json.is_object() || !json.contains(key)) return error(StatusCode::corrupt_data, "has no {}", key);
  NIBBLE_RETURN_IF_ERROR(read(json.at(kLayout), layout_name).with_context(kLayout));
  NIBBLE_RETURN_IF_ERROR(read(json.at(kLayoutVersion), version).with_context(kLayoutVersion));
  const Layout* layout = find_layout(layout_name);
  if (layout == nullptr)
    return error(StatusCode::unsupported, "is packed as {}, a layout that this library does not have: pack it again",
                 printable(layout_name));
  if (version != layout->version)
    return error(StatusCode::unsupported, "is packed as version {} of {}, of which this library has version {}: pack it again",
                 version, layout->name, layout->version);
  return layout;
}

}  // namespace

Json to_json(const Description& description) {
  Json json = object_of(description);
  json[kScheme] = written(description.header.scheme);
  json[kLayout] = description.header.layout->name;
  json[kLayoutVersion] = description.header.layout->version;
  if (const auto* linear = std::get_if<LinearSpec>(&description.spec))
    json[kLinear] = written(*linear);
  else
    json[kConv] = written(std::get<ConvSpec>(description.spec));
  return json;
}

Result<Description> parse_description(const Json& json) {
  Description description;
  NIBBLE_ASSIGN_OR_RETURN(description.header.layout, layout_of(json));
  NIBBLE_RETURN_IF_ERROR(read_object(json, description, {kLayout, kLayoutVersion, kLinear, kConv}));
  if (json.contains(kLinear) == json.contains(kConv))
    return error(StatusCode::corrupt_data, "was packed for {}",
                 json.contains(kConv) ? "a linear layer and a convolution" : "neither a linear layer nor a convolution");
  if (json.contains(kConv)) description.spec = ConvSpec();
  NIBBLE_RETURN_IF_ERROR(std::visit(
      [&](auto& spec) {
        const char* key = json.contains(kConv) ? kConv : kLinear;
        return read(json.at(key), spec).with_context(key);
      },
      description.spec));
  return description;
}

}  // namespace nibble::packed
