// Regular expressions that end: for names and expressions that come from files and command lines.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "nibble/status.hpp"

namespace nibble {

/// A compiled regular expression. What it has is written as in ECMAScript and Python: characters, `.`, `[a-z]`, `[^a-z]`, `\d \w \s
/// \D \W \S`, `^`, `$`, `\b`, `\B`, groups, `|`, and `* + ? {n} {n,} {n,m}`, lazy or not. It has no lookaround, no backreferences, no
/// flags and no named groups. A character is a byte.
class Pattern {
 public:
  /// invalid_argument: not a regular expression, nested more than 100 deep, or of more than 10,000 steps; unsupported: it has what a
  /// Pattern has not.
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
    std::int32_t next = 1, other = 1;  // where to go on, relative to this step
    std::bitset<256> bytes = {};       // that a `byte` step takes
  };

  bool run(std::string_view text, bool anchored) const;

  std::vector<Step> steps_;  // the last one, and no other, accepts
};

}  // namespace nibble
