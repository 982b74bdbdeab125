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

/// Copies the scales or zeros of a row block into its records, `offset` bytes after their beginnings; those of rows past N are left as they
/// are. Row by row, as they lie: the lines that the rows of a block write to, one a record, stay in L1.
template <std::size_t kWidth>
void pack_columns(const Tensor& from, const WeightScheme& scheme, const tile::Geometry& geo, std::int64_t block,
                  std::int64_t offset, std::byte* records) {
  const std::int64_t groups = geo.groups(), rows = std::min<std::int64_t>(geo.rows, geo.n - block * geo.rows);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::byte* in =
        from.bytes.data() + static_cast<std::size_t>(scale_index(scheme, groups, block * geo.rows + r, 0)) * kWidth;
    std::byte* out = records + offset + r * static_cast<std::int64_t>(kWidth);
    for (std::int64_t g = 0; g < groups; ++g, in += kWidth, out += geo.record_bytes) std::memcpy(out, in, kWidth);
  }
}
void pack_columns(const Tensor& from, const WeightScheme& scheme, const tile::Geometry& geo, std::int64_t block,
                  std::int64_t offset, std::byte* records) {
  switch (bits(from.dtype)) {
    case 8: return pack_columns<1>(from, scheme, geo, block, offset, records);
    case 16: return pack_columns<2>(from, scheme, geo, block, offset, records);
    default: return pack_columns<4>(from, scheme, geo, block, offset, records);
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

/// The XOR mask that converts the first `count` of eight s8 bytes to codes + 128, and back.
std::uint64_t sign_flip(DType codes, int count) {
  return codes == DType::s8 ? 0x8080808080808080u >> (8 * (tile::kOctet - count)) : 0;
}

/// Rows [n, end) with their channels in packed order, a code a byte, in `memory`.
CodeRows in_packed_order(const CodeRows& rows, std::int64_t n, std::int64_t end, const std::vector<std::int32_t>& perm,
                         std::vector<std::uint8_t>& memory) {
  const std::size_t k = perm.size();
  memory.resize(static_cast<std::size_t>(end - n) * k);
  std::uint8_t* to = memory.data();
  for (std::int64_t i = n; i < end; ++i, to += k) {
    const std::uint8_t* const row = rows.row(i);
    if (rows.pairs)
      for (std::size_t j = 0; j < k; ++j) to[j] = rows.code(row, perm[j]);
    else
      for (std::size_t j = 0; j < k; ++j) to[j] = row[perm[j]];
  }
  return {n, end, 0, static_cast<std::int64_t>(k), memory.data(), static_cast<std::int64_t>(k)};
}

/// Codes k0 … k0+count−1 of a row, one per byte; zeros after them.
std::uint64_t gather(const CodeRows& rows, const std::uint8_t* row, std::int64_t k0, int count) {
  std::uint8_t codes[tile::kOctet] = {};
  if (count == tile::kOctet && !rows.pairs)
    std::memcpy(codes, row + k0, sizeof codes);
  else
    for (int j = 0; j < count; ++j) codes[j] = rows.code(row, k0 + j);
  std::uint64_t eight;
  std::memcpy(&eight, codes, sizeof eight);
  return eight;
}

void scatter(std::uint64_t eight, std::uint8_t* row, const std::vector<std::int32_t>& perm, std::int64_t k0, int count) {
  std::uint8_t codes[tile::kOctet];
  std::memcpy(codes, &eight, sizeof codes);
  for (int j = 0; j < count; ++j) row[perm.empty() ? k0 + j : perm[static_cast<std::size_t>(k0 + j)]] = codes[j];
}

/// Row r's eight codes into an octet of zeros, and back. Widths 8 and 4, nearly all weights, move whole words; place() defines the same
/// order code by code.
template <int R>
void put_row(std::uint64_t eight, const tile::Planes& planes, int r, std::uint8_t* octet) {
  for (int p = 0; p < planes.count; ++p) {
    const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
    const std::uint64_t bits = (eight >> shift) & (0x0101010101010101u * ((1u << width) - 1));
    const auto low = static_cast<std::uint32_t>(bits), high = static_cast<std::uint32_t>(bits >> 32);
    if (width == 8) {
      std::memcpy(octet + 4 * r, &low, 4);
      std::memcpy(octet + 4 * (R + r), &high, 4);
    } else if (width == 4) {
      const std::uint32_t word = low | high << 4;
      std::memcpy(octet + 4 * r, &word, 4);
    } else {
      for (int j = 0; j < tile::kOctet; ++j) {
        const tile::BitPlace to = tile::place(R, width, r, j);
        octet[to.byte] = static_cast<std::uint8_t>(octet[to.byte] | ((bits >> (8 * j)) & 0xff) << to.shift);
      }
    }
    octet += R * width;
  }
}

template <int R>
std::uint64_t get_row(const tile::Planes& planes, int r, const std::uint8_t* octet) {
  std::uint64_t eight = 0;
  for (int p = 0; p < planes.count; ++p) {
    const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
    std::uint64_t bits = 0;
    if (width >= 4) {
      std::uint32_t low, high;
      std::memcpy(&low, octet + 4 * r, 4);
      high = low >> 4;
      if (width == 8) std::memcpy(&high, octet + 4 * (R + r), 4);
      bits = (static_cast<std::uint64_t>(high) << 32 | low) & (0x0101010101010101u * ((1u << width) - 1));
    } else {
      for (int j = 0; j < tile::kOctet; ++j) {
        const tile::BitPlace from = tile::place(R, width, r, j);
        bits |= static_cast<std::uint64_t>((octet[from.byte] >> from.shift) & ((1 << width) - 1)) << (8 * j);
      }
    }
    eight |= bits << shift;
    octet += R * width;
  }
  return eight;
}

/// The floats of channels k0 … k0+count−1 of row r, into a dense octet of zeros and back.
template <int R>
void put_floats(const std::uint8_t* floats, int width, int count, int r, std::uint8_t* octet) {
  for (int j = 0; j < count; ++j)
    std::memcpy(octet + tile::float_place(R, 8 * width, r, j), floats + j * width, static_cast<std::size_t>(width));
}
template <int R>
void get_floats(const std::uint8_t* octet, int width, int count, int r, std::uint8_t* floats) {
  for (int j = 0; j < count; ++j)
    std::memcpy(floats + j * width, octet + tile::float_place(R, 8 * width, r, j), static_cast<std::size_t>(width));
}

// Words of 4 bytes: an octet of 4-bit codes is one word a row, one of 8-bit codes two, and the R words of all rows stand side by side. Four
// words of four rows are loaded, transposed and stored at a time; what is left of a group goes octet by octet.
typedef std::uint32_t Words __attribute__((vector_size(16)));
constexpr int kWords = 4;

Words load_words(const std::uint8_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

/// 4-bit codes that lie in pairs: a word has codes 0 1 2 3 4 5 6 7, from the low nibble up; in an octet they are 0 4 1 5 2 6 3 7.
struct FromPairs {
  static constexpr int kCodes = 8;  // in a word
  Words operator()(const std::uint8_t* row, std::int64_t k) const {
    Words x = load_words(row + k / 2);
    const Words bytes = (x ^ x >> 8) & 0x0000ff00u;
    x ^= bytes ^ bytes << 8;
    const Words nibbles = (x ^ x >> 4) & 0x00f000f0u;
    return x ^ nibbles ^ nibbles << 4;
  }
};
/// 4-bit codes of a byte each: codes 4 … 7 go above codes 0 … 3.
struct FromBytes {
  static constexpr int kCodes = 8;
  Words operator()(const std::uint8_t* row, std::int64_t k) const {
    const Words a = load_words(row + k), b = load_words(row + k + 16);
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) | __builtin_shufflevector(a, b, 1, 3, 5, 7) << 4;
  }
};
/// 8-bit codes.
struct Whole {
  static constexpr int kCodes = 4;
  std::uint32_t flip;
  Words operator()(const std::uint8_t* row, std::int64_t k) const { return load_words(row + k) ^ flip; }
};

/// The words of a row block's channels [k, end), as far as they come in whole octets and by kWords, into the octets at `out`. Returns the
/// channel after them. A block of fewer than R rows has zeros in place of the others.
template <int R, class Load>
std::int64_t pack_words(const CodeRows& codes, std::int64_t n, int rows, std::int64_t k, std::int64_t end, Load load,
                        std::uint8_t* out) {
  constexpr std::int64_t kChannels = kWords * Load::kCodes;
  for (; k + kChannels <= end; k += kChannels, out += kWords * R * sizeof(std::uint32_t)) {
    for (int r = 0; r < rows; r += kWords) {
      Words of_row[kWords] = {};
      for (int i = 0; i < kWords; ++i)
        if (r + i < rows) of_row[i] = load(codes.row(n + r + i), k);
      const Words ab = __builtin_shufflevector(of_row[0], of_row[1], 0, 4, 1, 5),
                  cd = __builtin_shufflevector(of_row[2], of_row[3], 0, 4, 1, 5),
                  ab_high = __builtin_shufflevector(of_row[0], of_row[1], 2, 6, 3, 7),
                  cd_high = __builtin_shufflevector(of_row[2], of_row[3], 2, 6, 3, 7);
      const Words of_word[kWords] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                                     __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                                     __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int i = 0; i < kWords; ++i) std::memcpy(out + 4 * (i * R + r), &of_word[i], sizeof of_word[i]);
    }
  }
  return k;
}

/// The scales and zeros of a row block, and zeros for its rows past N.
void pack_headers(const QuantTensor& q, PackedWeightData& packed, const tile::Geometry& geo, std::int64_t block) {
  std::byte* const records = packed.bytes.data() + geo.record(block, 0);
  for (std::int64_t g = 0; geo.n < (block + 1) * geo.rows && g < geo.groups(); ++g)
    std::memset(records + g * geo.record_bytes, 0, static_cast<std::size_t>(geo.header_bytes));
  if (!q.scales.empty()) pack_columns(q.scales, q.scheme, geo, block, 0, records);
  if (!q.zeros.empty()) pack_columns(q.zeros, q.scheme, geo, block, geo.scale_bytes, records);
}

/// The octets of a row block that are of the channels of `codes`, in packed order: a band, or all.
template <int R>
void pack_block(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed, const tile::Geometry& geo,
                std::int64_t block) {
  const bool dense = q.scheme.is_dense();
  const int width = code_bytes(q.scheme.codes);
  const tile::Planes planes = dense ? tile::Planes{} : tile::planes(geo.bits);
  const std::int64_t n = block * R;
  const int rows = static_cast<int>(std::min<std::int64_t>(R, geo.n - n));
  for (std::int64_t k = codes.k_begin; k < codes.k_end;) {
    const std::int64_t g = k / geo.group, k_end = std::min(codes.k_end, (g + 1) * geo.group);
    auto* octet = reinterpret_cast<std::uint8_t*>(packed.bytes.data() + geo.record(block, g) + geo.header_bytes) +
                  (k - g * geo.group) / tile::kOctet * geo.octet_bytes;
    const std::int64_t begin = k - codes.k_begin, end = k_end - codes.k_begin;  // in the rows of `codes`
    if (rows < R) std::memset(octet, 0, static_cast<std::size_t>(tile::Geometry::octets(end - begin) * geo.octet_bytes));
    std::int64_t i = begin;
    if (geo.bits == 4 && codes.pairs && i % 2 == 0) i = pack_words<R>(codes, n, rows, i, end, FromPairs{}, octet);
    if (geo.bits == 4 && !codes.pairs) i = pack_words<R>(codes, n, rows, i, end, FromBytes{}, octet);
    if (geo.bits == 8)
      i = pack_words<R>(codes, n, rows, i, end, Whole{static_cast<std::uint32_t>(sign_flip(q.scheme.codes, tile::kOctet))},
                        octet);
    octet += (i - begin) / tile::kOctet * geo.octet_bytes;
    std::memset(octet, 0, static_cast<std::size_t>(tile::Geometry::octets(end - i) * geo.octet_bytes));
    for (; i < end; i += tile::kOctet, octet += geo.octet_bytes) {
      const int count = static_cast<int>(std::min<std::int64_t>(tile::kOctet, end - i));
      for (int r = 0; r < rows; ++r) {
        const std::uint8_t* const row = codes.row(n + r);
        if (dense)
          put_floats<R>(row + i * width, width, count, r, octet);
        else
          put_row<R>(gather(codes, row, i, count) ^ sign_flip(q.scheme.codes, count), planes, r, octet);
      }
    }
    k = k_end;
  }
}

template <int R>
void pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed) {
  const tile::Geometry geo = tile::geometry(R, q.scheme, packed.zero_type, q.n, q.k);
  // A row of scales is copied at once, so that its lines are read once: every band has the headers of its share of the row blocks.
  const std::int64_t first = geo.row_blocks() * codes.k_begin / geo.k, last = geo.row_blocks() * codes.k_end / geo.k;
  std::vector<std::uint8_t> ordered;
  for (std::int64_t block = codes.begin / R; block * R < codes.end; ++block) {
    if (block >= first && block < last) pack_headers(q, packed, geo, block);
    if (packed.perm.empty())
      pack_block<R>(q, codes, packed, geo, block);
    else
      pack_block<R>(q, in_packed_order(codes, block * R, std::min(codes.end, (block + 1) * R), packed.perm, ordered), packed, geo,
                    block);
  }
}

