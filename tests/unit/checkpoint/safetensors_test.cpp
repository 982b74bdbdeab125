// The safetensors container: refusals with their messages, and files after a failed write.
#include "checkpoint/io/safetensors.hpp"

#include "checkpoint/io/mapped_file.hpp"
#include "unit/scratch.hpp"

namespace nibble {
namespace {

using namespace nibble::testing;
using storage::parse_safetensors;

Result<storage::SafetensorsHeader> parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "f");
}

std::string one(std::string_view description) { return "{\"a\":" + std::string(description) + "}"; }

TEST(Safetensors, ReadsTensorsInFileOrder) {
  const std::string header =
      R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},"__metadata__":{"format":"pt"},)"
      R"("a":{"shape":[3],"data_offsets":[0,6],"dtype":"BF16"},"scalar":{"dtype":"U8","shape":[],"data_offsets":[14,15]}}  )";
  const auto parsed = parse(raw_safetensors(header, 15));
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  ASSERT_EQ(parsed->tensors.size(), 3u);
  EXPECT_EQ(parsed->tensors[0].name, "a");
  EXPECT_EQ(parsed->tensors[1].name, "b");
  EXPECT_EQ(parsed->tensors[1].dtype, DType::f32);
  EXPECT_EQ(parsed->tensors[1].shape, std::vector<std::int64_t>{2});
  EXPECT_EQ(parsed->tensors[1].file_offset, 8 + header.size() + 6);
  EXPECT_EQ(parsed->tensors[2].bytes, 1u);
  EXPECT_EQ(parsed->metadata, (storage::Metadata{{"format", "pt"}}));
}

TEST(Safetensors, ZeroSizedTensorsAreLegal) {
  const auto parsed = parse(raw_safetensors(
      R"({"a":{"dtype":"F16","shape":[0,5],"data_offsets":[0,0]},"b":{"dtype":"F4","shape":[3,0],"data_offsets":[4,4]},)"
      R"("c":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      4));
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->tensors.size(), 3u);
  EXPECT_TRUE(parse(raw_safetensors("{}", 0)).ok());
}

TEST(Safetensors, RefusesBadLengths) {
  expect_error(parse("1234567").status(), StatusCode::corrupt_data, {"f: ", "7 bytes"});
  std::string file = raw_safetensors("{}", 0);
  file[0] = 3;
  expect_error(parse(file).status(), StatusCode::corrupt_data, {"header length 3", "10 bytes", "truncated"});
  file[7] = 1;
  expect_error(parse(file).status(), StatusCode::corrupt_data, {"header length 72057594037927939", "100000000"});
  expect_error(parse(raw_safetensors(" {}", 0)).status(), StatusCode::corrupt_data, {"does not start with '{'"});
}

std::string many(int count, std::string_view piece) {
  std::string text;
  while (count-- > 0) text += piece;
  return text;
}

TEST(Safetensors, WritesNothingThatItWouldNotRead) {
  const Scratch scratch;
  const auto write = [&](const std::string& name, std::vector<std::int64_t> shape, const storage::Metadata& metadata) {
    const std::vector<TensorSource> tensors{source(name, filled(DType::u8, std::move(shape), 1))};
    return write_safetensors(scratch / "x.safetensors", tensors, metadata);
  };
  using enum StatusCode;
  expect_error(write("__metadata__", {1}, {}), invalid_argument, {"\"__metadata__\", as the metadata is"});
  expect_error(write("a", {1}, {{"k", "1"}, {"k", "2"}}), invalid_argument, {"the metadata has \"k\" twice"});
  expect_error(write("a", std::vector<std::int64_t>(65, 1), {}), invalid_argument, {"65 dimensions", "up to 64"});
  EXPECT_TRUE(names_in(scratch.path()).empty());
  EXPECT_TRUE(write("a", std::vector<std::int64_t>(64, 1), {{"k", "1"}}).ok());
}

struct BadHeader {
  const char* name;
  std::string header;
  std::size_t data_bytes;
  std::vector<std::string> words;
};
void PrintTo(const BadHeader& bad, std::ostream* out) { *out << bad.header.substr(0, 200); }
class BadHeaders : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaders, AreRefused) {
  const BadHeader& bad = GetParam();
  const auto parsed = parse(raw_safetensors(bad.header, bad.data_bytes));
  ASSERT_FALSE(parsed.ok());
  expect_error(parsed.status(), StatusCode::corrupt_data, bad.words);
}

