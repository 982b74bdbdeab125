// The int8 loops of dot_tile.hpp in tiles of AMX, included by dot_tile.inl. Per segment, 32 tokens × 32 channels of integer sums go through
// L1 to the vector registers that scale them, while the next segment is multiplied: the two do not depend on each other.
#include "kernels/cpu/tiles/amx_bytes.inl"

constexpr int kInt8Tile = 2 * kTileRows;

/// A segment whose products are complete or in flight.
struct Segment {
  alignas(64) std::int32_t acc[kInt8Tile * kRows];
  GroupHeader header;
  const std::byte* a;  // its prepared tile: scales, sums and initial sums of the tokens, then their rows
};

/// sum[height][R] += scale_m · s ∘ (start + acc − z ∘ Σa)
void add_segment(const Segment& s, int height, const Decoder& d, float* sum) {
  const auto* scales = reinterpret_cast<const float*>(s.a);
  const float* sums = scales + room(height);
  const std::byte* starts = s.a + 8 * room(height);
  const bool subtracts = d.zero == ZeroKind::integer || d.zero == ZeroKind::real;
  for (int m = 0; m < height; ++m)
    for (int v = 0; v < kVecs; ++v) {
      float* to = sum + m * kRows + v * kLanes;
      Vec dot = to_floats(load_ints(s.acc + m * kRows + v * kLanes) + load_splat(starts + 4 * m));
      if (subtracts) dot -= s.header.zero[v] * splat_at(sums + m);
      Vec more = load(to) + (dot * splat_at(scales + m)) * s.header.scale[v];
      if (d.zero == ZeroKind::offset) more += (splat_at(sums + m) * splat_at(scales + m)) * s.header.offset[v];
      store(to, more);
    }
}

/// sum[height][R] of one row block over all of K. `bits` (4 or 8) and `both` are constants at every call.
NIBBLE_VARIANT void multiply_segments(int bits, bool both, const DotTask& t, const std::byte* codes, const std::byte* a,
                                      int height, Ahead& ahead, float* sum) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  Segment segments[2];
  for (int i = 0; i < height * kRows; i += kLanes) store(sum + i, Vec{});
  std::int64_t group_left = 0, unit_left = 0, count = 0;
  for (std::int64_t k = 0, length = 0; k < geo.k; k += length, ++count) {
    Segment& now = segments[count % 2];
    const Segment& before = segments[(count + 1) % 2];
    if (group_left == 0) {
      group_left = least(geo.group, geo.k - k);
      read_group_header(d, codes, now.header);
      codes += geo.header_bytes;
    } else {
      now.header = before.header;
    }
    if (unit_left == 0) unit_left = least(t.segments.unit, group_left);
    length = least(t.segments.piece, unit_left);
    group_left -= length;
    unit_left -= length;
    const std::int64_t octets = tile::Geometry::octets(length);
    now.a = a;
    sum_steps(bits, both, codes, a + 12 * room(height), octets, ahead);
    store_sums(both, now.acc);
    if (count > 0) add_segment(before, height, d, sum);
    codes += octets * geo.octet_bytes;
    a += (12 + row_bytes(octets)) * room(height);
  }
  add_segment(segments[(count + 1) % 2], height, d, sum);
}

__attribute__((noinline)) void multiply_any(const DotTask& t, const std::byte* codes, const std::byte* a, int height,
                                            Ahead& ahead, float* sum) {
  const bool both = height > kTileRows;
  if (t.decoder->geometry.bits == 4) {
    both ? multiply_segments(4, true, t, codes, a, height, ahead, sum)
         : multiply_segments(4, false, t, codes, a, height, ahead, sum);
  } else {
    both ? multiply_segments(8, true, t, codes, a, height, ahead, sum)
         : multiply_segments(8, false, t, codes, a, height, ahead, sum);
  }
}

/// Groups of row blocks outside, then tiles of tokens, as in whole_tile.inl.
void linear_int8(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin, std::int64_t m_end) {
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t group = group_blocks(geo, block_end - block_begin), tiles = (m_end - m_begin + t.tile - 1) / t.tile;
  alignas(64) float sum[kInt8Tile * kRows];
  begin_tiles();
  for (std::int64_t begin = block_begin, end = 0; begin < block_end; begin = end) {
    end = least(begin + group, block_end);
    Ahead ahead = group_after(geo, t.weight, begin, end, least(end + group, block_end), tiles);
    for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
      const auto height = static_cast<int>(least(t.m - m, t.tile));
      for (std::int64_t block = begin; block < end; ++block) {
        multiply_any(t, t.weight + geo.record(block, 0), t.activations + m * t.token_bytes, height, ahead, sum);
        t.outputs.store(sum, block, m, height);
      }
    }
  }
  end_tiles();
}
