// The GPU layout gpu_n64k128: see gpu_tile.hpp for the drawing and the index maths.
#include "layouts/gpu_tile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include "layouts/layout.hpp"

namespace nibble {
namespace gpu_tile {

Codes stored_codes(DType codes) {
  switch (codes) {
    case DType::e2m1: return Codes::e2m1;
    case DType::e4m3: return Codes::e4m3;
    case DType::e5m2: return Codes::e5m2;
    default: return nibble::bits(codes) <= 4 ? Codes::u4 : Codes::u8;
  }
}
int stored_bits(DType codes) { return bits(stored_codes(codes)); }
DType stored_scale(DType scale) { return scale == DType::e4m3 ? DType::f16 : scale == DType::e8m0 ? DType::bf16 : scale; }
int zero_bias(DType zeros) { return zeros == DType::s8 ? 128 : 0; }
Tensor stored_scales(const Tensor& scales) {
  if (stored_scale(scales.dtype) == scales.dtype) return scales;
  Tensor stored(stored_scale(scales.dtype), scales.shape);
  for (std::int64_t i = 0; i < scales.numel(); ++i) stored.set(i, scales.at(i));
  return stored;
}

std::string refusal(const WeightScheme& scheme, DType zero_type, std::int64_t k) {
  const DTypeKind kind = info(scheme.codes).kind;
  const bool floats = are_floats(stored_codes(scheme.codes));
  if ((!floats && kind != DTypeKind::uint && kind != DTypeKind::biased && scheme.codes != DType::s8) ||
      nibble::bits(scheme.codes) > 8)
    return fmt::format(
        "takes codes that are integers of up to 8 bits, e2m1, e4m3 or e5m2, not {}: quantize to such codes, or run on the CPU",
        name(scheme.codes));
  if (!is_compute_float(stored_scale(scheme.scale)))
    return fmt::format("scales of type {} are not f32, f16, bf16, e4m3 or e8m0", name(scheme.scale));
  if (floats && scheme.zero != ZeroKind::none) return fmt::format("zeros beside codes of type {}", name(scheme.codes));
  const bool wants_integer = scheme.zero == ZeroKind::integer;
  if (scheme.zero != ZeroKind::none &&
      (wants_integer ? zero_type != DType::u8 && zero_type != DType::s8 : !is_compute_float(zero_type)))
    return fmt::format("zeros of type {}", name(zero_type));
  if (const std::int64_t group = scheme.group.k; group < k && group % kShortestSpan != 0)
    return fmt::format("groups of {} channels are not a multiple of {}", group, kShortestSpan);
  return {};
}

Geometry geometry(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  Geometry geo{.n = n, .k = k, .bits = stored_bits(scheme.codes), .scale_bytes = nibble::bits(stored_scale(scheme.scale)) / 8};
  geo.span = span(scheme.group.k < k ? scheme.group.k : 0);
  if (scheme.zero != ZeroKind::none) geo.zero_bytes = nibble::bits(zero_type) / 8;
  return geo;
}

}  // namespace gpu_tile

namespace {

using gpu_tile::Geometry;
using gpu_tile::kChannels;
using gpu_tile::kRows;

/// Codes are stored unsigned.
std::uint8_t sign_flip(DType codes) { return codes == DType::s8 ? 0x80 : 0; }

/// The index in q.scales and q.zeros for a row and a packed channel.
std::int64_t scale_index(const WeightScheme& scheme, std::int64_t k, std::int64_t row, std::int64_t channel) {
  const std::int64_t r = scheme.group.n == 0 ? 0 : row / scheme.group.n;
  return r * scheme.group.cols(k) + (scheme.group.k == 0 ? 0 : channel / scheme.group.k);
}

/// Calls copy(element of the tensor, byte offset in the record) for every scale or zero of a record that exists.
template <class Copy>
void for_each_in_slots(const WeightScheme& scheme, const Geometry& geo, std::int64_t tile, std::int64_t record, Copy copy) {
  for (int slot = 0; slot < geo.slots(); ++slot) {
    const std::int64_t channel = record * kChannels + slot * geo.span;
    for (int row = 0; row < kRows && tile * kRows + row < geo.n && channel < geo.k; ++row)
      copy(scale_index(scheme, geo.k, tile * kRows + row, channel), slot, gpu_tile::slot_position(row));
  }
}

std::int64_t source_channel(const PackedWeightData& packed, std::int64_t channel) {
  return packed.perm.empty() ? channel : packed.perm[static_cast<std::size_t>(channel)];
}

/// The 256 numbers of an 8-bit type, in the order of their codes.
Tensor all_codes(DType type) {
  Tensor codes(type, {256});
  std::iota(codes.as<std::uint8_t>(), codes.as<std::uint8_t>() + 256, std::uint8_t{0});
  return codes;
}

/// The inverse of stored_scales: `scales` has the type of the scheme.
void restore_scales(const Tensor& stored, Tensor& scales) {
  if (stored.dtype == scales.dtype) {
    scales.bytes = stored.bytes;
    return;
  }
  const Tensor halves = gpu_tile::stored_scales(all_codes(scales.dtype));
  std::map<std::uint16_t, std::uint8_t> code_of;
  for (std::size_t code = 0; code < 256; ++code)
    code_of.emplace(halves.as<std::uint16_t>()[code], static_cast<std::uint8_t>(code));
  for (std::int64_t i = 0; i < scales.numel(); ++i) scales.as<std::uint8_t>()[i] = code_of.at(stored.as<std::uint16_t>()[i]);
}

/// The scales as they are stored: those of q, or of 8-bit ones the 16-bit number of each code.
class StoredScales {
 public:
  explicit StoredScales(const Tensor& scales) : scales_(scales) {
    if (gpu_tile::stored_scale(scales.dtype) != scales.dtype) number_of_code_ = gpu_tile::stored_scales(all_codes(scales.dtype));
  }
  void copy(std::int64_t index, std::size_t bytes, std::byte* to) const {
    const auto at = static_cast<std::size_t>(index);
    const bool as_they_are = number_of_code_.empty();
    const std::byte* const from = as_they_are
                                      ? scales_.bytes.data() + at * bytes
                                      : number_of_code_.bytes.data() + std::to_integer<std::size_t>(scales_.bytes[at]) * bytes;
    std::memcpy(to, from, bytes);
  }

