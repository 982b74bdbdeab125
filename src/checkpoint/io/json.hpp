// JSON text: of untrusted files, and of values. Its parser and its serializer are compiled in json.cpp and nowhere else: in a file of a few
// functions they would be most of what there is to compile.
#pragma once

#include <string>
#include <string_view>

#include "core/error.hpp"
#include "json/json_values.hpp"

namespace nibble::storage {

/// A name from a file as one short line for a message, whatever it contains.
std::string printable(std::string_view text);

/// nlohmann-json's message about a syntax error, which quotes the text, without its error code and position, short and in ASCII.
std::string json_complaint(std::string_view what);

/// nlohmann-json stops at a zero byte, whatever follows.
Status check_no_zero_bytes(std::string_view text, std::string_view source);

/// Parses `text` into Json or OrderedJson. corrupt_data with the byte position when it is not JSON, is nested more
/// than kMaxJsonDepth deep, or repeats a key where `unique_keys` forbids it (else the last one counts, as in Python).
template <class Value>
Result<Value> parse_json(std::string_view text, std::string_view source, bool unique_keys = false);
extern template Result<Json> parse_json(std::string_view, std::string_view, bool);
extern template Result<OrderedJson> parse_json(std::string_view, std::string_view, bool);

/// The text of a value: on one line, or indented by so many spaces. Throws nlohmann-json's type_error where a string is not UTF-8.
std::string dump(const Json& json, int indent = -1);
std::string dump(const OrderedJson& json, int indent = -1);
/// The same on one line of ASCII, where bytes that are not UTF-8 are replaced.
std::string dump_ascii(const Json& json);

}  // namespace nibble::storage
