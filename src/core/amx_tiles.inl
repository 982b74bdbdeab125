// Included inside a namespace and a target region of AMX: setting tile registers up and giving them back. Everything that multiplies with
// them is between begin_tiles() and end_tiles(): a thread that leaves tiles in use pays for 8 KiB of state at every switch.

/// What LDTILECFG reads: eight tiles of 16 rows of 64 bytes.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

/// Stores before it are done when tiles are loaded after it, and the other way round: GCC takes the loads not to read memory.
inline void keep_order() { __asm__ volatile("" ::: "memory"); }

inline void begin_tiles() {
  alignas(64) const TileConfig config;
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void end_tiles() { _tile_release(); }
