// Checks of option values, silent in the help text (the option's own text says what is allowed).
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace nibble::cli {

/// "; the nearest is 'inspect'" where one of the names is `text` with one or two typing errors, else "".
std::string nearest_of(const std::string& text, const std::vector<std::string>& names);

inline CLI::Validator one_of(std::vector<std::string> allowed) {
  const std::string names = fmt::format("{}", fmt::join(allowed, " "));  // nibble generate gives them to shells
  const auto check = [allowed = std::move(allowed)](const std::string& value) {
    if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return std::string();
    return fmt::format("'{}' is not one of {}{}", value, fmt::join(allowed, ", "), nearest_of(value, allowed));
  };
  return CLI::Validator(check, "").name(names);
}

template <class T>
CLI::Validator between(T low, T high) {
  const auto check = [low, high](const std::string& text) {
    T value{};
    if (CLI::detail::lexical_cast(text, value) && low <= value && value <= high) return std::string();
    return fmt::format("'{}' is not {} from {} to {}", text, std::is_integral_v<T> ? "a whole number" : "a number", low, high);
  };
  return {check, ""};
}

/// No sign, which a count without one would take for a large number.
inline CLI::Validator seed() { return between(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()); }

/// The largest factor; with a larger one Gaussian activations exceed f16.
inline CLI::Validator outlier_factor() { return between(1e-3f, 1e4f); }

}  // namespace nibble::cli
