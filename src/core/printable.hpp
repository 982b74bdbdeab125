// Text of unknown origin in messages of one line.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace nibble {

/// The first 100 bytes of `text`, with ? for what is no printable ASCII, and … where that is not all.
inline std::string shown(std::string_view text) {
  std::string line(text.substr(0, 100));
  std::ranges::replace_if(
      line, [](char c) { return c < ' ' || c > '~'; }, '?');
  return line.size() < text.size() ? line + "…" : line;
}

}  // namespace nibble
