#include "checkpoint/io/json.hpp"

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace nibble::storage {

std::string printable(std::string_view text) { return dump_ascii(Json(text.substr(0, 200))); }

std::string json_complaint(std::string_view what) {
  if (const std::size_t at = what.find(": "); at != std::string_view::npos) what.remove_prefix(at + 2);
  std::string text(what.substr(0, 160));
  std::ranges::replace_if(
      text, [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

Status check_no_zero_bytes(std::string_view text, std::string_view source) {
  const std::size_t zero = text.find('\0');
  if (zero == std::string_view::npos) return {};
  return error(StatusCode::corrupt_data, "{}: not valid JSON at byte {}: a zero byte", source, zero);
}

template <class Value>
Result<Value> parse_json(std::string_view text, std::string_view source, bool unique_keys) {
  bool too_deep = false;
  std::string repeated;
  std::vector<std::unordered_set<std::string>> open_objects;
  const auto watch = [&](int depth, typename Value::parse_event_t event, Value& value) {
    too_deep = too_deep || depth > kMaxJsonDepth;
    if (too_deep || !unique_keys) return !too_deep;
    if (event == Value::parse_event_t::object_start) open_objects.emplace_back();
    if (event == Value::parse_event_t::object_end) open_objects.pop_back();
    if (event == Value::parse_event_t::key)
      if (auto key = value.template get<std::string>(); !open_objects.back().insert(key).second && repeated.empty())
        repeated = key;
    return true;
  };
  NIBBLE_RETURN_IF_ERROR(check_no_zero_bytes(text, source));
  try {
    Value json = Value::parse(text, watch);
    if (too_deep) return error(StatusCode::corrupt_data, "{}: nested more than {} deep", source, kMaxJsonDepth);
    if (!repeated.empty()) return error(StatusCode::corrupt_data, "{}: the key {} appears twice", source, printable(repeated));
    return json;
  } catch (const typename Value::parse_error& e) {
    return error(StatusCode::corrupt_data, "{}: not valid JSON at byte {}: {}", source, e.byte == 0 ? 0 : e.byte - 1,
                 json_complaint(e.what()));
  } catch (const typename Value::exception& e) {  // a number out of range
    return error(StatusCode::corrupt_data, "{}: not valid JSON: {}", source, json_complaint(e.what()));
  }
}

template Result<Json> parse_json(std::string_view, std::string_view, bool);
template Result<OrderedJson> parse_json(std::string_view, std::string_view, bool);

std::string dump(const Json& json, int indent) { return json.dump(indent); }
std::string dump(const OrderedJson& json, int indent) { return json.dump(indent); }
std::string dump_ascii(const Json& json) { return json.dump(-1, ' ', true, Json::error_handler_t::replace); }

}  // namespace nibble::storage