 private:
  const Tensor& scales_;
  Tensor number_of_code_;
};

void pack_record(const QuantTensor& q, const CodeRows& rows_of_codes, const StoredScales& scales, const PackedWeightData& packed,
                 const Geometry& geo, std::int64_t tile, std::int64_t record, std::byte* out) {
  std::memset(out, 0, static_cast<std::size_t>(geo.record_bytes()));
  auto* codes = reinterpret_cast<std::uint8_t*>(out);
  const int rows = static_cast<int>(std::min<std::int64_t>(kRows, geo.n - tile * kRows));
  const int channels = static_cast<int>(std::min<std::int64_t>(kChannels, geo.k - record * kChannels));
  const std::uint8_t flip = sign_flip(q.scheme.codes);
  for (int row = 0; row < rows; ++row) {
    const std::uint8_t* const from = rows_of_codes.row(tile * kRows + row);
    for (int c = 0; c < channels; ++c) {
      const gpu_tile::Place to = gpu_tile::place(geo.bits, row, c);
      const auto code =
          static_cast<std::uint8_t>(rows_of_codes.code(from, source_channel(packed, record * kChannels + c)) ^ flip);
      codes[to.byte] = static_cast<std::uint8_t>(codes[to.byte] | code << to.shift);
    }
  }
  const auto scale_bytes = static_cast<std::size_t>(geo.scale_bytes), zero_bytes = static_cast<std::size_t>(geo.zero_bytes);
  for_each_in_slots(q.scheme, geo, tile, record, [&](std::int64_t index, int slot, int position) {
    scales.copy(index, scale_bytes, out + geo.scale_offset(slot) + position * geo.scale_bytes);
    if (geo.zero_bytes == 0) return;
    std::byte* zero = out + geo.zero_offset(slot) + position * geo.zero_bytes;
    std::memcpy(zero, q.zeros.bytes.data() + static_cast<std::size_t>(index) * zero_bytes, zero_bytes);
    if (packed.zero_type == DType::s8) *zero ^= std::byte{0x80};
  });
}

void unpack_record(const PackedWeightData& packed, QuantTensor& q, Tensor& scales, const Geometry& geo, std::int64_t tile,
                   std::int64_t record, const std::byte* in) {
  const auto* codes = reinterpret_cast<const std::uint8_t*>(in);
  const int rows = static_cast<int>(std::min<std::int64_t>(kRows, geo.n - tile * kRows));
  const int channels = static_cast<int>(std::min<std::int64_t>(kChannels, geo.k - record * kChannels));
  const std::uint8_t flip = sign_flip(q.scheme.codes);
  const int mask = (1 << geo.bits) - 1;
  for (int c = 0; c < channels; ++c) {
    std::uint8_t* column = q.codes.data() + source_channel(packed, record * kChannels + c);
    for (int row = 0; row < rows; ++row) {
      const gpu_tile::Place from = gpu_tile::place(geo.bits, row, c);
      column[(tile * kRows + row) * geo.k] = static_cast<std::uint8_t>(((codes[from.byte] >> from.shift) & mask) ^ flip);
    }
  }
  const auto scale_bytes = static_cast<std::size_t>(geo.scale_bytes), zero_bytes = static_cast<std::size_t>(geo.zero_bytes);
  for_each_in_slots(q.scheme, geo, tile, record, [&](std::int64_t index, int slot, int position) {
    std::memcpy(scales.bytes.data() + static_cast<std::size_t>(index) * scale_bytes,
                in + geo.scale_offset(slot) + position * geo.scale_bytes, scale_bytes);
    if (geo.zero_bytes == 0) return;
    std::byte* zero = q.zeros.bytes.data() + static_cast<std::size_t>(index) * zero_bytes;
    std::memcpy(zero, in + geo.zero_offset(slot) + position * geo.zero_bytes, zero_bytes);
    if (packed.zero_type == DType::s8) *zero ^= std::byte{0x80};
  });
}

std::size_t size(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(gpu_tile::geometry(scheme, zero_type, n, k).total_bytes());
}

void pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed) {
  const Geometry geo = gpu_tile::geometry(q.scheme, packed.zero_type, q.n, q.k);
  const StoredScales scales(q.scales);
  for (std::int64_t n = codes.begin; n < codes.end; n += kRows)
    for (int record = 0; record < geo.records(); ++record)
      pack_record(q, codes, scales, packed, geo, n / kRows, record,
                  packed.bytes.data() + geo.record(static_cast<int>(n / kRows), record));
}

void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const Geometry geo = gpu_tile::geometry(packed.scheme, packed.zero_type, packed.n, packed.k);
  Tensor scales(gpu_tile::stored_scale(q.scales.dtype), q.scales.shape);
  for (int tile = 0; tile < geo.tiles(); ++tile)
    for (int record = 0; record < geo.records(); ++record)
      unpack_record(packed, q, scales, geo, tile, record, packed.bytes.data() + geo.record(tile, record));
  restore_scales(scales, q.scales);
}

}  // namespace