const BadHeader kBadHeaders[] = {
    {"BadJson", R"({"a":})", 0, {"byte 13", "not valid JSON"}},
    {"TrailingText", "{} x", 0, {"byte 11", "not valid JSON"}},
    {"ZeroByteAtTheEnd", std::string("{}\0", 3), 0, {"header from byte 8 on", "not valid JSON at byte 2", "a zero byte"}},
    {"TextAfterAZeroByte", std::string("{}\0,\"b\":1}", 10), 0, {"a zero byte"}},
    {"ManyDimensions",
     one(R"({"dtype":"U8","shape":[1)" + many(64, ",1") + R"(],"data_offsets":[0,1]})"),
     1,
     {"tensor \"a\"", "more than 64 dimensions"}},
    {"NotUtf8", "{\"\xff\":1}", 0, {"not valid JSON"}},
    {"NoObject", R"({"a":7})", 0, {"\"a\" has the value 7"}},
    {"DuplicateName",
     R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
     2,
     {"\"a\" appears twice", "byte 63"}},
    {"DuplicateKey",
     one(R"({"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]})"),
     1,
     {"tensor \"a\"", "\"dtype\" appears twice"}},
    {"DuplicateMetadata", R"({"__metadata__":{"x":"1","x":"2"}})", 0, {"\"x\" appears twice"}},
    {"MetadataNumber", R"({"__metadata__":{"x":1}})", 0, {"\"x\" has the value 1", "a string"}},
    {"MetadataNested", R"({"__metadata__":{"x":{}}})", 0, {"\"x\" has the value an object", "a string"}},
    {"MissingKey", one(R"({"dtype":"U8","shape":[1]})"), 1, {"tensor \"a\"", "only two"}},
    {"UnknownKey", one(R"({"dtype":"U8","strides":[1]})"), 1, {"tensor \"a\"", "\"strides\""}},
    {"UnknownDtype",
     one(R"({"dtype":"F7","shape":[1],"data_offsets":[0,1]})"),
     1,
     {"tensor \"a\"", "byte 25", "unknown dtype \"F7\""}},
    {"DtypeNumber", one(R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})"), 1, {"tensor \"a\"", "8", "name of a dtype"}},
    {"NegativeDimension", one(R"({"dtype":"U8","shape":[2,-1],"data_offsets":[0,2]})"), 2, {"tensor \"a\"", "shape holds -1"}},
    {"FractionalDimension", one(R"({"dtype":"U8","shape":[1.5],"data_offsets":[0,1]})"), 1, {"shape holds 1.5"}},
    {"TextDimension", one(R"({"dtype":"U8","shape":["1"],"data_offsets":[0,1]})"), 1, {"shape holds \"1\""}},
    {"HugeDimension",
     one(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]})"),
     1,
     {"shape holds 9223372036854775808"}},
    {"BeyondSixtyFourBits",
     one(R"({"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]})"),
     1,
     {"shape holds 18446744073709551616"}},
    {"Overflow",
     one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
     0,
     {"[4294967296,4294967296] of F32", "63 bits"}},
    {"OverflowHiddenByZero", one(R"({"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})"), 0, {"63 bits"}},
    {"OneOffset", one(R"({"dtype":"U8","shape":[1],"data_offsets":[0]})"), 1, {"1 values instead of 2"}},
    {"ThreeOffsets", one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,2]})"), 1, {"data_offsets holds 2 where nothing more"}},
    {"NegativeOffset", one(R"({"dtype":"U8","shape":[1],"data_offsets":[-1,0]})"), 1, {"data_offsets holds -1"}},
    {"Backwards",
     one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})"),
     1,
     {"tensor \"a\" at byte", "[1,0]", "before they begin"}},
    {"PastTheEnd",
     one(R"({"dtype":"U8","shape":[9],"data_offsets":[0,9]})"),
     8,
     {"tensor \"a\" at byte 61", "[0,9]", "8 bytes of data"}},
    {"WrongSpan", one(R"({"dtype":"F16","shape":[3],"data_offsets":[0,8]})"), 8, {"[3] of F16 needs 6 bytes", "[0,8] hold 8"}},
    {"HalfByte", one(R"({"dtype":"F4","shape":[3],"data_offsets":[0,2]})"), 2, {"[3] of F4 is 12 bits"}},
    {"Overlap",
     R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
     6,
     {"tensor \"b\" at byte", "[2,6] overlap tensor \"a\"", "ends at 4"}},
    {"Hole",
     R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[6,10]}})",
     10,
     {"tensor \"b\"", "[6,10]", "hole of 2 bytes"}},
    {"HoleAtTheEnd",
     one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1]})"),
     4,
     {"3 bytes from byte 62 on belong to no tensor"}},
    {"ControlCharacter", R"({"a\n":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, {"\"a\\n\"", "control characters"}},
    {"LongName", "{\"" + std::string(2000, 'n') + "\":{}}", 0, {"2000 bytes"}},
    {"DeepNesting", "{\"a\":" + std::string(100000, '['), 0, {"an array", "byte 13"}},
};
INSTANTIATE_TEST_SUITE_P(Safetensors, BadHeaders, ::testing::ValuesIn(kBadHeaders),
                         [](const auto& test) { return test.param.name; });

