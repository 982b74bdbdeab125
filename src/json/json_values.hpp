// The JSON values of the library and of the tool: nlohmann-json's, with another way to destroy them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace nibble {

/// A tag that makes a type of our own, so that the specialisation below does not affect other users of nlohmann-json.
template <class T, class SFINAE = void>
struct JsonSerializer : nlohmann::adl_serializer<T, SFINAE> {};

template <template <class, class, class...> class Object>
using BasicJson = nlohmann::basic_json<Object, std::vector, std::string, bool, std::int64_t, std::uint64_t, double,
                                       std::allocator, JsonSerializer>;

/// Keys of objects are sorted in Json and keep their order in OrderedJson.
using Json = BasicJson<std::map>;
using OrderedJson = BasicJson<nlohmann::ordered_map>;

/// The deepest nesting of a parsed text: operations on values are recursive.
inline constexpr int kMaxJsonDepth = 64;

/// Destroys a value of the type `kind`, and all values in it. The destructor of nlohmann-json first moves them into a vector, against
/// unlimited nesting: it allocates, and without memory it ends the process.
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
