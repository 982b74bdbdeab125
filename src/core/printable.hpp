// Text of unknown origin in messages of one line.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace nibble {

/// The first 100 bytes of `text`, with ? in place of anything but printable ASCII, and … at the end if there is more.
inline std::string shown(std::string_view text) {
  std::string line(text.substr(0, 100));
  std::ranges::replace_if(
      line, [](char c) { return c < ' ' || c > '~'; }, '?');
  return line.size() < text.size() ? line + "…" : line;
}

}  // namespace nibble
