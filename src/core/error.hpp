// Building and propagating errors.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "nibble/status.hpp"

namespace nibble {

/// error() of arguments of any types, compiled once.
Status format_error(StatusCode code, fmt::string_view format, fmt::format_args args);

/// error(StatusCode::invalid_argument, "K={} is not a multiple of group_size={}", k, g)
template <class... Args>
Status error(StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return format_error(code, format, fmt::make_format_args(args...));
}

/// The Status of the exception that is being handled: io_error for resources that the system refused (memory, threads), else internal.
Status caught();

#define NIBBLE_CONCAT_INNER(a, b) a##b
#define NIBBLE_CONCAT(a, b) NIBBLE_CONCAT_INNER(a, b)

/// Returns the Status of `expression` from this function unless it is ok.
#define NIBBLE_RETURN_IF_ERROR(expression)                                      \
  do {                                                                          \
    if (::nibble::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

/// NIBBLE_ASSIGN_OR_RETURN(auto x, make_x());
#define NIBBLE_ASSIGN_OR_RETURN(declaration, expression) \
  NIBBLE_ASSIGN_OR_RETURN_INNER(NIBBLE_CONCAT(result_, __LINE__), declaration, expression)
#define NIBBLE_ASSIGN_OR_RETURN_INNER(result, declaration, expression) \
  auto result = (expression);                                          \
  if (!result.ok()) return result.status();                            \
  declaration = std::move(result).value()

}  // namespace nibble
