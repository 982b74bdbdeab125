#include "blocks.hpp"

#include <cstring>

namespace nibble::ggml {
namespace {

using Byte = std::uint8_t;

constexpr Place place(int byte, int shift) { return {static_cast<Byte>(byte), static_cast<Byte>(shift)}; }

template <class F>
constexpr std::array<Place, 256> places(int length, F&& of) {
  std::array<Place, 256> all{};
  for (int i = 0; i < length; ++i) all[static_cast<std::size_t>(i)] = of(i);
  return all;
}

/// Blocks of 32: the first 16 codes are in the low halves of 16 bytes, the others in the high halves.
constexpr auto halves(int begin) {
  return places(32, [=](int i) { return place(begin + i % 16, i / 16 * 4); });
}
/// The fifth bits of 32 codes in four bytes.
constexpr auto fifth_bits(int begin) {
  return places(32, [=](int i) { return place(begin + i / 8, i % 8); });
}
/// Blocks of 256: 64 codes in 32 bytes, the first 32 in the low halves.
constexpr auto halves_of_64(int begin) {
  return places(256, [=](int i) { return place(begin + i / 64 * 32 + i % 32, i / 32 % 2 * 4); });
}

float f16(const Byte* at) {
  ggml_fp16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return ggml_fp16_to_fp32(bits);
}

void scale_alone(const Byte* head, void* scales, void*) { std::memcpy(scales, head, 2); }

void scale_and_offset(const Byte* head, void* scales, void* offsets) {
  std::memcpy(scales, head, 2);
  std::memcpy(offsets, head + 2, 2);
}

/// Two factors in f16, then eight scales and eight minima of 6 bits in 12 bytes. The products have 17 bits: they are exact in f32.
void eight_scales_and_minima(const Byte* head, void* scales, void* offsets) {
  const float d = f16(head), d_min = f16(head + 2);
  const Byte* b = head + 4;
  for (int i = 0; i < 8; ++i) {
    const int scale = i < 4 ? b[i] & 63 : (b[i + 4] & 15) | (b[i - 4] >> 6 << 4);
    const int minimum = i < 4 ? b[i + 4] & 63 : b[i + 4] >> 4 | (b[i] >> 6 << 4);
    static_cast<float*>(scales)[i] = d * static_cast<float>(scale);
    static_cast<float*>(offsets)[i] = -(d_min * static_cast<float>(minimum));
  }
}

constexpr Format kFormats[] = {
    {GGML_TYPE_Q4_0, "u4b8g32", 32, 18, 32, 0, 2, NIB_F16, false, 4, 0, halves(2), {}, scale_alone},
    {GGML_TYPE_Q4_1, "u4og32", 32, 20, 32, 0, 4, NIB_F16, true, 4, 0, halves(4), {}, scale_and_offset},
    {GGML_TYPE_Q5_0, "u5b16g32", 32, 22, 32, 0, 2, NIB_F16, false, 4, 1, halves(6), fifth_bits(2), scale_alone},
    {GGML_TYPE_Q5_1, "u5og32", 32, 24, 32, 0, 4, NIB_F16, true, 4, 1, halves(8), fifth_bits(4), scale_and_offset},
    {GGML_TYPE_Q8_0,
     "s8g32",
     32,
     34,
     32,
     0,
     2,
     NIB_F16,
     false,
     8,
     0,
     places(32, [](int i) { return place(2 + i, 0); }),
     {},
     scale_alone},
    {GGML_TYPE_Q4_K, "u4og32", 256, 144, 32, 0, 16, NIB_F32, true, 4, 0, halves_of_64(16), {}, eight_scales_and_minima},
};

const Byte* bytes(const std::byte* at) { return reinterpret_cast<const Byte*>(at); }
Byte* bytes(std::byte* at) { return reinterpret_cast<Byte*>(at); }

}  // namespace

std::span<const Format> formats() { return kFormats; }

const Format* find_format(ggml_type type) {
  for (const Format& format : kFormats)
    if (format.type == type) return &format;
  return nullptr;
}

QTensor decode(const Format& format, std::int64_t n, std::int64_t k, const std::byte* blocks) {
  const std::int64_t row_blocks = k / format.length, groups = k / format.group;
  const std::size_t width = format.scale == NIB_F16 ? 2 : 4;  // of a scale
  const auto count = static_cast<std::size_t>(n * groups) * width;
  const auto codes = std::make_unique_for_overwrite<Byte[]>(static_cast<std::size_t>(n * k));
  const auto scales = std::make_unique_for_overwrite<Byte[]>(count);
  const auto offsets = std::make_unique_for_overwrite<Byte[]>(format.offsets ? count : 0);
  const int low_mask = (1 << format.low_bits) - 1, high_mask = (1 << format.high_bits) - 1;
#pragma omp parallel for
  for (std::int64_t b = 0; b < n * row_blocks; ++b) {
    const Byte* block = bytes(blocks) + b * format.bytes;
    Byte* to = codes.get() + b * format.length;
    for (int i = 0; i < format.length; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const int low = block[format.low[at].byte] >> format.low[at].shift & low_mask;
      const int high = block[format.high[at].byte] >> format.high[at].shift & high_mask;
      to[i] = static_cast<Byte>(low | high << format.low_bits);
    }
    const std::size_t first = static_cast<std::size_t>(b * (format.length / format.group)) * width;
    format.read_head(block + format.head, scales.get() + first, format.offsets ? offsets.get() + first : nullptr);
  }
  nib_qtensor_desc desc{.struct_size = sizeof desc, .scheme = format.scheme, .n = n, .k = k};
  desc.codes = nib_matrix(codes.get(), format.type == GGML_TYPE_Q8_0 ? NIB_S8 : NIB_U8, n, k);
  desc.scales = nib_matrix(scales.get(), format.scale, n, groups);
  if (format.offsets) desc.zeros = nib_matrix(offsets.get(), format.scale, n, groups);
  nib_qtensor* q = nullptr;
  return QTensor(nib_qtensor_create(&desc, &q) == NIB_OK ? q : nullptr);
}

void copy_heads(const Format& format, std::int64_t n, std::int64_t k, const std::byte* blocks, std::byte* heads) {
  for (std::int64_t b = 0; b < n * (k / format.length); ++b)
    std::memcpy(heads + b * format.head_bytes, blocks + b * format.bytes + format.head,
                static_cast<std::size_t>(format.head_bytes));
}

bool encode(const Format& format, const nib_qtensor* q, const std::byte* heads, std::byte* blocks) {
  nib_qtensor_desc desc{.struct_size = sizeof desc};
  if (nib_qtensor_get(q, &desc) != NIB_OK) return false;
  const auto* codes = static_cast<const Byte*>(desc.codes.data);
  const auto* scales = static_cast<const Byte*>(desc.scales.data);
  const auto* offsets = static_cast<const Byte*>(desc.zeros.data);
#pragma omp parallel for
  for (std::int64_t b = 0; b < desc.n * (desc.k / format.length); ++b) {
    Byte* block = bytes(blocks) + b * format.bytes;
    std::memset(block, 0, static_cast<std::size_t>(format.bytes));
    Byte* head = block + format.head;
    if (heads != nullptr) {
      std::memcpy(head, heads + b * format.head_bytes, static_cast<std::size_t>(format.head_bytes));
    } else {
      std::memcpy(head, scales + b * 2, 2);
      if (format.offsets) std::memcpy(head + 2, offsets + b * 2, 2);
    }
    for (int i = 0; i < format.length; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const int code = codes[b * format.length + i], low = code & ((1 << format.low_bits) - 1), high = code >> format.low_bits;
      block[format.low[at].byte] = static_cast<Byte>(block[format.low[at].byte] | low << format.low[at].shift);
      if (format.high_bits != 0)
        block[format.high[at].byte] = static_cast<Byte>(block[format.high[at].byte] | high << format.high[at].shift);
    }
  }
  return true;
}

}  // namespace nibble::ggml
