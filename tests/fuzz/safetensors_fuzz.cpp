// Any bytes as a safetensors file: refused, or described by a header whose every tensor lies inside the file.
#include <span>
#include <string_view>

#include "checkpoint/io/safetensors.hpp"
#include "fuzz/fuzz.hpp"

using namespace nibble;
using fuzz::require;

namespace {

std::string file(std::string_view header, std::string_view data) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes += static_cast<char>(header.size() >> shift & 0xff);
  return bytes.append(header).append(data);
}
std::string file(std::string_view header, std::size_t data_bytes) { return file(header, std::string(data_bytes, 'x')); }

void check(std::string_view input) {
  const std::size_t size = input.size();
  const auto header = storage::parse_safetensors(std::as_bytes(std::span(input)), "fuzz");
  if (!fuzz::ok(header.status())) return;
  std::uint64_t end = 0;
  for (const TensorInfo& tensor : header->tensors) {
    require(end == 0 || tensor.file_offset == end);
    end = tensor.file_offset + tensor.bytes;
    require(tensor.file_offset >= 8 && end >= tensor.file_offset && end <= size);
    require(*storage::tensor_bytes(tensor.dtype, tensor.shape) == tensor.bytes);
  }
  require(header->tensors.empty() || end == size);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  check(input);
  // Once more with a header length that fits, or most changes would only shift the header's end.
  const std::size_t end = input.rfind('}');
  if (end != std::string_view::npos && end >= 8) check(file(input.substr(8, end - 7), input.substr(end + 1)));
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {
      file("{}", 0),
      file(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}   )", 24),
      file(R"({"q":{"dtype":"F4","shape":[4,2],"data_offsets":[0,4]},"s":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[4,8]}})",
           8),
      file(R"({"b":{"dtype":"I32","shape":[],"data_offsets":[6,10]},"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},)"
           R"("empty":{"dtype":"I64","shape":[0,7],"data_offsets":[10,10]}})",
           10),
  };
}
