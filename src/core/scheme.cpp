#include "nibble/scheme.hpp"

#include <charconv>
#include <optional>

#include "core/error.hpp"
#include "core/printable.hpp"

namespace nibble {
namespace {

std::string group_name(const GroupShape& g, char per_row) {
  if (g == GroupShape::tensor()) return "t";
  if (g == GroupShape::channel()) return std::string(1, per_row);
  if (g.all_elements) return fmt::format("ci{}", g.k);
  if (g.n == 1) return fmt::format("g{}", g.k);
  return fmt::format("b{}x{}", g.n, g.k);
}

std::string_view zero_token(ZeroKind zero) {
  return zero == ZeroKind::integer ? "z" : zero == ZeroKind::offset ? "o" : zero == ZeroKind::real ? "f" : "";
}

/// Consumes the token of a kind of zero points that is one of `allowed`; nothing: none.
ZeroKind take_zero(std::string_view& text, std::string_view allowed) {
  for (const ZeroKind zero : {ZeroKind::integer, ZeroKind::offset, ZeroKind::real}) {
    if (!text.starts_with(zero_token(zero)) || allowed.find(zero_token(zero)) == allowed.npos) continue;
    text.remove_prefix(1);
    return zero;
  }
  return ZeroKind::none;
}

/// Consumes a positive decimal number from the front of `text`.
std::optional<std::int32_t> take_number(std::string_view& text) {
  std::int32_t value = 0;
  auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc{} || value <= 0 || text.front() == '0') return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

std::optional<GroupShape> parse_group(std::string_view text, char per_row) {
  if (text == "t") return GroupShape::tensor();
  if (text.size() == 1 && text[0] == per_row) return GroupShape::channel();
  if (text.empty()) return std::nullopt;
  const bool of_images = per_row == 'c' && text.starts_with("ci");
  if (of_images) text.remove_prefix(1);
  const char kind = text[0];
  text.remove_prefix(1);
  if (text.empty()) return std::nullopt;
  auto first = take_number(text);
  if (!first) return std::nullopt;
  if (of_images && text.empty()) return GroupShape::image_channels(*first);
  if (kind == 'g' && text.empty()) return GroupShape::group(*first);
  if (kind != 'b' || text.size() < 2 || text[0] != 'x') return std::nullopt;
  text.remove_prefix(1);
  auto second = take_number(text);
  if (!second || !text.empty()) return std::nullopt;
  return GroupShape::block(*first, *second);
}

/// Splits "u4zg128" after its longest DType prefix.
std::optional<DType> take_codes(std::string_view& text) {
  for (std::size_t length = std::min<std::size_t>(text.size(), 8); length > 0; --length) {
    if (auto dtype = parse_dtype(text.substr(0, length))) {
      if (bits(*dtype) > 8 || info(*dtype).kind == DTypeKind::other) continue;
      text.remove_prefix(length);
      return dtype;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string WeightScheme::name() const {
  if (is_dense()) return std::string(nibble::name(codes));
  return fmt::format("{}{}{}", nibble::name(codes), zero_token(zero), group_name(group, 'c'));
}

std::string WeightScheme::describe() const {
  const DTypeInfo& c = info(codes);
  if (is_dense()) return fmt::format("{}-bit floats, not quantized", c.bits);
  std::string text = fmt::format("{}-bit {} codes", c.bits,
                                 c.kind == DTypeKind::floating ? "float"
                                 : c.kind == DTypeKind::sint   ? "signed"
                                                               : "unsigned");
  if (c.kind == DTypeKind::biased) text += fmt::format(" (value = code − {})", c.bias);
  if (zero == ZeroKind::integer) text += ", integer zero points";
  if (zero == ZeroKind::offset) text += ", float offsets";
  if (zero == ZeroKind::real) text += ", float zero points";
  text += fmt::format(", {} scales ", nibble::name(scale));
  if (group == GroupShape::tensor()) return text + "per tensor";
  if (group == GroupShape::channel()) return text + "per channel";
  if (group.all_elements)
    return text + fmt::format("per {} channels of the images, shared by all elements of the filter", group.k);
  if (group.n == 1) return text + fmt::format("per group of {}", group.k);
  return text + fmt::format("per {}×{} block", group.n, group.k);
}

std::string Scheme::name() const {
  if (act.codes == DType::none) return weight.name();
  return fmt::format("{}{}{}_{}", nibble::name(act.codes), zero_token(act.zero), group_name(act.group, 'r'), weight.name());
}

Result<Scheme> Scheme::parse(std::string_view text, DType scale) {
  auto bad = [&](std::string_view why) {
    return error(StatusCode::invalid_argument,
                 "'{}' is not a scheme: {}; write <codes><z|o|f|><t|c|gSIZE|ciSIZE|bNxK>, for example u4zg128, u4b8g32, s8c or "
                 "s8r_s8c, or "
                 "f32, f16 or bf16 for a weight that is not quantized",
                 shown(text), why);
  };
  Scheme scheme;
  std::string_view rest = text;
  if (const std::size_t bar = text.find('_'); bar != std::string_view::npos) {
    std::string_view act = text.substr(0, bar);
    rest = text.substr(bar + 1);
    auto codes = take_codes(act);
    if (!codes) return bad("the activation code type is unknown");
    const ZeroKind zero = take_zero(act, "zo");
    auto group = parse_group(act, 'r');
    if (!group || group->n > 1) return bad("the activation group is not t, r or gSIZE");
    scheme.act = {*codes, *group, zero};
  }
  if (const auto floats = parse_dtype(rest); floats && is_compute_float(*floats)) {
    if (scheme.act.codes != DType::none) return bad("the activations of a weight that is not quantized are not either");
    scheme.weight = WeightScheme::dense(*floats);
    return scheme;
  }
  auto codes = take_codes(rest);
  if (!codes) return bad("the weight code type is unknown");
  scheme.weight.codes = *codes;
  scheme.weight.scale = scale;
  scheme.weight.zero = take_zero(rest, "zof");
  auto group = parse_group(rest, 'c');
  if (!group) return bad("the group is not t, c, gSIZE, ciSIZE or bNxK");
  scheme.weight.group = *group;
  return scheme;
}

}  // namespace nibble
