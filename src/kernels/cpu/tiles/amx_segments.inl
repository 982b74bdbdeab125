// The int8 loops of dot_tile.hpp in tiles of AMX, included by dot_tile.inl.
//
//   for each row block, for each chunk of K
//     codes → panel                                          signed bytes in L1, less the weight's zero points; once for all tokens
//     for each tile of 32 tokens, for each four parts of segments
//       rows of the tokens × panel → sums[4]                 tile registers → L1
//       out += s_a · (s ∘ (sums − z_a ∘ Σ panel))            vector registers, over the four parts at once
//
//   panel, one step: 16 quads of K        part of a segment: 1 … 4 steps
//     ┌ n0: k0 k1 k2 k3 │ n1 … n15 │ n16 … n31 ┐ 128 bytes
//     │ n0: k4 k5 k6 k7 │ …        │           │
//     └ 16 rows ────────┴──────────┴───────────┘
//        operand of one product ──┘  operand of the other
//
// Storing a tile register waits for its last product, some fifty clocks. Products are therefore issued in units of 16 tokens, which
// alternate between two pairs of registers: while one pair is multiplied, the other, of the unit before, is stored.
#include "kernels/cpu/tiles/amx_tile.inl"

constexpr int kInt8Tile = 2 * kTileRows;
constexpr std::int64_t kTaskBytes = std::int64_t{1} << 62;  // no limit: weights are read once, in chunks
constexpr std::int64_t kTaskTokens = 128;                   // four tiles: enough to amortise unpacking a chunk
/// Row blocks that a part of the activations is multiplied by, and the bytes of such a part: with the sums, 128 KiB, less than half of an
/// L2 of 2 MiB.
constexpr std::int64_t kGroupBlocks = 8, kPartBytes = 640 << 10;

constexpr int kStepOctets = kTileBytes / tile::kOctet;          // one product's channels of K, of bytes
constexpr int kStepBytes = kStepOctets * tile::kOctet * kRows;  // of the panel
/// Steps of a chunk: two panels are 16 KiB, a third of L1; the rest is for sums and the rows of tokens, which pass through.
constexpr int kChunkSteps = 4;
/// Parts whose sums are scaled together, so that the floats that they are added to are loaded and stored once.
constexpr int kParts = 4;

/// A segment, or as much of a long one as fits a chunk.
struct Part {
  GroupHeader header;     // zero: what the panel does not contain
  Vec column[kVecs];      // Σ of the segment's bytes, by which zero points of activations are multiplied
  std::int64_t scales;    // offset of the segment in the prepared activations, a token
  std::int64_t rows;      // first step of the part in the segment
  std::int64_t all_rows;  // steps of the segment
  int step, steps;        // in the panel
  bool first, last;       // of the segment
};

/// A chunk of K of a row block.
struct Chunk {
  alignas(64) std::byte panel[kChunkSteps * kStepBytes];
  Part parts[kChunkSteps];
  int count;       // of parts
  bool subtracts;  // some part's header has zeros or offsets
};

/// What a walk along K has reached.
struct Walk {
  const std::byte* codes;
  std::int64_t k = 0, group_left = 0, unit_left = 0;
  std::int64_t left = 0, length = 0, done = 0;  // of the segment: channels left, all, steps before
  std::int64_t scales = 0;                      // per token, of the prepared activations
  GroupHeader header;
  Ints fold[kVecs];        // what the panel subtracts from codes, four times
  bool subtracts = false;  // the header has zeros or offsets
  Ints column[kVecs];      // of the segment so far
};

