// Shape files: what parses, what is refused and with which words; the files in bench/shapes.
#include "shapes.hpp"

#include <gtest/gtest.h>

#include <filesystem>

namespace nibble::tools {
namespace {

std::string failure(std::string_view text) {
  const auto shapes = parse_shapes(text, "f.txt");
  EXPECT_FALSE(shapes.ok());
  EXPECT_EQ(shapes.status().code(), StatusCode::invalid_argument);
  return shapes.status().message();
}

TEST(Shapes, Parses) {
  const auto shapes = parse_shapes("# comment\n\n4096 14336 down_proj # why\r\n\t16  7 5 tiny", "f.txt");
  ASSERT_TRUE(shapes.ok()) << shapes.status().message();
  EXPECT_EQ(*shapes, (std::vector<Shape>{{std::nullopt, 4096, 14336, "down_proj"}, {16, 7, 5, "tiny"}}));
}

TEST(Shapes, SaysWhatIsWrongWhere) {
  EXPECT_EQ(failure("1 2 a\n\n3 x\n"), "f.txt:3: expected '[M] N K name', found 2 fields");
  EXPECT_EQ(failure("1 2 3 a b"), "f.txt:1: expected '[M] N K name', found 5 fields");
  EXPECT_EQ(failure("word"), "f.txt:1: expected '[M] N K name', found 1 field");
  EXPECT_EQ(failure("12 x7 a"), "f.txt:1: K is 'x7'; expected a whole number from 1 to 2147483648");
  EXPECT_EQ(failure("0 1 2 a"), "f.txt:1: M is '0'; expected a whole number from 1 to 2147483648");
  EXPECT_EQ(failure("1 2147483649 a"), "f.txt:1: K is '2147483649'; expected a whole number from 1 to 2147483648");
  EXPECT_EQ(failure("99999999999999999999 1 a"),
            "f.txt:1: N is '99999999999999999999'; expected a whole number from 1 to 2147483648");
  EXPECT_EQ(failure("16 4096 4096"), "f.txt:1: the line ends with the number 4096; a name must follow N and K");
  EXPECT_EQ(failure("# nothing\n"), "f.txt: no shapes; write '[M] N K name' lines");
  EXPECT_EQ(read_shapes("/nonexistent/f.txt").status().code(), StatusCode::io_error);
}

TEST(Shapes, ShippedFilesParse) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(NIBBLE_SOURCE_DIR "/bench/shapes")) {
    const auto shapes = read_shapes(entry.path());
    EXPECT_TRUE(shapes.ok()) << shapes.status().message();
    ++files;
  }
  EXPECT_GE(files, 6);
}

}  // namespace
}  // namespace nibble::tools
