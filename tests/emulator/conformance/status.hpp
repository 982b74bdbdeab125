// A launch on the emulated GPU, as the library reports one.
#pragma once

#include "core/error.hpp"

namespace nibble::emulator {

inline Status status_of(int code) {
  if (code == 0) return {};
  return error(StatusCode::internal, "a launch on the emulated GPU returns {}", code);
}

}  // namespace nibble::emulator
