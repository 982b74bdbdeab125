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

Status::Status(StatusCode code, std::string message, std::vector<Refusal> refusals)
    : code_(code), message_(std::move(message)), refusals_(std::make_shared<const std::vector<Refusal>>(std::move(refusals))) {}

const std::vector<Refusal>& Status::refusals() const {
  static const std::vector<Refusal> kNone;
  return refusals_ == nullptr ? kNone : *refusals_;
}

Status Status::with_context(std::string_view context) const {
  Status status = *this;
  if (!ok()) status.message_ = fmt::format("{}: {}", context, message_);
  return status;
}

Status format_error(StatusCode code, fmt::string_view format, fmt::format_args args) {
  return {code, fmt::vformat(format, args)};
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