TEST(Safetensors, EveryTypeSurvivesWriting) {
  const Scratch scratch;
  std::vector<TensorSource> tensors;
  for (int i = 1; i <= static_cast<int>(DType::c64); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (!storage::safetensors_dtype(dtype).empty())
      tensors.push_back(source(std::string(name(dtype)), filled(dtype, {3, 8}, 0x5a)));
  }
  EXPECT_EQ(tensors.size(), 22u);
  ASSERT_TRUE(write_safetensors(scratch / "all.safetensors", tensors, {{"key \"1\"", "välue\n"}}).ok());
  const std::string file = read_text(scratch / "all.safetensors");
  const auto parsed = parse(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->metadata, (storage::Metadata{{"key \"1\"", "välue\n"}}));
  ASSERT_EQ(parsed->tensors.size(), tensors.size());
  for (const TensorInfo& tensor : parsed->tensors) {
    EXPECT_EQ(tensor.name, name(tensor.dtype));
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{3, 8}));
  }
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"all.safetensors"});
}

TEST(Safetensors, WriterKeepsEveryTensorAligned) {
  const Scratch scratch;
  const TensorSource tensors[] = {source("u8", filled(DType::u8, {3}, 1)), source("f32", filled(DType::f32, {3}, 2)),
                                  source("f16", filled(DType::f16, {5}, 3)), source("i64", filled(DType::s64, {1}, 4))};
  ASSERT_TRUE(write_safetensors(scratch / "x.safetensors", tensors).ok());
  const std::string file = read_text(scratch / "x.safetensors");
  const auto parsed = parse(file);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->tensors.front().file_offset % 8, 0u);
  for (const TensorInfo& tensor : parsed->tensors)
    EXPECT_EQ(tensor.file_offset % static_cast<unsigned>(bits(tensor.dtype) / 8), 0u) << tensor.name;
  EXPECT_EQ(file[parsed->tensors.back().file_offset], 1);
}

