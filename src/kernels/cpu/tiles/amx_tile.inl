// Included by the loops that multiply with tiles: 32 tokens × 32 output channels in four of the eight tile registers.
//
//                         tmm6: channels 0…15   tmm7: channels 16…31       16 quads of K each, 64 bytes a row
//   tmm4: tokens 0…15            tmm0                  tmm1                16 rows of 64 bytes of K
//   tmm5: tokens 16…31           tmm2                  tmm3
//
// A step is four loads and four products, of 8 clocks from L1 and of 16: the products never wait for L1. Tokens that are multiplied by what
// stays in L1 are loaded as a stream: they come from L2 anyway, and L1 keeps them no longer than it must.
#include "core/amx_tiles.inl"

constexpr int kTileRows = 16;          // tokens of a tile
constexpr int kTileBytes = 64;         // of a row
constexpr int kQuadBytes = 4 * kRows;  // from one row of tmm6 to the next

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/// out[32][R], or the first 16 rows of it. `both` is a constant at every call, here and below: whether there are more than 16 tokens.
NIBBLE_VARIANT void store_sums(bool both, void* out) {
  constexpr int kRowBytes = 4 * kRows;
  auto* to = static_cast<std::byte*>(out);
  _tile_stored(0, to, kRowBytes);
  _tile_stored(1, to + kTileBytes, kRowBytes);
  if (!both) return;
  _tile_stored(2, to + kTileRows * kRowBytes, kRowBytes);
  _tile_stored(3, to + kTileRows * kRowBytes + kTileBytes, kRowBytes);
}

/// The reverse.
NIBBLE_VARIANT void load_sums(bool both, const void* from) {
  constexpr int kRowBytes = 4 * kRows;
  const auto* at = static_cast<const std::byte*>(from);
  keep_order();
  _tile_loadd(0, at, kRowBytes);
  _tile_loadd(1, at + kTileBytes, kRowBytes);
  if (!both) return;
  _tile_loadd(2, at + kTileRows * kRowBytes, kRowBytes);
  _tile_loadd(3, at + kTileRows * kRowBytes + kTileBytes, kRowBytes);
}

/// Tokens that a prepared tile of `height` has room for.
inline std::int64_t room(std::int64_t height) { return (height + kTileRows - 1) / kTileRows * kTileRows; }
