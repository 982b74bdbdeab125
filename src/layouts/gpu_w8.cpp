// The GPU layout gpu_w8n64k128: see gpu_w8.hpp for the drawing and the index maths.
#include "layouts/gpu_w8.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "layouts/layout.hpp"

namespace nibble {
namespace gpu_w8 {

std::string refusal(const WeightScheme& scheme, DType zero_type, std::int64_t k) {
  const DType codes = scheme.codes;
  constexpr std::array kHeld{DType::s8, DType::u8b128, DType::u8, DType::u4b8, DType::u4, DType::e4m3};
  if (std::ranges::find(kHeld, codes) == kHeld.end())
    return fmt::format("codes of type {} are none of s8, u8b128, u8, u4b8, u4, e4m3", name(codes));
  if (!is_compute_float(scheme.scale)) return fmt::format("scales of type {} are not f32, f16 or bf16", name(scheme.scale));
  const bool integer_zeros = scheme.zero == ZeroKind::integer && (zero_type == DType::u8 || zero_type == DType::s8);
  if (codes == DType::e4m3 ? scheme.zero != ZeroKind::none : scheme.zero != ZeroKind::none && !integer_zeros)
    return fmt::format("zeros of type {} for codes of type {}", name(zero_type), name(codes));
  if (info(codes).kind == DTypeKind::uint && scheme.zero == ZeroKind::none)
    return fmt::format("codes of type {} without zero points", name(codes));
  const GroupShape& group = scheme.group;
  const bool per_row = group.n <= 1 && (group.k == 0 || group.k >= k);
  const bool blocks = codes == DType::e4m3 && group.n != 0 && group.n % kRows == 0 && group.k == kChannels;
  if (!per_row && !blocks)
    return fmt::format("scales per {}×{}; it takes a scale per tensor, per channel, or of e4m3 per {}×{} rows", group.n, group.k,
                       kRows, kChannels);
  return {};
}

Geometry geometry(const WeightScheme& scheme, std::int64_t n, std::int64_t k) {
  return {.n = n,
          .k = k,
          .integers = scheme.codes != DType::e4m3,
          .has_zeros = scheme.zero != ZeroKind::none,
          .block_rows = scheme.group.n > 1 ? scheme.group.n : 0};
}

}  // namespace gpu_w8

namespace {

using gpu_w8::Geometry;
using gpu_w8::kChannels;
using gpu_w8::kRows;

/// What is subtracted from a code before it is stored: the middle of unsigned codes, so that a signed byte holds them.
int middle(DType codes) {
  const DTypeKind kind = info(codes).kind;
  return kind == DTypeKind::uint || kind == DTypeKind::biased ? 1 << (bits(codes) - 1) : 0;
}
/// The same of a zero point. Values of u8b128 and u4b8 have the middle subtracted already, and their zero points are among values.
int middle_of_zeros(DType codes) { return info(codes).kind == DTypeKind::uint ? middle(codes) : 0; }

/// The index in q.scales of packed scale i.
std::int64_t scale_of(const WeightScheme& scheme, std::int64_t i) { return scheme.group.n == 0 ? 0 : i; }

std::size_t size(const WeightScheme& scheme, DType, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(gpu_w8::geometry(scheme, n, k).total_bytes());
}

void pack_tile(const QuantTensor& q, const CodeRows& codes, const PackedWeightData& packed, const Geometry& geo, int tile,
               std::byte* out) {
  std::byte* const records = out + geo.record(tile, 0);
  std::memset(records, 0, static_cast<std::size_t>(geo.records()) * gpu_w8::kRecordBytes);
  const int rows = static_cast<int>(std::min<std::int64_t>(kRows, geo.n - std::int64_t{tile} * kRows));
  const int from_code = middle(q.scheme.codes), from_zero = middle_of_zeros(q.scheme.codes);
  for (int row = 0; row < kRows; ++row) {
    const std::int64_t n = std::int64_t{tile} * kRows + row;
    const std::uint8_t* const from = row < rows ? codes.row(n) : nullptr;
    std::int32_t sum = 0;
    for (std::int64_t k = 0; row < rows && k < geo.k; ++k) {
      const std::int64_t channel = packed.perm.empty() ? k : packed.perm[static_cast<std::size_t>(k)];
      const auto code = static_cast<std::uint8_t>(codes.code(from, channel) - from_code);
      records[geo.record(0, static_cast<int>(k / kChannels)) + gpu_w8::place(row, static_cast<int>(k % kChannels))] =
          static_cast<std::byte>(code);
      sum += static_cast<std::int8_t>(code);
    }
    if (geo.integers) std::memcpy(out + geo.sums_offset() + 4 * n, &sum, 4);
    if (geo.has_zeros) {
      const std::int32_t zero = row < rows ? static_cast<std::int32_t>(q.zeros.at(scale_of(q.scheme, n))) - from_zero : 0;
      std::memcpy(out + geo.zeros_offset() + 4 * n, &zero, 4);
    }
  }
}

void pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed) {
  const Geometry geo = gpu_w8::geometry(q.scheme, q.n, q.k);
  std::byte* const out = packed.bytes.data();
  for (std::int64_t n = codes.begin; n < codes.end; n += kRows)
    pack_tile(q, codes, packed, geo, static_cast<int>(n / kRows), out);
  for (std::int64_t i = 0; codes.begin == 0 && i < geo.scale_count(); ++i) {
    const std::int64_t from = scale_of(q.scheme, i);
    const float scale = from < q.scales.numel() ? q.scales.at(from) : 0.0f;
    std::memcpy(out + geo.scales_offset() + 4 * i, &scale, 4);
  }
}

void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const Geometry geo = gpu_w8::geometry(q.scheme, q.n, q.k);
  const std::byte* const in = packed.bytes.data();
  const int to_code = middle(q.scheme.codes), to_zero = middle_of_zeros(q.scheme.codes);
  for (std::int64_t n = 0; n < q.n; ++n)
    for (std::int64_t k = 0; k < q.k; ++k) {
      const std::int64_t channel = packed.perm.empty() ? k : packed.perm[static_cast<std::size_t>(k)];
      const std::int64_t record = geo.record(static_cast<int>(n / kRows), static_cast<int>(k / kChannels));
      const auto code =
          static_cast<std::uint8_t>(in[record + gpu_w8::place(static_cast<int>(n % kRows), static_cast<int>(k % kChannels))]);
      q.codes[static_cast<std::size_t>(n * q.k + channel)] = static_cast<std::uint8_t>(code + to_code);
    }
  for (std::int64_t i = 0; i < q.scales.numel(); ++i) {
    float scale = 0;
    std::memcpy(&scale, in + geo.scales_offset() + 4 * i, 4);
    q.scales.set(i, scale);
  }
  for (std::int64_t i = 0; !q.zeros.empty() && i < q.zeros.numel(); ++i) {
    std::uint32_t zero = 0;  // of u8 or s8, whose bits are the lowest byte; modulo 2³², because a damaged file may have any
    std::memcpy(&zero, in + geo.zeros_offset() + 4 * i, 4);
    q.zeros.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(zero + static_cast<std::uint32_t>(to_zero));
  }
}

}  // namespace

const Layout kGpuW8Layout{.name = "gpu_w8n64k128",
                          .drawing = R"(
row tile (64 rows) ─▶ record (128 channels): row[128 codes], chunks of 16 swizzled by row mod 8 ... ×64
after all tiles: scales f32[N] or [N/n][K/128] | sums of codes s32[N] (integers) | zeros s32[N]?
)",
                          .backend = Backend::cuda,
                          .refusal = gpu_w8::refusal,
                          .size = size,
                          .rows = kRows,
                          .pack = pack,
                          .unpack = unpack};

}  // namespace nibble