TEST(Safetensors, WriterLeavesAnExistingFileAlone) {
  const Scratch scratch;
  write_text(scratch / "x.safetensors", "precious");
  const TensorSource tensors[] = {source("a", counting(DType::f32, {2}))};
  const Status status = write_safetensors(scratch / "x.safetensors", tensors);
  expect_error(status, StatusCode::already_exists, {"x.safetensors", "exists"});
  EXPECT_EQ(read_text(scratch / "x.safetensors"), "precious");
  ASSERT_TRUE(write_safetensors(scratch / "x.safetensors", tensors, {}, true).ok());
  EXPECT_TRUE(parse(read_text(scratch / "x.safetensors")).ok());
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>{"x.safetensors"});
}

TEST(Safetensors, WriterRefusesWhatItCouldNotReadBack) {
  const Scratch scratch;
  const auto write = [&](std::vector<TensorSource> tensors) { return write_safetensors(scratch / "x", tensors); };
  TensorSource short_one = source("a", counting(DType::f32, {2}));
  short_one.shape = {3};
  expect_error(write({short_one}), StatusCode::invalid_argument, {"\"a\"", "8 bytes", "[3] of F32 needs 12"});
  const TensorSource good = source("a", counting(DType::f32, {2}));
  expect_error(write({good, good}), StatusCode::invalid_argument, {"two tensors", "\"a\""});
  expect_error(write({source("a\n", counting(DType::f32, {2}))}), StatusCode::invalid_argument, {"control characters"});
  expect_error(write({source("\xff", counting(DType::f32, {2}))}), StatusCode::invalid_argument, {"UTF-8"});
  expect_error(write({source("a", filled(DType::u4b8, {2}, 0))}), StatusCode::invalid_argument, {"\"a\"", "u4b8"});
  TensorSource negative = good;
  negative.shape = {-1};
  expect_error(write({negative}), StatusCode::invalid_argument, {"\"a\"", "[-1]"});
  TensorSource failing = good;
  failing.name = "b";
  failing.produce = []() -> Result<std::vector<std::byte>> { return Status(StatusCode::corrupt_data, "no luck"); };
  expect_error(write({good, failing}), StatusCode::corrupt_data, {"no luck"});
  failing.produce = []() -> Result<std::vector<std::byte>> { throw std::runtime_error("thrown"); };
  expect_error(write({good, failing}), StatusCode::io_error, {"thrown"});
  EXPECT_TRUE(names_in(scratch.path()).empty());
}

TEST(Safetensors, WriterReportsAFullDisk) {
  const Scratch scratch;
  const TensorSource tensors[] = {source("a", counting(DType::f32, {64})), source("b", counting(DType::f32, {64 << 10}))};
  Status status;
  {
    const FullDisk full(4096);
    status = write_safetensors(scratch / "x.safetensors", tensors);
  }
  expect_error(status, StatusCode::io_error, {"cannot write", "x.safetensors", "File too large"});
  EXPECT_TRUE(names_in(scratch.path()).empty());
}

TEST(Safetensors, WriterReportsBadPaths) {
  const Scratch scratch;
  expect_error(write_safetensors(scratch / "no/x", {}), StatusCode::not_found, {"no/x"});
  expect_error(write_safetensors("", {}), StatusCode::invalid_argument, {"''"});
  expect_error(write_safetensors(scratch.path(), {}, {}, true), StatusCode::already_exists, {"is a directory"});
}

TEST(MappedFile, ReportsWhatCannotBeMapped) {
  const Scratch scratch;
  expect_error(storage::MappedFile::open(scratch / "none").status(), StatusCode::not_found, {"none"});
  expect_error(storage::MappedFile::open(scratch.path()).status(), StatusCode::io_error, {"not a regular file"});
  write_text(scratch / "empty", "");
  const auto empty = storage::MappedFile::open(scratch / "empty");
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE((*empty)->bytes().empty());
}

}  // namespace
}  // namespace nibble
