// Text helpers of the tool: widths, alignment, folding, hostile names.
#include "terminal/table.hpp"

#include <gtest/gtest.h>

namespace nibble::cli {
namespace {

TEST(Text, WidthsCountColumnsNotBytes) {
  EXPECT_EQ(display_width(""), 0);
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("µs → ×"), 6);
  EXPECT_EQ(display_width("e\u0301"), 1) << "a combining accent";
  EXPECT_EQ(display_width("層"), 2);
  EXPECT_EQ(display_width("\xff\xfe"), 2) << "stray bytes";
  EXPECT_EQ(display_width("\xe5\xb1"), 1) << "a cut character";
}

TEST(Text, ControlCharactersDoNotReachTheTerminal) {
  EXPECT_EQ(printable("a\033[2Jb\nc\x7f"), "a?[2Jb?c?");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "?31m");
  EXPECT_EQ(printable("µ\xff"), "µ?");
}

TEST(Table, AlignsAndLeavesOutEmptyColumns) {
  Table table({{"name"}, {"empty"}, {"N", Table::Align::right}});
  table.add({"a", "", "5"});
  table.add({"層", "", "1000"});
  table.add({"only a name"});
  EXPECT_EQ(table.render(false),
            "name            N\n"
            "a               5\n"
            "層           1000\n"
            "only a name\n\n");
}

TEST(Table, SaysOnceWhatAllRowsShare) {
  Table table({{"name"}, {.title = "scheme", .fold = true}, {.title = "kernel", .fold = true}});
  table.add({"a", "u4", "x"});
  table.add({"b", "u4", "y"});
  EXPECT_EQ(table.render(false),
            "name  kernel\n"
            "a     x\n"
            "b     y\n"
            "all: scheme u4\n\n");
}

TEST(Text, WrapsBetweenWords) {
  EXPECT_EQ(wrapped("one two three four", 0, 2), "one two three four");
  EXPECT_EQ(wrapped("one two three four", 9, 2), "one two\n  three\n  four");
  EXPECT_EQ(wrapped("µµµ ×× ¹", 6, 0), "µµµ ××\n¹") << "columns, not bytes";
  EXPECT_EQ(wrapped("unbreakable_word x", 5, 2), "unbreakable_word\n  x");
  EXPECT_EQ(fitted("a  laid out line of text\n  one two three four\n\nend", 12),
            "a  laid out line of text\n  one two\n    three\n    four\n\nend");
}

TEST(Table, BecomesParagraphsWhereItIsTooWide) {
  Table table({{"name"}, {"scheme"}, {"empty"}, {"N", Table::Align::right}, {.title = "kernel", .fold = true}});
  table.add({"a", "u4", "", "5", "k"});
  table.add({"b", "u8", "", "70000", "k"});
  const std::string wide = table.render(false, 21), narrow = table.render(false, 12);
  EXPECT_EQ(wide, "name  scheme      N\na     u4          5\nb     u8      70000\nall: kernel k\n\n");
  EXPECT_EQ(narrow, "a\n  scheme u4\n  N 5\nb\n  scheme u8\n  N 70000\nall: kernel\n  k\n\n");
}

TEST(Table, WithoutRowsIsNothing) { EXPECT_EQ(Table({{"name"}}).render(true), ""); }

TEST(Table, ColoursOnlyWhenAsked) {
  Table table({{"name"}});
  table.add({{"a", Style::bad}});
  EXPECT_EQ(table.render(false), "name\na\n\n");
  EXPECT_EQ(table.render(true), "\033[1mname\033[0m\n\033[31ma\033[0m\n\n");
}

}  // namespace
}  // namespace nibble::cli
