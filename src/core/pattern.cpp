// An expression is compiled to the states of an NFA (Thompson's construction), and a text is matched by following all active states at
// once: no state is visited twice at one position of the text.
#include "nibble/pattern.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "core/error.hpp"
#include "core/printable.hpp"

namespace nibble {
namespace {

constexpr std::size_t kMaxSteps = 10'000;
constexpr int kMaxDepth = 100;

using Bytes = std::bitset<256>;

Bytes range(int first, int last) {
  Bytes bytes;
  for (int c = first; c <= last; ++c) bytes.set(static_cast<std::size_t>(c));
  return bytes;
}

/// The bytes of \d, \w or \s; \D, \W and \S are the other bytes.
std::optional<Bytes> class_of(char letter) {
  switch (letter | 0x20) {
    case 'd': return letter == 'd' ? range('0', '9') : ~range('0', '9');
    case 's': {
      const Bytes space = range('\t', '\r') | range(' ', ' ');
      return letter == 's' ? space : ~space;
    }
    case 'w': {
      const Bytes word = range('0', '9') | range('A', 'Z') | range('a', 'z') | range('_', '_');
      return letter == 'w' ? word : ~word;
    }
    default: return std::nullopt;
  }
}

/// The only byte in `bytes`; -1 when there are none or several.
int only(const Bytes& bytes) {
  int c = 0;
  while (c < 256 && !bytes[static_cast<std::size_t>(c)]) ++c;
  return bytes.count() == 1 ? c : -1;
}

}  // namespace

/// Recursive descent; the first failure ends it.
class PatternParser {
 public:
  explicit PatternParser(std::string_view text) : text_(text) {}

  Result<Pattern> parse() {
    Pattern pattern;
    pattern.steps_ = alternatives(0);
    if (failure_.ok() && at_ < text_.size()) fail("a ) that closes nothing", at_);
    NIBBLE_RETURN_IF_ERROR(failure_);
    pattern.steps_.emplace_back();
    return pattern;
  }

 private:
  using Op = Pattern::Op;
  using Step = Pattern::Step;
  using Steps = std::vector<Step>;  // entered at the first, left after the last

  void fail(std::string_view what, std::size_t at, StatusCode code = StatusCode::invalid_argument) {
    if (!failure_.ok()) return;
    failure_ = code == StatusCode::unsupported
                   ? error(code, "'{}' has {} at byte {}, which nibble's regular expressions do not have", shown(text_), what, at)
                   : error(code, "'{}' is not a regular expression: {} at byte {}", shown(text_), what, at);
    at_ = text_.size();
  }
  void check_size(const Steps& steps) {
    if (steps.size() > kMaxSteps) fail(fmt::format("more than {} steps", kMaxSteps), at_);
  }
  bool more() const { return at_ < text_.size(); }
  bool take(std::string_view token) {
    const bool there = text_.substr(at_).starts_with(token);
    if (there) at_ += token.size();
    return there;
  }
  static void append(Steps& steps, const Steps& more) { steps.insert(steps.end(), more.begin(), more.end()); }
  static std::int32_t length(const Steps& steps) { return static_cast<std::int32_t>(steps.size()); }
  static Steps byte(const Bytes& bytes) { return {{.op = Op::byte, .bytes = bytes}}; }

  Steps alternatives(int depth) {
    if (depth > kMaxDepth) fail(fmt::format("groups nested more than {} deep", kMaxDepth), at_);
    Steps steps = sequence(depth);
    std::vector<std::int32_t> ends;  // the jumps behind all alternatives but the last
    std::int32_t last = 0;           // the first step of the last alternative
    while (take("|")) {
      steps.insert(steps.begin() + last, {.op = Op::fork, .other = length(steps) - last + 2});
      ends.push_back(length(steps));
      steps.push_back({.op = Op::jump});
      last = length(steps);
      append(steps, sequence(depth));
      check_size(steps);
    }
    for (const std::int32_t end : ends) steps[static_cast<std::size_t>(end)].next = length(steps) - end;
    return steps;
  }

  Steps sequence(int depth) {
    Steps steps;
    while (more() && text_[at_] != '|' && text_[at_] != ')') {
      append(steps, repeated(depth));
      check_size(steps);
    }
    return steps;
  }

  Steps repeated(int depth) {
    const std::size_t begin = at_;
    Steps once = atom(depth);
    std::size_t least = 1, most = 1;
    constexpr std::size_t kForever = kMaxSteps;  // no number of an expression is as large
    if (take("*")) {
      least = 0, most = kForever;
    } else if (take("+")) {
      most = kForever;
    } else if (take("?")) {
      least = 0;
    } else if (take("{")) {
      most = least = number();
      if (take(",")) most = more() && text_[at_] == '}' ? kForever : number();
      if (!take("}") || least > most) fail("a { that is no {n}, {n,} or {n,m}; write \\{ for the character", begin);
    } else {
      return once;
    }
    take("?");  // lazy: whether there is a match does not change
    if (more() && std::string_view("*+?{").find(text_[at_]) != std::string_view::npos) fail("a repetition of a repetition", at_);
    const std::size_t copies = most == kForever ? least + 1 : most;
    if (copies * (once.size() + 2) > kMaxSteps) fail(fmt::format("more than {} steps", kMaxSteps), begin);
    if (!failure_.ok()) return {};
    Steps steps;
    for (std::size_t i = 0; i < least; ++i) append(steps, once);
    for (std::size_t i = least; i < copies; ++i) {
      const std::int32_t back = most == kForever ? 1 : 0;
      steps.push_back({.op = Op::fork, .other = length(once) + 1 + back});
      append(steps, once);
      if (back != 0) steps.push_back({.op = Op::jump, .next = -length(once) - 1});
    }
    return steps;
  }