/// The zero point, or as much of it as keeps the bytes of the panel within −128 … 127, is subtracted from codes; the rest stays in the
/// header.
NIBBLE_VARIANT void fold_zeros(const Decoder& d, Walk& w) {
  // Of codes of less than 8 bits: 0 less the highest, and the largest code less the lowest, are bytes.
  constexpr float kHighest = 96;
  const auto lowest = static_cast<float>((1 << d.geometry.bits) - 128);
  const Vec bias = Vec{} + d.bias;
  Ints rest{};
  for (int v = 0; v < kVecs; ++v) {
    Vec zero = w.header.zero[v] + bias;
    if (d.geometry.bits == 8) {
      w.header.zero[v] = zero - 128.0f;
      w.fold[v] = splat(static_cast<std::int32_t>(0x80808080u));  // the byte 128 is −128, too
      rest |= w.header.zero[v] != 0.0f;
      continue;
    }
    Vec folded = d.zero == ZeroKind::integer ? zero : bias;
    folded = lowest <= folded && folded <= kHighest && to_floats(to_ints(folded)) == folded ? folded : Vec{};
    w.header.zero[v] = zero - folded;
    w.fold[v] = (to_ints(folded) & 255) * 0x01010101;
    rest |= w.header.zero[v] != 0.0f;
  }
  w.subtracts = d.zero == ZeroKind::offset || sum_lanes(rest) != 0;
}

/// a − b of every byte.
inline Ints less_bytes(Ints a, Ints b) {
  typedef std::int8_t Bytes __attribute__((vector_size(4 * kLanes)));
  return reinterpret_cast<Ints>(reinterpret_cast<Bytes>(a) - reinterpret_cast<Bytes>(b));
}

/// Unpacks `octets` octets of codes, less `fold`, in the order of 8-bit octets; zeros follow up to a whole step. Adds them up in `column`.
/// `bits` (4, 8; 0: any) and `columns` are constants at every call.
NIBBLE_VARIANT void spread_octets(int bits, bool columns, int width, const std::byte* codes, std::int64_t octets,
                                  const Ints* folds, std::byte* panel, Ints* column) {
  const tile::Planes planes = tile::planes(width);
  Ints fold[kVecs], sums[2][kVecs] = {};  // two of each channel: a sum waits five clocks for the one before it
  for (int v = 0; v < kVecs; ++v) fold[v] = folds[v];
  const Ints ones = splat(0x01010101);
  std::int64_t o = 0;
  for (; o < octets; ++o, codes += width * kRows, panel += 2 * kQuadBytes)
    for (int v = 0; v < kVecs; ++v) {
      const Quads quads = bits == 0 ? load_any_quads(planes, codes, v) : load_quads(bits, codes, v);
      const Ints low = less_bytes(quads.low, fold[v]), high = less_bytes(quads.high, fold[v]);
      store_ints(panel + v * kTileBytes, low);
      store_ints(panel + kQuadBytes + v * kTileBytes, high);
      if (!columns) continue;
      sums[0][v] = dot4(sums[0][v], ones, low, 8);
      sums[1][v] = dot4(sums[1][v], ones, high, 8);
    }
  for (int v = 0; v < kVecs; ++v) column[v] += sums[0][v] + sums[1][v];
  for (; o % kStepOctets != 0; ++o, panel += 2 * kQuadBytes) std::memset(panel, 0, 2 * kQuadBytes);
}

