// The loops of bf16_tile.hpp in tiles of AMX, included by bf16_tile.inl.
//
//   for each group of up to 16 row blocks, for each part of K             a part's rows of all tokens stay in L2
//     for each pair of row blocks, for each segment                       short segments: for each 64 tokens, whose sums stay in L1
//       codes → two panels                                                in L1; once for all tokens
//       for each 16 tokens
//         rows × panels → acc                                             tile registers → L1
//         sum += s ∘ acc, also times the scales of tokens, of the 16 before
//
//   tmm4: 16 tokens           tmm0   tmm1        tmm2   tmm3              32 channels of K a step
//                             first row block    second row block         their panels pass through tmm6 and tmm7
//
// An activation is a sum of 1, 2 or 3 bf16 terms (prepare.hpp), whose rows follow each other and are multiplied by the same panel. Sixteen
// tokens by 64 output channels load 1 KiB of activations for four products, half of what 32 by 32 would: they come from L2, panels from L1.
#include "kernels/cpu/tiles/amx_tile.inl"

constexpr int kTile = 2 * kTileRows;        // tokens of a prepared tile
constexpr int kStepPairs = kTileBytes / 4;  // of one product; a row of the panel is one of both tiles of channels
constexpr int kTogether = 2;                // row blocks
/// Row blocks that a part of the activations is multiplied by, and the bytes of such a part: with the sums, 512 KiB, a little more than half
/// of an L2 of 2 MiB.
constexpr std::int64_t kGroupBlocks = 16, kPartBytes = 640 << 10;
/// Tokens that a pair of row blocks is multiplied by in segments of one step, whose sums are loaded and stored as often as tiles are: 16 KiB of
/// sums stay in L1, which is worth decoding once more for the next ones.
constexpr std::int64_t kShortTokens = 64;

inline std::int64_t steps_of(std::int64_t octets) { return (4 * octets + kStepPairs - 1) / kStepPairs; }

/// A segment of a pair of row blocks.
struct Segment {
  Header headers[kTogether];
  const std::byte* panels[kTogether];
  std::int64_t steps;
};

/// Sums of 16 tokens that are to be scaled.
struct Unit {
  alignas(64) float acc[kTogether][kTileRows * kRows];
  const Header* headers = nullptr;  // of their segment; null: there are none
  const float* tokens;              // their scales, or null
  float* sums;                      // of the first row block
  std::int64_t height;
};

/// sum[begin … end)[R] += scale ∘ acc of a row block, also times the scales of tokens. `tokens` (there are some) is a constant at every call.
NIBBLE_VARIANT void scale_block(bool tokens, int block, const Unit& unit, std::int64_t begin, std::int64_t end) {
  const float* const of_tokens = unit.tokens;
  Vec scale[kVecs];
  for (int v = 0; v < kVecs; ++v) scale[v] = unit.headers[block].scale[v];
  const float* acc = unit.acc[block] + begin * kRows;
  float* sums = unit.sums + block * kTokens * kRows + begin * kRows;
  for (std::int64_t m = begin; m < end; ++m, acc += kRows, sums += kRows)
    for (int v = 0; v < kVecs; ++v) {
      const Vec x = load(acc + v * kLanes) * (tokens ? scale[v] * of_tokens[m] : scale[v]);
      store(sums + v * kLanes, load(sums + v * kLanes) + x);
    }
}
/// Rows [begin, end) of a unit: 16 of the first row block, then 16 of the second. `blocks` is a constant at every call.
NIBBLE_VARIANT void scale_rows(int blocks, const Unit& unit, std::int64_t begin, std::int64_t end) {
  for (int b = 0; b < blocks; ++b, begin -= kTileRows, end -= kTileRows) {
    const std::int64_t first = begin > 0 ? begin : 0, last = least(end, unit.height);
    if (first >= last) continue;
    unit.tokens != nullptr ? scale_block(true, b, unit, first, last) : scale_block(false, b, unit, first, last);
  }
}
/// Rows that are scaled after each of `steps` steps.
inline std::int64_t share_of(int blocks, std::int64_t steps) { return (blocks * kTileRows + steps - 1) / steps; }

