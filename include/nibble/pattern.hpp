// Regular expressions whose search time is bounded: safe for names and expressions from files and command lines.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"

namespace nibble {

/// A compiled regular expression in the syntax of ECMAScript and Python: characters, `.`, `[a-z]`, `[^a-z]`, `\d \w \s
/// \D \W \S`, `^`, `$`, `\b`, `\B`, groups, `|`, and `* + ? {n} {n,} {n,m}`, lazy or not. There is no lookaround, no backreferences, no
/// flags and no named groups. A character is a byte.
class Pattern {
 public:
  /// Errors: invalid_argument for what is not a regular expression, is nested more than 100 deep or has more than 10,000 steps;
  /// unsupported for a feature that Pattern does not have.
  static Result<Pattern> compile(std::string_view expression);

  /// Whether it matches anywhere in `text`.
  bool search(std::string_view text) const { return run(text, false); }
  /// Whether it matches at the beginning of `text`, as Python's re.match does.
  bool match(std::string_view text) const { return run(text, true); }
  /// Its size: the time of a search is at most proportional to steps() times the length of the text.
  std::size_t steps() const { return steps_.size(); }

 private:
  friend class PatternParser;
  enum class Op : std::uint8_t { accept, byte, jump, fork, begin, end, boundary, inside };
  struct Step {
    Op op = Op::accept;
    std::int32_t next = 1, other = 1;  // the steps that follow, relative to this one
    std::bitset<256> bytes = {};       // that a `byte` step matches
  };

  bool run(std::string_view text, bool anchored) const;

  std::vector<Step> steps_;  // the last one, and no other, accepts
};

}  // namespace nibble