template <int R>
void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const tile::Geometry geo = tile::geometry(R, q.scheme, packed.zero_type, q.n, q.k);
  const bool dense = q.scheme.is_dense();
  const int width = code_bytes(q.scheme.codes);
  const tile::Planes planes = dense ? tile::Planes{} : tile::planes(geo.bits);
  for (std::int64_t block = 0; block < geo.row_blocks(); ++block) {
    for (std::int64_t g = 0; g < geo.groups(); ++g) {
      const std::byte* record = packed.bytes.data() + geo.record(block, g);
      if (!dense) unpack_column(record, q.scheme, geo, block, g, q.scales);
      if (!q.zeros.empty()) unpack_column(record + geo.scale_bytes, q.scheme, geo, block, g, q.zeros);

      const auto* octet = reinterpret_cast<const std::uint8_t*>(record + geo.header_bytes);
      const std::int64_t k_end = std::min(geo.k, (g + 1) * geo.group);
      for (std::int64_t k0 = g * geo.group; k0 < k_end; k0 += tile::kOctet, octet += geo.octet_bytes)
        for (int r = 0; r < R && block * R + r < geo.n; ++r) {
          const int count = static_cast<int>(std::min<std::int64_t>(tile::kOctet, k_end - k0));
          std::uint8_t* const row = q.codes.data() + (block * R + r) * geo.k * width;
          if (dense)
            get_floats<R>(octet, width, count, r, row + k0 * width);
          else
            scatter(get_row<R>(planes, r, octet) ^ sign_flip(q.scheme.codes, tile::kOctet), row, packed.perm, k0, count);
        }
    }
  }
}