/// Adds one term of 16 tokens × 32 channels, of the first row block and of the second.
inline void multiply_first(const std::byte* a, const std::byte* panel) {
  keep_order();
  _tile_stream_loadd(4, a, kTileBytes);
  _tile_loadd(6, panel, kQuadBytes);
  _tile_loadd(7, panel + kTileBytes, kQuadBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  keep_order();
}
inline void multiply_second(const std::byte* panel) {
  keep_order();
  _tile_loadd(6, panel, kQuadBytes);
  _tile_loadd(7, panel + kTileBytes, kQuadBytes);
  _tile_dpbf16ps(2, 4, 6);
  _tile_dpbf16ps(3, 4, 7);
  keep_order();
}

/// unit.acc = the sums of a row block.
NIBBLE_VARIANT void store_block(int block, Unit& unit) {
  constexpr int kAccBytes = 4 * kRows;
  keep_order();
  if (block == 0) {
    _tile_stored(0, unit.acc[0], kAccBytes);
    _tile_stored(1, unit.acc[0] + kLanes, kAccBytes);
  } else {
    _tile_stored(2, unit.acc[1], kAccBytes);
    _tile_stored(3, unit.acc[1] + kLanes, kAccBytes);
  }
  keep_order();
}

/// unit.acc = A'[16] · panels, but for the second row block, whose sums remain in their tiles. Those of the unit before are stored, and all of
/// it is scaled. `blocks` is a constant at every call.
NIBBLE_VARIANT void multiply_unit(int blocks, const Segment& segment, const std::byte* a, int terms, Unit& unit, Unit& before,
                                  Ahead* ahead) {
  const std::int64_t steps = segment.steps, share = before.headers == nullptr ? 0 : share_of(blocks, steps);
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t s = 0; s < steps; ++s) {
    const std::int64_t panel = s * kStepPairs * kQuadBytes;
    for (int i = 0; i < terms; ++i, a += kTileRows * kTileBytes) {
      multiply_first(a, segment.panels[0] + panel);
      if (blocks == 1) continue;
      if (s == 0 && i == 0) {
        if (before.headers != nullptr) store_block(1, before);
        _tile_zero(2);
        _tile_zero(3);
      }
      multiply_second(segment.panels[1] + panel);
    }
    for (int b = 0; b < blocks; ++b) ahead[b].prefetch();
    if (share != 0) scale_rows(blocks, before, s * share, (s + 1) * share);
  }
  store_block(0, unit);
}

/// The sums of tokens [m_begin, m_end) of a pair of row blocks, or of the last one alone, over segments [k, k_end). `units` and `segments` take
/// turns. `blocks` is a constant at every call.
NIBBLE_VARIANT void multiply_blocks(int blocks, const DotTask& t, const Lookup& lookup, std::int64_t block, std::int64_t k,
                                    std::int64_t k_end, std::int64_t offset, std::int64_t m_begin, std::int64_t m_end,
                                    float* sums) {
  const Decoder& d = *t.decoder;
  alignas(64) Ints panels[kTogether][kSegment / 2 * kVecs];
  Unit units[2];
  Segment segments[2];
  const std::int64_t units_of_tokens = (m_end - m_begin + kTileRows - 1) / kTileRows;
  int now = 0, segment_now = 0;
  while (k < k_end) {
    const std::int64_t end = t.segments.end(k), octets = tile::Geometry::octets(end - k);
    Segment& segment = segments[segment_now];
    segment.steps = steps_of(octets);
    Ahead ahead[kTogether];  // as many bytes as the segment has, behind it
    for (int b = 0; b < blocks; ++b) {
      const std::int64_t bytes = octets * d.geometry.octet_bytes;
      const std::byte* const behind = codes_at(d.geometry, t.weight, block + b, k) + bytes;
      ahead[b] = Ahead(behind, behind + bytes + d.geometry.header_bytes, units_of_tokens * segment.steps);
      segment.panels[b] =
          fill(d, lookup, t.weight, block + b, k, octets, segment.steps * kStepPairs, segment.headers[b], panels[b]);
    }
    for (std::int64_t m = m_begin; m < m_end; m += kTileRows) {
      const std::int64_t tile = m / kTile * kTile, tokens = room(least(t.m - tile, kTile)), half = m % kTile / kTileRows;
      const std::byte* const at = t.activations + tile * t.token_bytes + offset * tokens;
      const std::byte* const rows = at + t.segment_header * tokens + half * segment.steps * t.terms * kTileRows * kTileBytes;
      Unit& unit = units[now];
      multiply_unit(blocks, segment, rows, t.terms, unit, units[1 - now], ahead);
      unit.headers = segment.headers;
      unit.tokens = t.segment_header == 0 ? nullptr : token_scales(t, at) + half * kTileRows;
      unit.sums = sums + (m - m_begin) * kRows;
      unit.height = least(m_end - m, kTileRows);
      units[1 - now].headers = nullptr;
      now = 1 - now;
    }
    offset += t.segment_header + segment.steps * t.terms * kTileBytes;
    segment_now = 1 - segment_now;
    k = end;
  }
  if (blocks > 1) store_block(1, units[1 - now]);
  scale_rows(blocks, units[1 - now], 0, blocks * kTileRows);
}

