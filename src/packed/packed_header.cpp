// Packed weights as bytes: the description and the small tensors of a file, in a header before the packed bytes.
#include "nibble/packed_header.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "packed/parts.hpp"

namespace nibble {
using namespace packed;
namespace {

constexpr std::string_view kMagic = "NIBBLE01";
constexpr const char* kVersionKey = "version";
/// Of the header: raise it with every change that older libraries would misread. Layouts have versions of their own.
constexpr int kVersion = 2;
constexpr std::size_t kLargestHeader = std::size_t{1} << 40;
constexpr const char *kDType = "dtype", *kBytes = "bytes";  // the members of a small tensor

std::string hex(std::span<const std::byte> bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out;
  out.reserve(2 * bytes.size());
  for (const std::byte b : bytes) {
    out += kDigits[std::to_integer<std::size_t>(b >> 4)];
    out += kDigits[std::to_integer<std::size_t>(b & std::byte{15})];
  }
  return out;
}

std::optional<std::vector<std::byte>> from_hex(std::string_view text) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  if (text.size() % 2 != 0) return std::nullopt;
  std::vector<std::byte> out(text.size() / 2);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    out[i] = static_cast<std::byte>(16 * high + low);
  }
  return out;
}

/// A vector.
Result<Tensor> parse_tensor(const Json& json) {
  const auto text = [&](const char* key) {
    const auto found = json.find(key);
    return found == json.end() || !found->is_string() ? std::string() : found->get<std::string>();
  };
  const auto dtype = parse_dtype(text(kDType));
  auto bytes = from_hex(text(kBytes));
  if (!dtype || bits(*dtype) < 8 || !bytes || bytes->size() * 8 % static_cast<std::size_t>(bits(*dtype)) != 0)
    return error(StatusCode::corrupt_data, "is not a type and the hexadecimal digits of elements");
  Tensor tensor;
  tensor.dtype = *dtype;
  tensor.shape = {static_cast<std::int64_t>(bytes->size() * 8 / static_cast<std::size_t>(bits(*dtype)))};
  tensor.bytes = *std::move(bytes);
  return tensor;
}

/// The JSON of a header, without its version, which is that of this library.
Result<Json> parse_header(std::string_view header) {
  NIBBLE_ASSIGN_OR_RETURN(const std::size_t size, packed_header_size(header));
  if (size != header.size()) return error(StatusCode::corrupt_data, "its header says {} bytes and has {}", size, header.size());
  NIBBLE_ASSIGN_OR_RETURN(Json json, storage::parse_json<Json>(header.substr(kPackedPrefix), "its header", true));
  if (!json.is_object() || !json.contains(kVersionKey)) return error(StatusCode::corrupt_data, "its header has no version");
  if (const Json& version = json[kVersionKey]; version != kVersion)
    return error(StatusCode::unsupported, "has version {} of the header, and this library reads {}: pack it again",
                 storage::printable(storage::dump(version)), kVersion);
  json.erase(kVersionKey);
  return json;
}