  std::size_t number() {
    std::size_t value = 0;
    const auto [end, problem] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (problem != std::errc() || value >= kMaxSteps) fail("no number of repetitions that can be", at_);
    at_ = std::max(at_, static_cast<std::size_t>(end - text_.data()));
    return value;
  }

  Steps atom(int depth) {
    const std::size_t begin = at_;
    const char c = text_[at_++];
    switch (c) {
      case '(': {
        if (!take("?:") && more() && text_[at_] == '?')
          fail("lookaround, a flag or a named group", begin, StatusCode::unsupported);
        Steps inner = alternatives(depth + 1);
        if (!take(")")) fail("a ( that is never closed", begin);
        return inner;
      }
      case '[': return byte(set(begin));
      case '.': return byte(~range('\n', '\n'));
      case '^': return {{.op = Op::begin}};
      case '$': return {{.op = Op::end}};
      case '*':
      case '+':
      case '?':
      case '{': fail("nothing to repeat", begin); return {};
      case '\\':
        if (take("b")) return {{.op = Op::boundary}};
        if (take("B")) return {{.op = Op::inside}};
        if (take("A")) return {{.op = Op::begin}};
        if (take("Z")) return {{.op = Op::end}};
        return byte(escape(begin));
      default: break;
    }
    Steps steps = byte(range(static_cast<unsigned char>(c), static_cast<unsigned char>(c)));
    for (; static_cast<unsigned char>(c) >= 0xc0 && more() && (text_[at_] & 0xc0) == 0x80;
         ++at_)  // the rest of a UTF-8 character
      append(steps, byte(range(static_cast<unsigned char>(text_[at_]), static_cast<unsigned char>(text_[at_]))));
    return steps;
  }

  /// After a backslash.
  Bytes escape(std::size_t begin) {
    static constexpr std::string_view kLetters = "tnvfr", kControls = "\t\n\v\f\r";
    if (!more()) {
      fail("a \\ with nothing behind it", begin);
      return {};
    }
    const char c = text_[at_++];
    if (const auto letters = class_of(c)) return *letters;
    if (const std::size_t i = kLetters.find(c); i != std::string_view::npos) return range(kControls[i], kControls[i]);
    if (c >= '1' && c <= '9') fail("a backreference", begin, StatusCode::unsupported);
    if ((*class_of('w'))[static_cast<unsigned char>(c)] || static_cast<unsigned char>(c) >= 0x80)
      fail("an escape", begin, StatusCode::unsupported);
    return range(static_cast<unsigned char>(c), static_cast<unsigned char>(c));
  }

  /// After a [.
  Bytes set(std::size_t begin) {
    Bytes bytes;
    const bool negated = take("^");
    for (bool first = true; failure_.ok() && (first || !take("]")); first = false) {  // a ] in the first place is a character
      const std::size_t from = at_;
      const Bytes low = one(begin);
      if (text_.substr(at_, 1) != "-" || text_.substr(at_ + 1, 1) == "]") {
        bytes |= low;
        continue;
      }
      ++at_;
      const int lowest = only(low), highest = only(one(begin));
      if (lowest < 0 || lowest > highest) fail("no range from a lower to a higher character", from);
      if (failure_.ok()) bytes |= range(lowest, highest);
    }
    return negated ? ~bytes : bytes;
  }

  /// One character or escape of the [] that begins there.
  Bytes one(std::size_t begin) {
    if (!more()) fail("a [ that is never closed", begin);
    if (text_.substr(at_).starts_with("[:")) fail("[: :]", at_, StatusCode::unsupported);
    if (!failure_.ok()) return {};
    const std::size_t at = at_++;
    const auto c = static_cast<unsigned char>(text_[at]);
    if (c == '\\') return take("b") ? range('\b', '\b') : escape(at);
    if (c >= 0x80) fail("a character beyond ASCII in a []", at, StatusCode::unsupported);
    return range(c, c);
  }

  std::string_view text_;
  std::size_t at_ = 0;
  Status failure_;
};

Result<Pattern> Pattern::compile(std::string_view expression) { return PatternParser(expression).parse(); }

bool Pattern::run(std::string_view text, bool anchored) const {
  static const Bytes word = *class_of('w');
  const auto is_word = [&](std::size_t at) { return at < text.size() && word[static_cast<unsigned char>(text[at])]; };
  std::vector<std::size_t> seen(steps_.size(), 0);  // the last position at which a step was reached, plus one
  std::vector<std::int32_t> reached, waiting;       // steps to follow at this position, and steps that wait for its byte
  for (std::size_t at = 0;; ++at) {
    if (at == 0 || !anchored) reached.push_back(0);
    waiting.clear();
    while (!reached.empty()) {
      const std::int32_t s = reached.back();
      reached.pop_back();
      if (std::exchange(seen[static_cast<std::size_t>(s)], at + 1) == at + 1) continue;
      const Step& step = steps_[static_cast<std::size_t>(s)];
      bool holds = true;
      switch (step.op) {
        case Op::accept: return true;
        case Op::byte: waiting.push_back(s); continue;
        case Op::fork: reached.push_back(s + step.other); break;
        case Op::jump: break;
        case Op::begin: holds = at == 0; break;
        case Op::end: holds = at == text.size(); break;
        case Op::boundary: holds = is_word(at - 1) != is_word(at); break;
        case Op::inside: holds = is_word(at - 1) == is_word(at); break;
      }
      if (holds) reached.push_back(s + step.next);
    }
    if (at == text.size()) return false;
    for (const std::int32_t s : waiting)
      if (steps_[static_cast<std::size_t>(s)].bytes[static_cast<unsigned char>(text[at])]) reached.push_back(s + 1);
  }
}

}  // namespace nibble