/// Row blocks that a single unit of tokens is multiplied by: their next 32 channels are decoded while these are multiplied.
struct Stream {
  const Decoder* decoder;
  const Lookup* lookup;
  const DotTask* task;
  std::int64_t block;
  std::int64_t k = 0, end = 0;  // the next channel, and where its segment ends
  const std::byte* codes[kTogether];
  Header headers[2][kTogether];  // of the segment that was begun last, and of the one before it
  int now = 0;

  Stream(const DotTask& t, const Lookup& of, std::int64_t first) : decoder(t.decoder), lookup(&of), task(&t), block(first) {}
};

/// panel[blocks][pairs of a step][R] of the next 32 channels, zeros behind the last of a segment. `blocks` is a constant at every call.
NIBBLE_VARIANT void decode_step(int blocks, Stream& s, Ints (*panel)[kStepPairs * kVecs]) {
  const tile::Geometry& geo = s.decoder->geometry;
  if (s.k == s.end) {
    s.end = s.task->segments.end(s.k);
    s.now = 1 - s.now;
    for (int b = 0; b < blocks; ++b) {
      read_header(*s.decoder, *s.lookup, s.task->weight + geo.record(s.block + b, s.k / geo.group), s.headers[s.now][b]);
      s.codes[b] = codes_at(geo, s.task->weight, s.block + b, s.k);
    }
  }
  const std::int64_t channels = least(s.end - s.k, 2 * kStepPairs), octets = tile::Geometry::octets(channels);
  for (int b = 0; b < blocks; ++b) {
    decode_octets(true, *s.decoder, *s.lookup, s.headers[s.now][b], s.codes[b], octets, kStepPairs, panel[b]);
    s.codes[b] += octets * geo.octet_bytes;
  }
  s.k += channels;
}
// Not inlined: each would be copied to both places that call it.
__attribute__((noinline)) void decode_pair(Stream& s, Ints (*panel)[kStepPairs * kVecs]) { decode_step(2, s, panel); }
__attribute__((noinline)) void decode_one(Stream& s, Ints (*panel)[kStepPairs * kVecs]) { decode_step(1, s, panel); }

