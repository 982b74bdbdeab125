// Included by the loops that multiply bytes in tiles: signed activations by codes in place, or unpacked.
//
// An octet of 8-bit codes is two quads of 32 output channels, 128 bytes each: of every quad the first half is a row of tmm6, the second
// one of tmm7. Eight octets fill both in place, with rows 128 bytes apart:
//
//   octet 0   quad 0   n0 n1 … n15 | n16 … n31       row 0 of tmm6 | row 0 of tmm7
//             quad 1   n0 n1 … n15 | n16 … n31       row 1         | row 1
//   octet 1   quad 2   …
#include "kernels/cpu/tiles/amx_tile.inl"

constexpr int kStepOctets = kTileBytes / tile::kOctet;          // one product's channels of K, of bytes
constexpr int kStepBytes = kStepOctets * tile::kOctet * kRows;  // their 8-bit codes
constexpr std::int64_t kTaskBytes = std::int64_t{1} << 62;      // no limit: only chunks have to stay in a cache
constexpr std::int64_t kTaskTokens = 256;  // eight tiles; a chunk of weights takes as long to read as to multiply by 200

/// Adds signed bytes × codes of 64 channels; the tokens of tmm5 are `next` bytes after those of tmm4, each token `apart` from the one before.
/// `pass` is a constant at every call: whether tokens pass through L1 (amx_tile.inl).
NIBBLE_VARIANT void multiply_bytes(bool both, bool pass, const std::byte* a, std::int64_t apart, std::int64_t next,
                                   const std::byte* codes) {
  keep_order();
  _tile_loadd(6, codes, kQuadBytes);
  if (pass) {
    _tile_stream_loadd(4, a, apart);
    if (both) _tile_stream_loadd(5, a + next, apart);
  } else {
    _tile_loadd(4, a, apart);
    if (both) _tile_loadd(5, a + next, apart);
  }
  _tile_dpbsud(0, 4, 6);
  _tile_loadd(7, codes + kTileBytes, kQuadBytes);
  if (both) _tile_dpbsud(2, 5, 6);
  _tile_dpbsud(1, 4, 7);
  if (both) _tile_dpbsud(3, 5, 7);
  keep_order();
}

/// Unpacks `octets` octets to bytes in the order of 8-bit octets, with zeros up to a whole step. `bits` (4 or 8) is a constant at every
/// call.
NIBBLE_VARIANT void spread_octets(int bits, const std::byte* codes, std::int64_t octets, std::byte* panel) {
  for (std::int64_t o = 0; o < kStepOctets; ++o, codes += bits * kRows, panel += 2 * kQuadBytes)
    for (int v = 0; v < kVecs; ++v) {
      const Quads quads = o < octets ? load_quads(bits, codes, v) : Quads{};
      store_ints(panel + v * kTileBytes, quads.low);
      store_ints(panel + kQuadBytes + v * kTileBytes, quads.high);
    }
}

/// Bytes of a token.
inline std::int64_t row_bytes(std::int64_t octets) { return (octets + kStepOctets - 1) / kStepOctets * kTileBytes; }

/// Prefetches the group after row blocks [begin, end), up to `last`, while `tiles` tiles are multiplied by this one.
inline Ahead group_after(const tile::Geometry& geo, const std::byte* weight, std::int64_t begin, std::int64_t end,
                         std::int64_t last, std::int64_t tiles) {
  const std::int64_t steps = (end - begin) * tiles * (row_bytes(tile::Geometry::octets(geo.k)) / kTileBytes);
  return {weight + geo.record(end, 0), weight + geo.record(last, 0), steps};
}

/// Sums over `octets` octets of tokens in place. Codes of 8 bits are multiplied as they lie. Codes of 4 bits, a partial last step, and codes
/// that cross cache lines (loaded at half the speed) are unpacked into a panel in L1, a step ahead: the ports that unpack are idle while
/// tiles are multiplied.
template <class Rows>
NIBBLE_VARIANT void sum_steps(int bits, bool both, const std::byte* codes, Rows rows, std::int64_t octets, Ahead& ahead) {
  alignas(64) std::byte panel[2][kStepBytes];
  const std::int64_t steps = (octets + kStepOctets - 1) / kStepOctets;
  const bool lines = reinterpret_cast<std::uintptr_t>(codes) % kTileBytes == 0;
  const std::int64_t in_place = bits == 8 && lines ? octets / kStepOctets : 0;  // steps that are multiplied in place
  const std::int64_t step_bytes = kStepBytes * bits / 8;
  clear_sums();
  for (std::int64_t s = in_place == 0 ? -1 : 0; s < steps; ++s) {
    const std::int64_t then = s + 1;
    if (then >= in_place && then < steps)
      spread_octets(bits, codes + then * step_bytes, octets - then * kStepOctets, panel[then % 2]);
    ahead.prefetch();
    if (s < 0) continue;
    const std::byte* a = rows.step();
    multiply_bytes(both, false, a, rows.apart(), rows.next, s < in_place ? codes + s * step_bytes : panel[s % 2]);
  }
}
