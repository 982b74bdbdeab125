// Any regular expression and any text, the one before and the other behind a line break: refused, or an answer in time. The
// expression also stands between others, which must not change whether it is one.
#include "nibble/pattern.hpp"

#include "fuzz/fuzz.hpp"

using namespace nibble;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t line = std::min(input.find('\n'), input.size());
  const std::string_view expression = input.substr(0, line);
  const auto pattern = Pattern::compile(expression);
  if (!fuzz::ok(pattern.status())) return 0;
  constexpr std::size_t kVisits = 1 << 14;  // of steps, at most, so that long expressions search short texts
  const std::string_view text = input.substr(line).substr(0, std::clamp<std::size_t>(kVisits / pattern->steps(), 4, 256));
  const bool found = pattern->search(text);
  fuzz::require(found || !pattern->match(text));
  const auto group = Pattern::compile("(?:" + std::string(expression) + ")");
  fuzz::require(!group.ok() || group->search(text) == found);  // one level of nesting may be too much
  const auto either = Pattern::compile(std::string(expression) + "|");
  fuzz::require(!either.ok() || either->search(text));  // so may two steps be
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {"(^|\\.)(lm_head|wte)$\nmodel.lm_head",
          "layers\\.(0|1\\d)\\.\nlayers.17.",
          "^[^a-c\\s]{2,3}?\nxyz",
          "(.*)*(.*)*x\naaaa",
          "\\bgate\\b|a+b?\nmlp.gate",
          "(?:a{3,}|[]b-]){2}\naaa]"};
}
