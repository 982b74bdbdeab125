// The products of whole_tile.hpp in tiles of AMX, included by whole_tile.inl.
//
//   a chunk of a row block: 16 steps of 64 channels, 32 KiB that stay in L1     a tile of 32 tokens: 32 KiB, from L2
//     step 0   16 quads × { n0 … n15 │ n16 … n31 }                                step 0   16 rows of 64 channels │ 16 rows
//     step 1   …                                                                  step 1   …
//
//   sums[32][32] += rows × codes      loaded into four tile registers before the steps and stored behind them
//
// A step of four products of 16 clocks has four loads, two of them from L2: 70 clocks. Over all of K at once all four would be from L2, and a
// step would take 100. Storing and loading the sums takes some 250 clocks a chunk, which shorter chunks repeat; longer ones do not fit L1.
// Tokens pass through L1 (amx_tile.inl), but for those of a single tile, which goes over all of K.

/// sums[32][R], or the first 16 rows, += the products of `steps` steps; the first chunk's begin at 0. `codes` are 8-bit octets on cache
/// lines. `both` and `pass` are constants at every call.
NIBBLE_VARIANT void add_steps(bool both, bool pass, bool first, const std::byte* a, std::int64_t next, const std::byte* codes,
                              std::int64_t steps, Ahead& ahead, std::int32_t* sums) {
  first ? clear_sums() : load_sums(both, sums);
  for (std::int64_t s = 0; s < steps; ++s, a += kTileRows * kTileBytes, codes += kStepBytes) {
    ahead.prefetch();
    multiply_bytes(both, pass, a, kTileBytes, next, codes);
  }
  store_sums(both, sums);
}

/// The octets of a chunk as tiles are loaded from them.
struct ChunkCodes {
  alignas(64) std::byte panel[kChunkOctets / kStepOctets * kStepBytes];

  /// Whether of() changes nothing, wherever octets begin.
  static bool in_place(const tile::Geometry& geo, const std::byte* weight) {
    const bool lines = (reinterpret_cast<std::uintptr_t>(weight) | geo.header_bytes | geo.row_block_bytes) % kTileBytes == 0;
    return geo.bits == 8 && lines && tile::Geometry::octets(geo.k) % kStepOctets == 0;
  }
  /// Codes of 4 bits, a partial last step, and codes that cross cache lines (loaded at half the speed) are unpacked, once for all tokens.
  const std::byte* of(const tile::Geometry& geo, const std::byte* codes, std::int64_t octets) {
    const bool lines = reinterpret_cast<std::uintptr_t>(codes) % kTileBytes == 0;
    if (geo.bits == 8 && lines && octets % kStepOctets == 0) return codes;
    std::byte* to = panel;
    for (std::int64_t o = 0; o < octets; o += kStepOctets, to += kStepBytes) {
      const std::byte* const from = codes + o * geo.octet_bytes;
      geo.bits == 4 ? spread_octets(4, from, octets - o, to) : spread_octets(8, from, octets - o, to);
    }
    return panel;
  }
};

/// The prefetches of a chunk.
inline std::int64_t prefetches(std::int64_t octets) { return (octets + kStepOctets - 1) / kStepOctets; }

/// sums[height][R] += Σ q·code of octets [begin, begin + octets) of `all`; `tokens` are those of a prepared tile.
__attribute__((noinline)) void add_chunk(int height, const Decoder&, const std::byte* codes, const std::byte* tokens,
                                         std::int64_t begin, std::int64_t octets, std::int64_t all, Ahead& ahead,
                                         std::int32_t* sums) {
  const std::int64_t steps = (octets + kStepOctets - 1) / kStepOctets;
  const std::byte* const a = tokens + begin / kStepOctets * kTileRows * kTileBytes;
  const std::int64_t next = row_bytes(all) * kTileRows;
  if (octets > kChunkOctets)  // a single tile
    height > kTileRows ? add_steps(true, false, begin == 0, a, next, codes, steps, ahead, sums)
                       : add_steps(false, false, begin == 0, a, next, codes, steps, ahead, sums);
  else
    height > kTileRows ? add_steps(true, true, begin == 0, a, next, codes, steps, ahead, sums)
                       : add_steps(false, true, begin == 0, a, next, codes, steps, ahead, sums);
}
