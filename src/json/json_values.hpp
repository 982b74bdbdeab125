// The JSON values of the library and of the tool: nlohmann-json's, but for how they end.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace nibble {

/// Only a name: it makes the values a type of our own, so that what follows changes nothing for others who use nlohmann-json.
template <class T, class SFINAE = void>
struct JsonSerializer : nlohmann::adl_serializer<T, SFINAE> {};

template <template <class, class, class...> class Object>
using BasicJson = nlohmann::basic_json<Object, std::vector, std::string, bool, std::int64_t, std::uint64_t, double,
                                       std::allocator, JsonSerializer>;

/// With the keys of objects sorted, and as they came.
using Json = BasicJson<std::map>;
using OrderedJson = BasicJson<nlohmann::ordered_map>;

/// How deep a text that is parsed may be nested: all that values do, they do recursively.
inline constexpr int kMaxJsonDepth = 64;

/// Ends a value of the type `kind`, and all values in it. nlohmann-json moves them into a vector first, for values that are nested
/// without end: the destructor allocates, and without memory it ends the process.
template <class Value>
void destroy_json(const Value& value, nlohmann::detail::value_t kind) noexcept {
  const auto end = []<class T>(T* part) {  // null where there was no memory for it
    if (part == nullptr) return;
    std::destroy_at(part);
    std::allocator<T>().deallocate(part, 1);
  };
  switch (kind) {
    case nlohmann::detail::value_t::object: return end(value.object);
    case nlohmann::detail::value_t::array: return end(value.array);
    case nlohmann::detail::value_t::string: return end(value.string);
    case nlohmann::detail::value_t::binary: return end(value.binary);
    default: return;
  }
}

}  // namespace nibble

template <>
inline void nibble::Json::json_value::destroy(value_t kind) {
  nibble::destroy_json(*this, kind);
}
template <>
inline void nibble::OrderedJson::json_value::destroy(value_t kind) {
  nibble::destroy_json(*this, kind);
}
