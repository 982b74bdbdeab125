#include "nibble/status.hpp"

#include <new>
#include <stdexcept>
#include <system_error>

#include "core/error.hpp"

namespace nibble {

std::string_view name(StatusCode code) {
  switch (code) {
    case StatusCode::ok: return "ok";
    case StatusCode::invalid_argument: return "invalid_argument";
    case StatusCode::unsupported: return "unsupported";
    case StatusCode::not_found: return "not_found";
    case StatusCode::already_exists: return "already_exists";
    case StatusCode::io_error: return "io_error";
    case StatusCode::corrupt_data: return "corrupt_data";
    case StatusCode::internal: return "internal";
  }
  return "unknown";
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return {code_, fmt::format("{}: {}", context, message_)};
}

Status caught() {
  // "out of memory" is short enough to be stored without allocation.
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return {StatusCode::io_error, "out of memory"};
  } catch (const std::length_error&) {
    return {StatusCode::io_error, "out of memory"};
  } catch (const std::system_error& e) {
    return {StatusCode::io_error, e.what()};
  } catch (const std::exception& e) {
    return {StatusCode::internal, e.what()};
  } catch (...) {
    return {StatusCode::internal, "an exception of an unknown type"};
  }
}

}  // namespace nibble