/// The panel of the next chunk, at most kChunkSteps steps.
__attribute__((noinline)) void fill(const DotTask& t, Walk& walk, Chunk& chunk) {
  Walk w = walk;  // in registers
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const bool columns = t.zero_sums == ZeroSums::per_segment, common = has_common_header(d);
  const int width = geo.bits;
  chunk.count = 0;
  chunk.subtracts = false;
  for (int step = 0; step < kChunkSteps && (w.left > 0 || w.k < geo.k);) {
    if (w.left == 0) {  // the next segment
      if (w.group_left == 0) {
        w.group_left = least(geo.group, geo.k - w.k);
        common ? read_common_header(0, d, w.codes, w.header) : read_group_header(d, w.codes, w.header);
        fold_zeros(d, w);
        w.codes += geo.header_bytes;
      }
      if (w.unit_left == 0) w.unit_left = least(t.segments.unit, w.group_left);
      w.length = least(t.segments.piece, w.unit_left);
      w.left = w.length;
      w.done = 0;
    }
    const std::int64_t all = (w.length + kTileBytes - 1) / kTileBytes, steps = least(all - w.done, kChunkSteps - step);
    if (step > 0 && steps < all && all <= kChunkSteps) break;  // the next chunk has room for all of it
    const std::int64_t octets = least(tile::Geometry::octets(w.left), steps * kStepOctets);
    Part& part = chunk.parts[chunk.count++];
    part.header = w.header;
    part.scales = w.scales;
    part.rows = w.done;
    part.all_rows = all;
    part.step = step;
    part.steps = static_cast<int>(steps);
    part.first = w.done == 0;
    part.last = w.done + steps == all;
    chunk.subtracts |= w.subtracts;
    Ints sums[kVecs];
    for (int v = 0; v < kVecs; ++v) sums[v] = part.first ? Ints{} : w.column[v];
    std::byte* const panel = chunk.panel + step * kStepBytes;
    switch (width) {
      case 4:
        columns ? spread_octets(4, true, 4, w.codes, octets, w.fold, panel, sums)
                : spread_octets(4, false, 4, w.codes, octets, w.fold, panel, sums);
        break;
      case 8: spread_octets(8, true, 8, w.codes, octets, w.fold, panel, sums); break;
      default: spread_octets(0, true, width, w.codes, octets, w.fold, panel, sums);
    }
    // Channels that fill up the last octet have codes of 0. Activations are the zero point there, beside pairs, or 0.
    const std::int64_t filled = t.paired ? 0 : octets * tile::kOctet - least(w.left, octets * tile::kOctet);
    for (int v = 0; v < kVecs; ++v) {
      w.column[v] = sums[v];
      const Ints of_code_0 = width == 8 ? splat(-128) : -((w.fold[v] << 24) >> 24);
      part.column[v] = to_floats(sums[v] - of_code_0 * static_cast<std::int32_t>(filled));
    }
    w.codes += octets * geo.octet_bytes;
    w.left -= least(w.left, octets * tile::kOctet);
    w.done += steps;
    step += static_cast<int>(steps);
    if (w.left > 0) continue;
    w.scales += (columns ? 16 : 12) + all * kTileBytes;
    w.k += w.length;
    w.group_left -= w.length;
    w.unit_left -= w.length;
  }
  walk = w;
}

