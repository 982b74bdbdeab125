// Included inside a namespace and a target region of AMX: setting tile registers up and releasing them. All products in tiles are between
// begin_tiles() and end_tiles(): a thread that leaves tiles in use pays for 8 KiB of state at every context switch.

/// The operand of LDTILECFG: eight tiles of 16 rows of 64 bytes.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// A compiler barrier between stores and loads of tiles, in both directions: GCC assumes that the loads do not read memory.
inline void keep_order() { __asm__ volatile("" ::: "memory"); }

inline void begin_tiles() {
  alignas(64) const TileConfig config;
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void end_tiles() { _tile_release(); }
