// The interface of a fuzz target: libFuzzer's entry point, and valid inputs to start from; and helpers that targets share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

/// Small inputs the target accepts, so that mutations of them pass the first check. Bytes, not text.
std::vector<std::string> fuzz_seeds();

namespace nibble::fuzz {

inline void require(bool condition, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (condition) return;
  std::fprintf(stderr, "%s:%d: this does not hold\n", file, line);
  std::abort();
}

/// A failure says why, in one line.
inline bool ok(const Status& status) {
  require(status.ok() || (!status.message().empty() && status.message().find('\n') == std::string::npos));
  return status.ok();
}

/// Decisions from the front of an input; zeros when it is used up.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}

  std::uint8_t byte() {
    const auto value = rest_.empty() ? std::uint8_t{0} : static_cast<std::uint8_t>(rest_.front());
    rest_.remove_prefix(rest_.empty() ? 0 : 1);
    return value;
  }
  bool flag() { return (byte() & 1) != 0; }
  int below(int bound) { return byte() % bound; }
  template <class T>
  T raw() {
    T value{};
    const std::size_t size = std::min(sizeof value, rest_.size());
    if (size > 0) std::memcpy(&value, rest_.data(), size);
    rest_.remove_prefix(size);
    return value;
  }
  template <class List>
  auto& of(List& list) {
    return std::data(list)[static_cast<std::size_t>(byte()) % std::size(list)];
  }
  /// Up to `length` bytes.
  std::string_view text(std::size_t length) {
    const std::string_view taken = rest_.substr(0, length);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

}  // namespace nibble::fuzz
