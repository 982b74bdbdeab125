// Any names, types, shapes and metadata as a safetensors file: refused with nothing left behind, or a file that reads as the same.
//
// Input: lines "name dtype dim dim ...", or "key=value" of the metadata. Names may be any bytes but a line break.
#include <sstream>

#include "checkpoint/io/mapped_file.hpp"
#include "checkpoint/io/safetensors.hpp"
#include "fuzz/fuzz.hpp"
#include "fuzz/scratch.hpp"
#include "nibble/checkpoint.hpp"

using namespace nibble;
using fuzz::require;

namespace {

struct File {
  std::vector<TensorSource> tensors;
  storage::Metadata metadata;
};

File parse(std::string_view input) {
  constexpr std::uint64_t kMaxBytes = 1 << 12;
  File file;
  std::istringstream text{std::string(input)};
  for (std::string line; std::getline(text, line) && file.tensors.size() < 16 && file.metadata.size() < 16;) {
    if (const std::size_t equal = line.find('='); equal != std::string::npos) {
      file.metadata.emplace_back(line.substr(0, equal), line.substr(equal + 1));
      continue;
    }
    std::istringstream words(line);
    TensorSource source;
    std::string dtype;
    words >> source.name >> dtype;
    source.dtype = parse_dtype(dtype).value_or(DType::none);
    for (std::int64_t dim = 0; words >> dim;) source.shape.push_back(dim);
    const auto bytes = storage::tensor_bytes(source.dtype, source.shape);
    if (bytes.ok() && *bytes > kMaxBytes) continue;
    // The right number of bytes, except for names that ask for another.
    const std::size_t size = (bytes.ok() ? *bytes : 0) + (source.name.ends_with("longer") ? 1 : 0);
    source.produce = [size]() -> Result<std::vector<std::byte>> { return std::vector<std::byte>(size, std::byte{7}); };
    file.tensors.push_back(std::move(source));
  }
  return file;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Scratch scratch;
  const fuzz::fs::path path = scratch.root / "x.safetensors";
  const File file = parse({reinterpret_cast<const char*>(data), size});
  if (fuzz::ok(write_safetensors(path, file.tensors, file.metadata))) {
    const auto mapped = storage::MappedFile::open(path);
    require(mapped.ok());
    const auto header = storage::parse_safetensors((*mapped)->bytes(), "fuzz");
    require(header.ok() && header->tensors.size() == file.tensors.size() && header->metadata == file.metadata);
    for (const TensorSource& source : file.tensors) {
      const auto found = std::ranges::find(header->tensors, source.name, &TensorInfo::name);
      require(found != header->tensors.end() && found->dtype == source.dtype && found->shape == source.shape);
      require(std::ranges::all_of((*mapped)->bytes().subspan(found->file_offset, found->bytes),
                                  [](std::byte b) { return b == std::byte{7}; }));
    }
    fuzz::fs::remove(path);
  }
  require(fuzz::fs::is_empty(scratch.root));
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {"a.weight f16 2 3\nb u8 3\nformat=pt",
          "scalar f32\nempty s64 0 7\ne e8m0 4",
          "four e2m1 4 2\nsix e3m2 4\n=",
          "a f32 4294967296 4294967296 0",
          "a f16 1\na f16 1",
          "longer u8 1",
          "u4 u4 2"};
}
