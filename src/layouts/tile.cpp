// The CPU tile layouts cpu_n16 and cpu_n32: see tile.hpp for the drawing and the index maths.
#include "layouts/tile.hpp"

#include <cstring>

#include "layouts/layout.hpp"

namespace nibble {
namespace {

/// Index of the scale (and zero) that row `row` uses in group g.
std::int64_t scale_index(const WeightScheme& scheme, std::int64_t groups, std::int64_t row, std::int64_t g) {
  return (scheme.group.n == 0 ? 0 : row / scheme.group.n) * groups + g;
}

/// Copies the R scales or zeros of a record; rows past N get zero bytes.
void pack_column(const Tensor& from, const WeightScheme& scheme, const tile::Geometry& geo, std::int64_t block, std::int64_t g,
                 std::byte* to) {
  const auto width = static_cast<std::size_t>(bits(from.dtype) / 8);
  for (int r = 0; r < geo.rows; ++r, to += width) {
    const std::int64_t row = block * geo.rows + r;
    if (row >= geo.n) {
      std::memset(to, 0, width);
    } else {
      const auto at = static_cast<std::size_t>(scale_index(scheme, geo.groups(), row, g));
      std::memcpy(to, from.bytes.data() + at * width, width);
    }
  }
}

void unpack_column(const std::byte* from, const WeightScheme& scheme, const tile::Geometry& geo, std::int64_t block,
                   std::int64_t g, Tensor& to) {
  const auto width = static_cast<std::size_t>(bits(to.dtype) / 8);
  for (int r = 0; r < geo.rows && block * geo.rows + r < geo.n; ++r) {
    const auto at = static_cast<std::size_t>(scale_index(scheme, geo.groups(), block * geo.rows + r, g));
    std::memcpy(to.bytes.data() + at * width, from + static_cast<std::size_t>(r) * width, width);
  }
}

template <int R>
std::size_t size(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(tile::geometry(R, scheme, zero_type, n, k).total_bytes());
}

template <int R>
void pack_block(const QuantTensor& q, PackedWeightData& packed, const tile::Geometry& geo, std::int64_t block) {
  const tile::Planes planes = tile::planes(geo.bits);
  const std::int64_t rows = std::min<std::int64_t>(R, geo.n - block * R);
  for (std::int64_t g = 0; g < geo.groups(); ++g) {
    std::byte* record = packed.bytes.data() + geo.record(block, g);
    pack_column(q.scales, q.scheme, geo, block, g, record);
    if (!q.zeros.empty()) pack_column(q.zeros, q.scheme, geo, block, g, record + geo.scale_bytes);

    auto* codes = reinterpret_cast<std::uint8_t*>(record + geo.header_bytes);
    const std::int64_t k_begin = g * geo.group;
    const std::int64_t k_end = std::min(geo.k, k_begin + geo.group);
    for (std::int64_t i = k_begin; i < k_end; ++i, codes += geo.k_bytes) {
      const std::int64_t k = packed.perm.empty() ? i : packed.perm[static_cast<std::size_t>(i)];
      std::memset(codes, 0, static_cast<std::size_t>(geo.k_bytes));
      std::uint8_t* plane = codes;
      for (int p = 0; p < planes.count; ++p) {
        const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
        for (int r = 0; r < rows; ++r) {
          const std::uint8_t code = q.codes[static_cast<std::size_t>((block * R + r) * geo.k + k)];
          const tile::BitPlace to = tile::place(R, width, r);
          plane[to.byte] = static_cast<std::uint8_t>(plane[to.byte] | (((code >> shift) & ((1 << width) - 1)) << to.shift));
        }
        plane += R * width / 8;
      }
    }
  }
}

template <int R>
void pack(const QuantTensor& q, PackedWeightData& packed, Executor& executor) {
  const tile::Geometry geo = tile::geometry(R, q.scheme, packed.zero_type, q.n, q.k);
  executor.parallel_for(geo.row_blocks(), [&](std::int64_t block) { pack_block<R>(q, packed, geo, block); });
}

template <int R>
void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const tile::Geometry geo = tile::geometry(R, q.scheme, packed.zero_type, q.n, q.k);
  const tile::Planes planes = tile::planes(geo.bits);
  for (std::int64_t block = 0; block < geo.row_blocks(); ++block) {
    for (std::int64_t g = 0; g < geo.groups(); ++g) {
      const std::byte* record = packed.bytes.data() + geo.record(block, g);
      unpack_column(record, q.scheme, geo, block, g, q.scales);
      if (!q.zeros.empty()) unpack_column(record + geo.scale_bytes, q.scheme, geo, block, g, q.zeros);

      const auto* codes = reinterpret_cast<const std::uint8_t*>(record + geo.header_bytes);
      const std::int64_t k_end = std::min(geo.k, (g + 1) * geo.group);
      for (std::int64_t i = g * geo.group; i < k_end; ++i, codes += geo.k_bytes) {
        const std::int64_t k = packed.perm.empty() ? i : packed.perm[static_cast<std::size_t>(i)];
        for (int r = 0; r < R && block * R + r < geo.n; ++r) {
          int code = 0;
          const std::uint8_t* plane = codes;
          for (int p = 0; p < planes.count; ++p) {
            const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
            const tile::BitPlace from = tile::place(R, width, r);
            code |= ((plane[from.byte] >> from.shift) & ((1 << width) - 1)) << shift;
            plane += R * width / 8;
          }
          q.codes[static_cast<std::size_t>((block * R + r) * geo.k + k)] = static_cast<std::uint8_t>(code);
        }
      }
    }
  }
}

template <int R>
constexpr Layout make_layout(std::string_view name, std::string_view drawing) {
  return {.name = name, .drawing = drawing, .size = size<R>, .pack = pack<R>, .unpack = unpack<R>};
}

}  // namespace

const Layout kTile16Layout = make_layout<16>("cpu_n16", R"(
weight   = row block 0 | row block 1 | ...             16 output channels each, the last one zero-padded
row block= record of group 0 | record of group 1 | ... one contiguous run: what one core streams
record   = scale[16] | zero[16]? | k 0 | k 1 | ...     k runs over the group's input channels (in g_idx order)
k, 4 bit = byte j, j = 0…7: row j in the low nibble, row j+8 in the high nibble
k, 8 bit = byte j, j = 0…15: row j
k, other = bit planes of width 4, 2, 1, low bits first, each dense like the above
)");

const Layout kTile32Layout = make_layout<32>("cpu_n32", R"(
weight   = row block 0 | row block 1 | ...             32 output channels each, the last one zero-padded
row block= record of group 0 | record of group 1 | ... one contiguous run: what one core streams
record   = scale[32] | zero[32]? | k 0 | k 1 | ...     k runs over the group's input channels (in g_idx order)
k, 4 bit = byte j, j = 0…15: row j in the low nibble, row j+16 in the high nibble
k, 8 bit = byte j, j = 0…31: row j
k, other = bit planes of width 4, 2, 1, low bits first, each dense like the above
)");

}  // namespace nibble
