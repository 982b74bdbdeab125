// Regular expressions: what they match, what they refuse, and that they end.
#include "nibble/pattern.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <string>

namespace nibble {
namespace {

using ::testing::HasSubstr;

bool search(const std::string& expression, const std::string& text) {
  const auto pattern = Pattern::compile(expression);
  EXPECT_TRUE(pattern.ok()) << pattern.status().message();
  return pattern.ok() && pattern->search(text);
}

void expect_refused(const std::string& expression, StatusCode code, const std::string& why) {
  const auto pattern = Pattern::compile(expression);
  ASSERT_FALSE(pattern.ok()) << expression;
  EXPECT_EQ(pattern.status().code(), code) << expression;
  EXPECT_THAT(pattern.status().message(), HasSubstr(why));
  EXPECT_LT(pattern.status().message().size(), 300u);
}

TEST(Pattern, MatchesWhatItSays) {
  EXPECT_TRUE(search(R"((^|\.)(lm_head|embed_tokens)$)", "model.embed_tokens"));
  EXPECT_FALSE(search(R"((^|\.)(lm_head|embed_tokens)$)", "model.embed_tokens.proj"));
  EXPECT_TRUE(search(R"(layers\.(0|1\d)\.mlp\.(?:gate|up)_proj)", "model.layers.17.mlp.up_proj"));
  EXPECT_FALSE(search(R"(layers\.(0|1\d)\.mlp\.(?:gate|up)_proj)", "model.layers.7.mlp.up_proj"));
  EXPECT_TRUE(search("", ""));
  EXPECT_TRUE(search("^(a|)$", ""));
  EXPECT_TRUE(search(R"(^\w{2,3}?$)", "abc"));
  EXPECT_FALSE(search(R"(^\w{2,3}$)", "abcd"));
  EXPECT_TRUE(search(R"(^x{3,}$)", "xxxxx"));
  EXPECT_FALSE(search(R"(^x{3,}$)", "xx"));
  EXPECT_TRUE(search(R"(^[]a\-\]^-]+$)", "]a-^"));
  EXPECT_TRUE(search(R"(^[^0-9\s]+$)", "ab"));
  EXPECT_FALSE(search(R"(^[^0-9\s]+$)", "a b"));
  EXPECT_TRUE(search(R"(\bgate\b)", "mlp.gate"));
  EXPECT_FALSE(search(R"(\bgate\b)", "mlp.gate_proj"));
  EXPECT_TRUE(search(R"(e\B.)", "gate_proj"));
  EXPECT_TRUE(search(R"(\A\D\W\S\Z)", "a.b"));
  EXPECT_TRUE(search("^é+$", "éé"));
  EXPECT_FALSE(search("^a.b$", "a\nb"));
}

TEST(Pattern, ManyAlternatives) {
  std::string expression = "^(x0";
  for (int i = 1; i < 1500; ++i) expression += i == 700 ? "||a|" : "|x" + std::to_string(i);
  const auto pattern = Pattern::compile(expression + ")$");
  ASSERT_TRUE(pattern.ok()) << pattern.status().message();
  for (const char* text : {"x0", "x1", "", "a", "x701", "x1499"}) EXPECT_TRUE(pattern->search(text)) << text;
  for (const char* text : {"x", "b", "x700", "x1500", "ax0"}) EXPECT_FALSE(pattern->search(text)) << text;
}

TEST(Pattern, MatchIsAnchoredAtTheBeginning) {
  const auto pattern = Pattern::compile("b|ac");
  ASSERT_TRUE(pattern.ok());
  EXPECT_TRUE(pattern->match("bcd"));
  EXPECT_TRUE(pattern->match("acd"));
  EXPECT_FALSE(pattern->match("ab"));
  EXPECT_TRUE(pattern->search("ab"));
}

TEST(Pattern, RefusesWithThePlaceAndTheReason) {
  using enum StatusCode;
  for (const char* bad : {"(", "a)", "*", "a**", "a|+", "[", "[]", "[a-", "[z-a]", "[\\d-z]", "\\", "x{", "x{a}", "x{3,2}", "x{1",
                          "{1}", "x{99999}", "x{99999999999999999999}", "[a\\"})
    expect_refused(bad, invalid_argument, std::string("'") + bad + "' is not a regular expression: ");
  expect_refused("ab(c", invalid_argument, "a ( that is never closed at byte 2");
  expect_refused(R"((a)\1)", unsupported, R"('(a)\1' has a backreference at byte 3)");
  for (const char* group : {"(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?i)a", "(?P<n>a)"})
    expect_refused(group, unsupported, "lookaround, a flag or a named group at byte 0");
  expect_refused("[[:alpha:]]", unsupported, "[: :]");
  expect_refused("\\p{L}", unsupported, "an escape at byte 0");
}

TEST(Pattern, SizesAreBounded) {
  expect_refused(std::string(20000, '('), StatusCode::invalid_argument, "nested more than 100 deep");
  expect_refused("((a{100}){100}){100}", StatusCode::invalid_argument, "more than 10000 steps");
  expect_refused("(((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9}", StatusCode::invalid_argument, "more than 10000 steps");
  expect_refused(std::string(10001, 'a'), StatusCode::invalid_argument, "more than 10000 steps");
  std::string alternatives = "a";
  for (int i = 0; i < 100000; ++i) alternatives += "|a";
  expect_refused(alternatives, StatusCode::invalid_argument, "more than 10000 steps");
  const auto largest = Pattern::compile("(a{98}){98}");
  ASSERT_TRUE(largest.ok()) << largest.status().message();
  EXPECT_LE(largest->steps(), 10001u);
}

// Each of these takes std::regex far too long, or all of the stack.
TEST(Pattern, Ends) {
  const std::string name(1024, 'a');
  for (const char* expression :
       {"(.*)*(.*)*(.*)*x", "(a|aa)+$x", "(a*)*b", "(a?){500}a{500}x", "((((a*)*)*)*)*b", "(^)*(|)*x", "(.*a){50}x"})
    EXPECT_FALSE(search(expression, name)) << expression;
}

// The standard library's expressions as the reference, on all expressions of a small grammar.
TEST(Pattern, AgreesWithTheStandardLibrary) {
  const std::vector<std::string> atoms = {"a", "b", ".", "[ab]", "[^a]", "(a|b)", "(ab)", "(a|)", "^", "$", R"(\b)", R"(\w)"};
  const std::vector<std::string> repeats = {"", "*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"};
  std::vector<std::string> pieces;
  for (const std::string& atom : atoms)
    for (const std::string& repeat : repeats)
      if (repeat.empty() || (atom != "^" && atom != "$" && atom != R"(\b)" && atom != "(a|)")) pieces.push_back(atom + repeat);
  std::vector<std::string> texts = {""};
  for (std::size_t i = 0; i < texts.size(); ++i)
    if (texts[i].size() < 3)
      for (const char c : {'a', 'b', '.'}) texts.push_back(texts[i] + c);
  for (const std::string& first : pieces)
    for (const std::string& second : pieces)
      for (const char* between : {"", "|"}) {
        const std::string expression = first + between + second;
        const auto pattern = Pattern::compile(expression);
        ASSERT_TRUE(pattern.ok()) << pattern.status().message();
        const std::regex reference(expression);
        for (const std::string& text : texts) {
          ASSERT_EQ(pattern->search(text), std::regex_search(text, reference)) << expression << " in '" << text << "'";
          ASSERT_EQ(pattern->match(text), std::regex_search(text, reference, std::regex_constants::match_continuous))
              << expression << " at the beginning of '" << text << "'";
        }
      }
}

}  // namespace
}  // namespace nibble