template <int R>
constexpr Layout make_layout(std::string_view name, std::string_view drawing) {
  return {.name = name,
          .drawing = drawing,
          .size = size<R>,
          .rows = R,
          .channels = tile::kOctet,
          .pack = pack<R>,
          .unpack = unpack<R>};
}

}  // namespace

const Layout kTile16Layout = make_layout<16>("cpu_n16", R"(
weight    = row block 0 | row block 1 | ...             16 output channels each, the last one zero-padded
row block = record of group 0 | record of group 1 | ... one contiguous run: what one core streams
record    = scale[16] | zero[16]? | octet 0 | octet 1 | ...   8 input channels each (in g_idx order), zero-padded
octet     = plane | plane | ...       the code's bits as planes of width w = 8, 4, 2, 1, low bits first; s8 as code + 128
plane     = row 0 | row 1 | ... | row 15               w bytes each; channel j in byte j mod w at bit (j div w)·w
            w = 4: 32 bits are channels 0 4 1 5 2 6 3 7 from the low nibble up
            w = 8: channels 0…3 of all rows, then channels 4…7 of all rows
            dense, 16 bits: channels (0,2) of all rows, (4,6) of all rows, (1,3), (5,7); f32: channel 0 of all rows, channel 1, …
)");

const Layout kTile32Layout = make_layout<32>("cpu_n32", R"(
weight    = row block 0 | row block 1 | ...             32 output channels each, the last one zero-padded
row block = record of group 0 | record of group 1 | ... one contiguous run: what one core streams
record    = scale[32] | zero[32]? | octet 0 | octet 1 | ...   8 input channels each (in g_idx order), zero-padded
octet     = plane | plane | ...       the code's bits as planes of width w = 8, 4, 2, 1, low bits first; s8 as code + 128
plane     = row 0 | row 1 | ... | row 31               w bytes each; channel j in byte j mod w at bit (j div w)·w
            w = 4: 32 bits are channels 0 4 1 5 2 6 3 7 from the low nibble up
            w = 8: channels 0…3 of all rows, then channels 4…7 of all rows
            dense, 16 bits: channels (0,2) of all rows, (4,6) of all rows, (1,3), (5,7); f32: channel 0 of all rows, channel 1, …
)");

}  // namespace nibble