/// Sums of 16 tokens × R channels, the `half` of a tile of `tokens`, to be stored in `sums`, or in `kept` if the segment goes on. The unit
/// before, of the other pair of registers, goes to `before`. `pair` is a constant at every call.
NIBBLE_VARIANT void multiply_unit(int pair, const DotTask& t, const Chunk& chunk, const Part& part, const std::byte* a,
                                  std::int64_t tokens, int half, std::int32_t* sums, std::int32_t* kept, std::int32_t*& before) {
  constexpr int kSumBytes = 4 * kRows;
  const std::int64_t header = t.zero_sums == ZeroSums::per_segment ? 16 : 12, at = half * kTileRows * kRows;
  const std::byte* rows = a + (part.scales + header) * tokens + (half * part.all_rows + part.rows) * kTileRows * kTileBytes;
  const std::byte* panel = chunk.panel + part.step * kStepBytes;
  const std::int32_t* from = part.first ? nullptr : kept + at;
  if (pair == 0) {
    _tile_zero(0);
    _tile_zero(1);
    if (from != nullptr) {
      _tile_loadd(0, from, kSumBytes);
      _tile_loadd(1, from + kLanes, kSumBytes);
    }
  } else {
    _tile_zero(2);
    _tile_zero(3);
    if (from != nullptr) {
      _tile_loadd(2, from, kSumBytes);
      _tile_loadd(3, from + kLanes, kSumBytes);
    }
  }
  for (int s = 0; s < part.steps; ++s, rows += kTileRows * kTileBytes, panel += kStepBytes) {
    _tile_loadd(6, panel, kQuadBytes);
    _tile_loadd(7, panel + kTileBytes, kQuadBytes);
    if (pair == 0) {
      _tile_stream_loadd(4, rows, kTileBytes);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_stream_loadd(5, rows, kTileBytes);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    if (s > 0 || before == nullptr) continue;
    if (pair == 0) {
      _tile_stored(2, before, kSumBytes);
      _tile_stored(3, before + kLanes, kSumBytes);
    } else {
      _tile_stored(0, before, kSumBytes);
      _tile_stored(1, before + kLanes, kSumBytes);
    }
  }
  before = (part.last ? sums : kept) + at;
}

/// sums[i][32][R], or the first 16 rows of each, of parts [0, count); of a part that is not the last of its segment in `kept`.
NIBBLE_VARIANT void multiply_parts(bool both, const DotTask& t, const Chunk& chunk, const Part* parts, int count,
                                   const std::byte* a, std::int32_t (*sums)[kInt8Tile * kRows], std::int32_t* kept) {
  const std::int64_t tokens = both ? kInt8Tile : kTileRows;
  std::int32_t* before = nullptr;
  keep_order();
  if (both) {
    for (int i = 0; i < count; ++i) {
      multiply_unit(0, t, chunk, parts[i], a, tokens, 0, sums[i], kept, before);
      multiply_unit(1, t, chunk, parts[i], a, tokens, 1, sums[i], kept, before);
    }
  } else {
    for (int i = 0; i < count; i += 2) {
      multiply_unit(0, t, chunk, parts[i], a, tokens, 0, sums[i], kept, before);
      if (i + 1 < count) multiply_unit(1, t, chunk, parts[i + 1], a, tokens, 0, sums[i + 1], kept, before);
    }
  }
  if (both || count % 2 == 0) {
    _tile_stored(2, before, 4 * kRows);
    _tile_stored(3, before + kLanes, 4 * kRows);
  } else {
    _tile_stored(0, before, 4 * kRows);
    _tile_stored(1, before + kLanes, 4 * kRows);
  }
  keep_order();
}

/// out[height][R] += s_a · (s ∘ (sums − z_a ∘ column − zero ∘ Σa)) of `count` parts, one after the other. `count`, `columns` and `rest` (there
/// are zeros or offsets in headers) are constants at every call.
NIBBLE_VARIANT void scale_parts(int count, bool columns, bool rest, const DotTask& t, const Part* parts, const std::byte* a,
                                std::int64_t tokens, int height, const std::int32_t (*sums)[kInt8Tile * kRows], float* out) {
  constexpr int kTogether = 4;  // tokens, whose sums stay in registers
  const Decoder& d = *t.decoder;
  alignas(64) float pairs[kParts][kInt8Tile];
  const float *scales[kParts], *token_sums[kParts], *zeros[kParts];
  for (int i = 0; i < count; ++i) {
    scales[i] = reinterpret_cast<const float*>(a + parts[i].scales * tokens);
    token_sums[i] = scales[i] + tokens;
    zeros[i] = token_sums[i] + tokens;
    if (!columns || !t.paired) continue;
    for (std::int64_t m = 0; m < tokens; m += kLanes) store(pairs[i] + m, to_floats(-(load_ints(zeros[i] + m) >> 16)));
    zeros[i] = pairs[i];
  }
  for (int m = 0; m < height; m += kTogether) {
    Vec sum[kTogether][kVecs];
    for (int j = 0; j < kTogether; ++j)
      for (int v = 0; v < kVecs; ++v) sum[j][v] = load(out + (m + j) * kRows + v * kLanes);
    for (int i = 0; i < count; ++i) {
      const GroupHeader& h = parts[i].header;
      for (int j = 0; j < kTogether; ++j) {
        const Vec scale = splat_at(scales[i] + m + j);
        for (int v = 0; v < kVecs; ++v) {
          Vec dot = to_floats(load_ints(sums[i] + (m + j) * kRows + v * kLanes));
          if (columns) dot -= splat_at(zeros[i] + m + j) * parts[i].column[v];
          if (rest) dot -= h.zero[v] * splat_at(token_sums[i] + m + j);
          sum[j][v] += (dot * scale) * h.scale[v];
          if (rest && d.zero == ZeroKind::offset) sum[j][v] += (splat_at(token_sums[i] + m + j) * scale) * h.offset[v];
        }
      }
    }
    for (int j = 0; j < kTogether; ++j)
      for (int v = 0; v < kVecs; ++v) store(out + (m + j) * kRows + v * kLanes, sum[j][v]);
  }
}

__attribute__((noinline)) void scale_any(int count, bool rest, const DotTask& t, const Part* parts, const std::byte* a,
                                         std::int64_t tokens, int height, const std::int32_t (*sums)[kInt8Tile * kRows],
                                         float* out) {
  const bool columns = t.zero_sums == ZeroSums::per_segment;
  if (rest || count != kParts) {
    for (int i = 0; i < count; ++i) {
      if (!rest)
        columns ? scale_parts(1, true, false, t, parts + i, a, tokens, height, sums + i, out)
                : scale_parts(1, false, false, t, parts + i, a, tokens, height, sums + i, out);
      else
        columns ? scale_parts(1, true, true, t, parts + i, a, tokens, height, sums + i, out)
                : scale_parts(1, false, true, t, parts + i, a, tokens, height, sums + i, out);
    }
  } else {
    columns ? scale_parts(kParts, true, false, t, parts, a, tokens, height, sums, out)
            : scale_parts(kParts, false, false, t, parts, a, tokens, height, sums, out);
  }
}

/// out[height][R] += of a tile of tokens, over a chunk. `kept`: sums of the segment that the chunk before left unfinished.
__attribute__((noinline)) void multiply_chunk(const DotTask& t, const Chunk& chunk, const std::byte* a, int height,
                                              std::int32_t* kept, float* out) {
  alignas(64) std::int32_t sums[kParts][kInt8Tile * kRows];
  const bool both = height > kTileRows;
  for (int begin = 0; begin < chunk.count; begin += kParts) {
    const int count = chunk.count - begin < kParts ? chunk.count - begin : kParts;
    const Part* parts = chunk.parts + begin;
    both ? multiply_parts(true, t, chunk, parts, count, a, sums, kept)
         : multiply_parts(false, t, chunk, parts, count, a, sums, kept);
    const int complete = parts[count - 1].last ? count : count - 1;
    scale_any(complete, chunk.subtracts, t, parts, a, room(height), height, sums, out);
  }
}

/// Groups of row blocks outside; then parts of K, whose rows of all tokens stay in L2; then row blocks, chunks, and tiles of tokens.
void linear_int8(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin, std::int64_t m_end) {
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t sums = (m_end - m_begin + kTileRows - 1) / kTileRows * kTileRows * kRows;  // of a row block
  const std::int64_t tiles = (m_end - m_begin + t.tile - 1) / t.tile, part_bytes = kPartBytes / (m_end - m_begin);
  alignas(64) float out[kGroupBlocks * kTaskTokens * kRows];
  alignas(64) std::int32_t kept[kTaskTokens * kRows];
  Walk walks[kGroupBlocks];
  int now = 0;  // of the chunks
  Chunk chunks[2];
  const Tiles in_use(m_end - m_begin);
  for (std::int64_t begin = block_begin, end = 0; begin < block_end; begin = end) {
    end = least(begin + kGroupBlocks, block_end);
    for (std::int64_t i = 0; i < (end - begin) * sums; i += kLanes) store(out + i, Vec{});
    for (std::int64_t block = begin; block < end; ++block) walks[block - begin] = {.codes = t.weight + geo.record(block, 0)};
    for (std::int64_t part_end = part_bytes; walks[0].k < geo.k; part_end += part_bytes)
      for (std::int64_t block = begin; block < end; ++block) {
        Walk& w = walks[block - begin];
        float* const to = out + (block - begin) * sums;
        for (bool more = false, first = true; first || more; first = false) {
          // A chunk ahead: tiles cannot be loaded from stores that have not reached L1.
          if (first) fill(t, w, chunks[now]);
          more = w.left > 0 || (w.k < geo.k && w.scales < part_end);
          const std::byte* const codes = w.codes;
          if (more) fill(t, w, chunks[1 - now]);
          const std::int64_t bytes = w.codes - codes;
          Ahead ahead(w.codes + bytes, w.codes + 2 * bytes, tiles);
          for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
            const std::int64_t at = (m - m_begin) * kRows;
            ahead.prefetch();
            multiply_chunk(t, chunks[now], t.activations + m * t.token_bytes, static_cast<int>(least(t.m - m, t.tile)), kept + at,
                           to + at);
          }
          now = 1 - now;
        }
      }
    for (std::int64_t block = begin; block < end; ++block)
      for (std::int64_t m = m_begin; m < m_end; m += t.tile)
        t.outputs.store(out + (block - begin) * sums + (m - m_begin) * kRows, block, m, least(t.m - m, t.tile));
  }
}
