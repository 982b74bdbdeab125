// Included inside a namespace and a target region of AMX: the use of tile registers.

/// The operand of LDTILECFG: eight tiles of rows of 64 bytes, of which tmm0 to tmm5 may have less than 16. A product takes as many clocks as
/// tokens have rows.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  explicit TileConfig(std::int64_t of_tokens) {
    for (int tile = 0; tile < 6; ++tile) rows[tile] = static_cast<std::uint8_t>(of_tokens < 16 ? of_tokens : 16);
  }
};

/// A compiler barrier between stores and loads of tiles, in both directions: GCC assumes that the loads do not read memory.
inline void keep_order() { __asm__ volatile("" ::: "memory"); }

/// All products in tiles are while one of these exists. Afterwards tiles are as the thread had them: released, since a thread that leaves them in
/// use pays for 8 KiB of state at every context switch, or as another library has configured them, which may do so only once, as ggml does.
class Tiles {
 public:
  /// `tokens`: rows of the tiles of sums and of tokens, tmm0 to tmm5; more than 16 count as 16.
  explicit Tiles(std::int64_t tokens = 16) {
    _tile_storeconfig(before_);
    alignas(64) const TileConfig config(tokens);
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~Tiles() {
    keep_order();
    if (before_[0] == 0)  // its palette
      _tile_release();
    else
      _tile_loadconfig(before_);
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  alignas(64) std::uint8_t before_[sizeof(TileConfig)];
};
