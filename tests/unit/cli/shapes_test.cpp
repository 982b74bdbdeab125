// Shape files: valid lines, refusals with their messages, and the files in bench/shapes.
#include "commands/shapes.hpp"

#include <gtest/gtest.h>

#include <filesystem>

namespace nibble::cli {
namespace {

std::string conv_failure(std::string_view text) {
  const auto shapes = parse_conv_shapes(text, "f.txt");
  EXPECT_FALSE(shapes.ok());
  EXPECT_EQ(shapes.status().code(), StatusCode::invalid_argument);
  return shapes.status().message();
}

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
  EXPECT_EQ(failure("12 x7 a"), "f.txt:1: K is 'x7'; expected a whole number from 1 to 1073741824");
  EXPECT_EQ(failure("16777216 8388608 a"),
            "f.txt:1: N=16777216 times K=8388608 is more than the 70368744177664 elements that a matrix may have");
  EXPECT_EQ(failure("1073741824 131072 1 a"),
            "f.txt:1: M=1073741824 times N=131072 is more than the 70368744177664 elements that a matrix may have");
  EXPECT_EQ(failure("0 1 2 a"), "f.txt:1: M is '0'; expected a whole number from 1 to 1073741824");
  EXPECT_EQ(failure("1 2147483649 a"), "f.txt:1: K is '2147483649'; expected a whole number from 1 to 1073741824");
  EXPECT_EQ(failure("99999999999999999999 1 a"),
            "f.txt:1: N is '99999999999999999999'; expected a whole number from 1 to 1073741824");
  EXPECT_EQ(failure("16 4096 4096"), "f.txt:1: the line ends with the number 4096; a name must follow N and K");
  EXPECT_EQ(failure("# nothing\n"), "f.txt: no shapes; write '[M] N K name' lines");
  EXPECT_EQ(read_shapes("/nonexistent/f.txt").status().code(), StatusCode::io_error);
}

TEST(ConvShapes, Parses) {
  const auto shapes = parse_conv_shapes(
      "# comment\n3 224x224 64 7 conv1 stride=2 padding=3\n"
      "8 64 14 128 3x1 8b stride=1x2 padding=0,1,2,3 dilation=2 groups=32 # why\n",
      "f.txt");
  ASSERT_TRUE(shapes.ok()) << shapes.status().message();
  ASSERT_EQ(shapes->size(), 2u);
  EXPECT_EQ(shapes->front(), (ConvShape{std::nullopt,
                                        {.in_channels = 3,
                                         .out_channels = 64,
                                         .height = 224,
                                         .width = 224,
                                         .filter = {7, 7},
                                         .stride = {2, 2},
                                         .padding = {3, 3, 3, 3}},
                                        "conv1"}));
  EXPECT_EQ(shapes->back(), (ConvShape{8,
                                       {.in_channels = 64,
                                        .out_channels = 128,
                                        .height = 14,
                                        .width = 14,
                                        .filter = {3, 1},
                                        .stride = {1, 2},
                                        .padding = {0, 1, 2, 3},
                                        .dilation = {2, 2},
                                        .groups = 32},
                                       "8b"}));
}

TEST(ConvShapes, SaysWhatIsWrongWhere) {
  const std::string number = "; expected a whole number from 1 to 1048576", two = ", or two of them as in 3x1";
  EXPECT_EQ(conv_failure("3 8 4 1 a\n3 8 4 a"),
            "f.txt:2: expected '[B] C HxW CO FILTER name [stride=S] [padding=P] [dilation=D] [groups=G]', found 4 fields");
  EXPECT_EQ(
      conv_failure("3 8 4 a stride=2"),
      "f.txt:1: expected '[B] C HxW CO FILTER name [stride=S] [padding=P] [dilation=D] [groups=G]', found 4 fields in front "
      "of the options");
  EXPECT_EQ(conv_failure("x 8 4 1 a"), "f.txt:1: C is 'x'" + number);
  EXPECT_EQ(conv_failure("0 3 8 4 1 a"), "f.txt:1: B is '0'" + number);
  EXPECT_EQ(conv_failure("3 8x 4 1 a"), "f.txt:1: HxW is '8x'" + number + two);
  EXPECT_EQ(conv_failure("3 8 4 0x1 a"), "f.txt:1: FILTER is '0x1'" + number + two);
  EXPECT_EQ(conv_failure("3 8 4 1 7"), "f.txt:1: the number 7 stands where the name should; a name must follow FILTER");
  EXPECT_EQ(conv_failure("3 8 4 1 a stride=0"), "f.txt:1: stride is '0'" + number + two);
  EXPECT_EQ(conv_failure("3 8 4 1 a padding=1,x,1,1"), "f.txt:1: padding is 'x'; expected a whole number from 0 to 1048576");
  EXPECT_EQ(conv_failure("3 8 4 1 a padding=-1"),
            "f.txt:1: padding is '-1'; expected a whole number from 0 to 1048576, two as in 3x1, or four as in 0,1,0,1 for top, "
            "bottom, left and right");
  EXPECT_EQ(conv_failure("3 8 4 1 a pad=1"), "f.txt:1: there is no 'pad'; write stride=S, padding=P, dilation=D or groups=G");
  EXPECT_NE(conv_failure("3 8 4 1 a groups=2").find("f.txt:1: convolution of [3,8,8] with a filter [4,3/2,1,1]"),
            std::string::npos);
  EXPECT_NE(conv_failure("3 8 4 9 a").find("an output of 0x0: the filter does not fit"), std::string::npos);
  EXPECT_EQ(conv_failure("1000000 1000000 4 1 a"), "f.txt:1: an operand has 1e+18 elements; expected at most 1.1e+12");
  EXPECT_EQ(conv_failure(""), "f.txt: no shapes; write '[B] C HxW CO FILTER name' lines");
  EXPECT_EQ(read_conv_shapes("/nonexistent/f.txt").status().code(), StatusCode::io_error);
}

TEST(Shapes, ShippedFilesParse) {
  int files = 0, convs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(NIBBLE_SOURCE_DIR "/bench/shapes")) {
    const bool conv = entry.path().filename().string().starts_with("conv-");
    const Status read = conv ? read_conv_shapes(entry.path()).status() : read_shapes(entry.path()).status();
    EXPECT_TRUE(read.ok()) << read.message();
    ++(conv ? convs : files);
  }
  EXPECT_GE(files, 6);
  EXPECT_GE(convs, 4);
}

}  // namespace
}  // namespace nibble::cli