/// multiply_blocks() of up to 16 tokens over all of K. A panel is used once, so that it is one of a step; two take turns, and so do units.
/// `blocks` is a constant at every call.
NIBBLE_VARIANT void stream_blocks(int blocks, const DotTask& t, const Lookup& lookup, std::int64_t block, std::int64_t m,
                                  std::int64_t height, float* sums) {
  alignas(64) Ints panels[2][kTogether][kStepPairs * kVecs];
  Unit units[2];
  const std::int64_t tile = m / kTile * kTile, tokens = room(least(t.m - tile, kTile)), half = m % kTile / kTileRows;
  const std::byte* at = t.activations + tile * t.token_bytes;
  Stream stream(t, lookup, block);
  const auto decode = [&](Ints(*panel)[kStepPairs * kVecs]) {
    blocks == 2 ? decode_pair(stream, panel) : decode_one(stream, panel);
  };
  int now = 0, panel = 0;
  decode(panels[panel]);
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    const std::int64_t steps = steps_of(tile::Geometry::octets(end - k));
    const std::byte* a = at + t.segment_header * tokens + half * steps * t.terms * kTileRows * kTileBytes;
    const Unit& before = units[1 - now];
    const std::int64_t share = before.headers == nullptr ? 0 : share_of(blocks, steps);
    Unit& unit = units[now];
    unit.headers = stream.headers[stream.now];
    clear_sums();
    for (std::int64_t step = 0; step < steps; ++step, panel = 1 - panel) {
      const auto* const first = reinterpret_cast<const std::byte*>(panels[panel][0]);
      const auto* const second = reinterpret_cast<const std::byte*>(panels[panel][blocks - 1]);
      for (int i = 0; i < t.terms; ++i, a += kTileRows * kTileBytes) {
        multiply_first(a, first);
        if (blocks > 1) multiply_second(second);
      }
      if (share != 0) scale_rows(blocks, before, step * share, (step + 1) * share);
      if (stream.k < t.segments.k) decode(panels[1 - panel]);
    }
    for (int b = 0; b < blocks; ++b) store_block(b, unit);
    unit.tokens = t.segment_header == 0 ? nullptr : token_scales(t, at) + half * kTileRows;
    unit.sums = sums;
    unit.height = height;
    at += (t.segment_header + steps * t.terms * kTileBytes) * tokens;
    now = 1 - now;
  }
  scale_rows(blocks, units[1 - now], 0, blocks * kTileRows);
}

/// linear() of up to 16 tokens of a weight that is decoded.
void linear_streams(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m, std::int64_t height) {
  const Lookup lookup(*t.decoder);
  alignas(64) float sums[kTogether][kTokens * kRows];
  const Tiles tiles(height);
  for (std::int64_t block = block_begin; block < block_end; block += kTogether) {
    const int blocks = static_cast<int>(least(block_end - block, kTogether));
    for (int b = 0; b < blocks; ++b) std::memset(sums[b], 0, static_cast<std::size_t>(height) * kRows * sizeof(float));
    blocks == 2 ? stream_blocks(2, t, lookup, block, m, height, sums[0]) : stream_blocks(1, t, lookup, block, m, height, sums[0]);
    for (int b = 0; b < blocks; ++b) t.outputs.store(sums[b], block + b, m, height);
  }
}

void linear(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin) {
  const std::int64_t m_end = m_begin + kTokens < t.m ? m_begin + kTokens : t.m;
  if (m_end - m_begin <= kTileRows && t.decoder->floats == DType::none)
    return linear_streams(t, block_begin, block_end, m_begin, m_end - m_begin);
  const std::int64_t part_bytes = kPartBytes / (m_end - m_begin);
  const std::int64_t pass = steps_of(tile::Geometry::octets(t.segments.end(0))) == 1 ? kShortTokens : kTokens;
  const Lookup lookup(*t.decoder);
  alignas(64) float sums[kGroupBlocks][kTokens * kRows];
  const Tiles tiles(m_end - m_begin);
  for (std::int64_t begin = block_begin, end = 0; begin < block_end; begin = end) {
    end = least(begin + kGroupBlocks, block_end);
    for (std::int64_t i = 0; i < end - begin; ++i)
      std::memset(sums[i], 0, static_cast<std::size_t>(m_end - m_begin) * kRows * sizeof(float));
    std::int64_t offset = 0;
    for (std::int64_t k = 0, k_end = 0; k < t.segments.k; k = k_end) {
      std::int64_t bytes = 0;
      for (k_end = k; k_end < t.segments.k && bytes < part_bytes;) {
        const std::int64_t next = t.segments.end(k_end);
        bytes += t.segment_header + steps_of(tile::Geometry::octets(next - k_end)) * t.terms * kTileBytes;
        k_end = next;
      }
      for (std::int64_t block = begin; block < end; block += kTogether)
        for (std::int64_t m = m_begin; m < m_end; m += pass) {
          const std::int64_t pass_end = least(m + pass, m_end);
          float* const to = sums[block - begin] + (m - m_begin) * kRows;
          block + 1 < end ? multiply_blocks(2, t, lookup, block, k, k_end, offset, m, pass_end, to)
                          : multiply_blocks(1, t, lookup, block, k, k_end, offset, m, pass_end, to);
        }
      offset += bytes;
    }
    for (std::int64_t block = begin; block < end; ++block) t.outputs.store(sums[block - begin], block, m_begin, m_end - m_begin);
  }
}