/// packed_from_bytes(); its failures do not yet say what they are about.
Result<PackedWeight> read_weight(std::string_view header, std::span<const std::byte> bytes, Backend memory,
                                 std::shared_ptr<void> owner) {
  NIBBLE_ASSIGN_OR_RETURN(Json json, parse_header(header));
  std::array<std::pair<TensorInfo, Tensor>, std::size(kSmallTensors)> tensors;
  SmallTensors small;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [key, member] = kSmallTensors[i];
    const auto found = json.find(std::string(key));
    if (found == json.end()) continue;
    auto& [info, tensor] = tensors[i];
    Result<Tensor> parsed = parse_tensor(*found);
    if (!parsed.ok()) return parsed.status().with_context(key);
    tensor = *std::move(parsed);
    info = {.name = std::string(key), .dtype = tensor.dtype, .shape = tensor.shape, .bytes = tensor.bytes.size(), .file = {}};
    small.*member = &info;
    json.erase(found);
  }
  NIBBLE_ASSIGN_OR_RETURN(const Description description, parse_description(json));
  NIBBLE_RETURN_IF_ERROR(check(description, small));
  NIBBLE_ASSIGN_OR_RETURN(
      auto weight, without_bytes(description.header, small, [&](const TensorInfo& info) -> Result<Tensor> {
        return std::ranges::find(tensors, info.name, [](const auto& each) { return each.first.name; })->second;
      }));
  if (bytes.size() != description.bytes)
    return error(StatusCode::corrupt_data, "has {} bytes, W[{},{}] of {} in {} has {}", bytes.size(), weight->n, weight->k,
                 weight->scheme.name(), weight->layout->name, description.bytes);
  const bool on_device = memory == Backend::cuda;
  if (on_device && weight->layout->backend != Backend::cuda)
    return error(StatusCode::unsupported, "is in the layout {} of the CPU, in device memory; unpack it and pack it there",
                 weight->layout->name);
  const std::size_t alignment = on_device ? kPackedAlignment : Buffer::kAlignment;
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % alignment != 0)
    return error(StatusCode::invalid_argument, "its bytes are not at a multiple of {} bytes; copy them to one", alignment);
  if (!on_device) {
    weight->bytes = Buffer(bytes, std::move(owner));
    return with_sums(weight, description.spec);
  }
  NIBBLE_RETURN_IF_ERROR(cuda::copy_parts(*weight));
  weight->bytes = Buffer(const_cast<std::byte*>(bytes.data()), bytes.size(), std::move(owner));
  return PackedWeight(std::move(weight), description.spec);
}

constexpr std::string_view kContext = "packed weight";

}  // namespace

Result<std::string> packed_header(const PackedWeight& weight) try {
  const PackedWeightData& data = weight.data();
  Json json = to_json({.header = data, .spec = weight.spec(), .bytes = data.bytes.size(), .source = {}});
  json[kVersionKey] = kVersion;
  for (const auto& [key, tensor] : small_tensors(data))
    json[std::string(key)] = {{kDType, name(tensor.dtype)}, {kBytes, hex(tensor.bytes)}};
  std::string header(kMagic);
  header.resize(kPackedPrefix);
  header += storage::dump(json);
  header.resize((header.size() + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment, ' ');
  const std::uint64_t size = header.size();
  for (std::size_t i = 0; i < 8; ++i) header[kMagic.size() + i] = static_cast<char>(size >> (8 * i) & 0xff);
  return header;
} catch (...) {
  return caught();
}

Result<std::size_t> packed_header_size(std::string_view prefix) {
  if (prefix.size() < kPackedPrefix || prefix.substr(0, kMagic.size()) != kMagic)
    return error(StatusCode::corrupt_data, "no packed weight of nibble: it does not begin with {}", kMagic);
  std::uint64_t size = 0;
  for (std::size_t i = 0; i < 8; ++i) size |= std::uint64_t{static_cast<unsigned char>(prefix[kMagic.size() + i])} << (8 * i);
  if (size < kPackedAlignment || size % kPackedAlignment != 0 || size > kLargestHeader)
    return error(StatusCode::corrupt_data, "no packed weight of nibble: a header of {} bytes", size);
  return static_cast<std::size_t>(size);
}

Result<std::string> packed_layout(std::string_view header) try {
  const Result<Json> json = parse_header(header);
  if (!json.ok()) return json.status().with_context(kContext);
  const auto layout = json->find("layout");
  if (layout == json->end() || !layout->is_string())
    return error(StatusCode::corrupt_data, "{}: its header names no layout", kContext);
  return layout->get<std::string>();
} catch (...) {
  return caught();
}

Result<PackedWeight> packed_from_bytes(std::string_view header, std::span<const std::byte> bytes, Backend memory,
                                       std::shared_ptr<void> owner) try {
  Result<PackedWeight> weight = read_weight(header, bytes, memory, std::move(owner));
  if (weight.status().code() == StatusCode::corrupt_data)
    return error(StatusCode::corrupt_data, "{}: {}; pack the layer again", kContext, weight.status().message());
  if (!weight.ok()) return weight.status().with_context(kContext);
  return weight;
} catch (...) {
  return caught();
}

}  // namespace nibble