const Layout kGpuTileLayout{.name = "gpu_n64k128",
                            .drawing = R"(
weight   = row tile 0 | row tile 1 | ...                64 output channels each, the last one zero-padded
row tile = record 0 | record 1 | ...                    128 input channels each (in g_idx order), zero-padded
record   = codes | slot 0 | slot 1 ...                  a slot per 128, 64, 32, 16 or 8 channels: the longest that divides a group
codes    = vector[step][fragment 0…3][lane 0…31]        16 bytes each; a step is 64 channels of 4 bits or 32 of 8 bits
           fragment w holds rows 16w … 16w+15 as the A operand of m16n8k16: lane 4g+t has of each 16 channels
           a0 = row g, channels 2t 2t+1   a1 = row g+8   a2 = row g, channels 2t+8 2t+9   a3 = row g+8
           4 bits: one word, low halves of a0 a1 a2 a3 from the low nibble up, then the high halves; 8 bits: two words
slot     = scale[64] | zero[64]?                        in the order of rows g g+8 g+16 g+24 for g = 0…7, of each 32 rows
)",
                            .backend = Backend::cuda,
                            .refusal = gpu_tile::refusal,
                            .size = size,
                            .rows = kRows,
                            .pack = pack,
                            .unpack = unpack};
}  // namespace nibble
