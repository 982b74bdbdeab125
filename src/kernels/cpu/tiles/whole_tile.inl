// Included once per instruction set by whole_tile.cpp. See whole_tile.hpp for the algorithm.
// The levels of bf16 use the dot products of the level below.
#if NIBBLE_ISA != NIBBLE_ISA_AVX512BF16 && NIBBLE_ISA != NIBBLE_ISA_NEONBF16

// Tokens per register tile: H·kVecs sums, the codes of a quad of channels and a broadcast.
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512VNNI
constexpr int kTile = 12;  // 24 of 32
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
constexpr int kTile = 6;  // 12 of 16
#elif NIBBLE_ISA == NIBBLE_ISA_AMX
constexpr int kTile = 32;  // in tile registers: amx_tile.inl
#elif NIBBLE_ISA == NIBBLE_ISA_I8MM
#include "kernels/cpu/tiles/row_pairs.inl"
constexpr int kTile = kPairRows;
#else
constexpr int kTile = 4;  // 16 of 32 on AArch64; 8 of 16 on AVX2, whose dot products need registers in between
#endif

/// Whether bytes are multiplied as 16-bit integers.
#define NIBBLE_WIDENS (NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512)

/// The sums of a group of row blocks, on the stack. With a chunk of the activations, which comes from L3 or memory once per group, and the
/// chunks of weights they are in L2 together.
constexpr std::int64_t kGroupBytes = 128 << 10;
/// Activations of so many bytes, half of L2, stay there for all row blocks: these are multiplied one by one, so that the weight is read in
/// one run, not a chunk here and a chunk there. In vectors, which read slower, that makes no difference.
constexpr std::int64_t kResidentBytes = NIBBLE_ISA == NIBBLE_ISA_AMX ? 1 << 20 : 0;
/// How far ahead of its products one tile prefetches that run into L2, on Intel's: 8 to 64 KiB are the same, a row block is too far.
constexpr std::int64_t kRunAhead = 16 << 10;

/// Tiles from this height on prefetch by themselves.
constexpr int kPrefetchRows = 6;

/// Octets of a chunk of K, 512 channels: the weights of a row block and the tokens of a tile stay in L1 together, 22 KiB. On AMX 1,024: the
/// weights alone stay there, 32 KiB.
constexpr std::int64_t kChunkOctets = NIBBLE_ISA == NIBBLE_ISA_AMX ? 128 : 64;

#if NIBBLE_ISA == NIBBLE_ISA_AMX
#include "kernels/cpu/tiles/amx_bytes.inl"
#include "kernels/cpu/tiles/amx_whole.inl"

/// The tokens of a tile in gathered pixels: evenly spaced, each with the runs of its patch, of a multiple of 64 channels.
struct PixelRows {
  const Patches* p;
  const std::byte* first;
  std::int64_t next;
  std::int64_t h = 0, w = 0, at = 0;  // the run, and the offset in it
  std::int64_t apart() const { return p->beside; }
  const std::byte* step() {
    const std::byte* from = first + h * p->run_down + w * p->run_beside + at;
    if ((at += kTileBytes) == p->run_bytes) {
      at = 0;
      if (++w == p->runs_w) w = 0, ++h;
    }
    return from;
  }
};

/// out[32][R], or the first 16 rows, = Σ a·code of tokens in place.
__attribute__((noinline)) void sum_pixel_tile(bool both, const Decoder& d, const std::byte* codes, const PixelRows& rows,
                                              Ahead& ahead, std::int32_t* out) {
  const std::int64_t octets = tile::Geometry::octets(d.geometry.k);
  if (d.geometry.bits == 4) {
    both ? sum_steps(4, true, codes, rows, octets, ahead) : sum_steps(4, false, codes, rows, octets, ahead);
  } else {
    both ? sum_steps(8, true, codes, rows, octets, ahead) : sum_steps(8, false, codes, rows, octets, ahead);
  }
  store_sums(both, out);
}
#else
inline std::int64_t room(std::int64_t height) { return height; }
inline std::int64_t row_bytes(std::int64_t octets) { return tile::kOctet * octets; }
struct Tiles {
  explicit Tiles(std::int64_t) {}
};

#include "kernels/cpu/tiles/streams.inl"

/// How far they do; see dot_tile.inl.
constexpr std::ptrdiff_t kPrefetchBytes = 2048;

/// The next weights are prefetched this often, and at the end of a run or a chunk.
constexpr std::int64_t kPrefetchOctets = 16;

/// acc[height][R] += quad of every token · codes. Tokens are `step` bytes apart: groups of three share a base register, as the addressing
/// modes allow.
NIBBLE_VARIANT void add_quad(int height, const std::byte* a, std::int64_t step, const Ints* w, int bits, Ints (*acc)[kVecs]) {
  for (int r = 0; r < height; ++r) {
    const Ints quad = load_splat(a + r * step);
    for (int v = 0; v < kVecs; ++v) acc[r][v] = dot4(acc[r][v], w[v], quad, bits);
  }
}

/// acc[height][R] += Σ q·code over `octets` octets: quad q of token r is at a + r·step + q·quad. `bits` (4 or 8) and `height` are
/// constants at every call, and for prepared activations so are `step` and `quad`.
NIBBLE_VARIANT void add_octets(int bits, int height, const std::byte*& codes, const std::byte* a, std::int64_t step,
                               std::int64_t quad, std::int64_t octets, Ahead* ahead, Ints (*acc)[kVecs], Ints (*more)[kVecs]) {
  const bool apart = height * kVecs <= 6;  // few sums do not hide the latency of a dot product: use two sets
  constexpr int kLine = 64;
  const Ints flip = splat(static_cast<std::int32_t>(kByteBias * 0x01010101u));
  const int octet_bytes = bits * kRows;
  for (; octets > 0; --octets, codes += octet_bytes, a += 2 * quad) {
    Ints low[kVecs], high[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const Quads quads = load_quads(bits, codes, v);
      low[v] = bits == 4 ? quads.low : quads.low ^ flip;
      high[v] = bits == 4 ? quads.high : quads.high ^ flip;
    }
    for (int line = 0; height >= kPrefetchRows && line < octet_bytes; line += kLine)
      __builtin_prefetch(codes + kPrefetchBytes + line);
    if (ahead != nullptr && octets % kPrefetchOctets == 1) ahead->prefetch();
    add_quad(height, a, step, low, bits, acc);
    add_quad(height, a + quad, step, high, bits, apart ? more : acc);
  }
}

#if NIBBLE_ISA == NIBBLE_ISA_I8MM
/// add_octets() in pairs of tokens, of the pass over the vectors from `begin` on; the first one prefetches.
NIBBLE_VARIANT void add_pairs(int bits, int height, int begin, const std::byte*& codes, const std::byte* a, std::int64_t step,
                              std::int64_t quad, std::int64_t octets, Ahead& ahead, Ints (*squares)[2 * kVecs]) {
  constexpr int kLine = 64;
  const int octet_bytes = bits * kRows;
  for (; octets > 0; --octets, codes += octet_bytes, a += 2 * quad) {
    Ints pairs[2 * kVecs];
    for (int v = 0; v < pass_vecs(height); ++v) pairs_of_codes(load_quads(bits, codes, begin + v), pairs + 2 * v);
    for (int line = 0; begin == 0 && height >= kPrefetchRows && line < octet_bytes; line += kLine)
      __builtin_prefetch(codes + kPrefetchBytes + line);
    if (begin == 0 && octets % kPrefetchOctets == 1) ahead.prefetch();
    multiply_octet(height, pairs, a, step, quad, squares);
  }
}

/// add() and sum_runs() in pairs of tokens: sums[height][R] += Σ q·code over the runs of patches, or, without, over `octets` octets.
/// `starts`: the initial sums of tokens; null: those in `sums`, or 0 in the first chunk.
NIBBLE_VARIANT void add_in_pairs(int bits, int height, bool first, const std::byte* codes, const std::byte* a, const Patches* p,
                                 const std::int32_t* starts, std::int64_t octets, Ahead& next, std::int32_t* sums) {
  Ahead ahead = next;  // in registers
  for (int begin = 0; begin < kVecs; begin += pass_vecs(height)) {
    Ints rows[kTile][kVecs], squares[kMostPairs][2 * kVecs];
    for (int r = 0; r < height; ++r)
      for (int v = begin; v < begin + pass_vecs(height); ++v)
        rows[r][v] = starts != nullptr ? splat(starts[r]) : first ? Ints{} : load_ints(sums + r * kRows + v * kLanes);
    squares_of(height, begin, rows, squares);
    const std::byte* octet = codes;
    if (p == nullptr) add_pairs(bits, height, begin, octet, a, 4, 4 * height, octets, ahead, squares);
    for (std::int64_t h = 0; p != nullptr && h < p->runs_h; ++h)
      for (std::int64_t w = 0; w < p->runs_w; ++w)
        add_pairs(bits, height, begin, octet, a + h * p->run_down + w * p->run_beside, p->beside, 4, p->run_bytes / tile::kOctet,
                  ahead, squares);
    rows_of(height, begin, squares, rows);
    for (int r = 0; r < height; ++r)
      for (int v = begin; v < begin + pass_vecs(height); ++v) store_ints(sums + r * kRows + v * kLanes, rows[r][v]);
  }
  next = ahead;
}
#endif

/// sums[height][R] += Σ q·code over `octets` octets; the first chunk's begin at 0. `bits` and `height` are constants at every call.
NIBBLE_VARIANT void add(int bits, int height, bool first, const std::byte* codes, const std::byte* a, std::int64_t octets,
                        Ahead& next, std::int32_t* sums) {
#if NIBBLE_ISA == NIBBLE_ISA_I8MM
  if (in_pairs(height)) return add_in_pairs(bits, height, first, codes, a, nullptr, nullptr, octets, next, sums);
#endif
  Ahead ahead = next;  // in registers
  const bool apart = height * kVecs <= 6;
  Ints acc[kTile][kVecs], more[kTile][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = first ? Ints{} : load_ints(sums + r * kRows + v * kLanes);
      more[r][v] = Ints{};
    }
  add_octets(bits, height, codes, a, 4, 4 * height, octets, &ahead, acc, more);
  next = ahead;
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) store_ints(sums + r * kRows + v * kLanes, apart ? acc[r][v] + more[r][v] : acc[r][v]);
}

/// out[height][R] = start + Σ q·code for patches, run by run; `a` is the first token's patch, `starts` are the initial sums of the tokens.
NIBBLE_VARIANT void sum_runs(int bits, int height, const std::byte* codes, const std::byte* a, const Patches& p,
                             const std::int32_t* starts, Ahead& next, std::int32_t* out) {
#if NIBBLE_ISA == NIBBLE_ISA_I8MM
  if (in_pairs(height)) return add_in_pairs(bits, height, false, codes, a, &p, starts, 0, next, out);
#endif
  Ahead ahead = next;  // in registers
  const bool apart = height * kVecs <= 6;
  Ints acc[kTile][kVecs], more[kTile][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = splat(starts[r]);
      more[r][v] = Ints{};
    }
  for (std::int64_t h = 0; h < p.runs_h; ++h)
    for (std::int64_t w = 0; w < p.runs_w; ++w)
      add_octets(bits, height, codes, a + h * p.run_down + w * p.run_beside, p.beside, 4, p.run_bytes / tile::kOctet, &ahead, acc,
                 more);
  next = ahead;
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) store_ints(out + r * kRows + v * kLanes, apart ? acc[r][v] + more[r][v] : acc[r][v]);
}

/// Calls `f`(bits, height, …) with both as constants; the compiler drops heights above kTile. Not inlined: values that the caller keeps in
/// registers would cost sums.
#define NIBBLE_EVERY_HEIGHT(f, bits, ...)                            \
  switch (height) {                                                  \
    case 1: return f(bits, 1, __VA_ARGS__);                          \
    case 2: return f(bits, 2, __VA_ARGS__);                          \
    case 3: return f(bits, 3, __VA_ARGS__);                          \
    case 4: return f(bits, 4, __VA_ARGS__);                          \
    case 5: return kTile >= 5 ? f(bits, 5, __VA_ARGS__) : void();    \
    case 6: return kTile >= 6 ? f(bits, 6, __VA_ARGS__) : void();    \
    case 7: return kTile >= 7 ? f(bits, 7, __VA_ARGS__) : void();    \
    case 8: return kTile >= 8 ? f(bits, 8, __VA_ARGS__) : void();    \
    case 9: return kTile >= 9 ? f(bits, 9, __VA_ARGS__) : void();    \
    case 10: return kTile >= 10 ? f(bits, 10, __VA_ARGS__) : void(); \
    case 11: return kTile >= 11 ? f(bits, 11, __VA_ARGS__) : void(); \
    case 12: return kTile >= 12 ? f(bits, 12, __VA_ARGS__) : void(); \
    default: return;                                                 \
  }
/// The same of the heights that multiply several row blocks side by side.
#define NIBBLE_EVERY_HEIGHT_OF_STREAMS(f, bits, ...)                     \
  switch (height) {                                                      \
    case 1: return streams_of(1) > 1 ? f(bits, 1, __VA_ARGS__) : void(); \
    case 2: return streams_of(2) > 1 ? f(bits, 2, __VA_ARGS__) : void(); \
    case 3: return streams_of(3) > 1 ? f(bits, 3, __VA_ARGS__) : void(); \
    case 4: return streams_of(4) > 1 ? f(bits, 4, __VA_ARGS__) : void(); \
    case 5: return streams_of(5) > 1 ? f(bits, 5, __VA_ARGS__) : void(); \
    case 6: return streams_of(6) > 1 ? f(bits, 6, __VA_ARGS__) : void(); \
    default: return;                                                     \
  }
__attribute__((noinline)) void add_any(int height, int bits, bool first, const std::byte* codes, const std::byte* a,
                                       std::int64_t octets, Ahead& ahead, std::int32_t* sums) {
  if (bits == 4) NIBBLE_EVERY_HEIGHT(add, 4, first, codes, a, octets, ahead, sums)
  NIBBLE_EVERY_HEIGHT(add, 8, first, codes, a, octets, ahead, sums)
}
__attribute__((noinline)) void sum_tile_runs(int height, const Decoder& d, const std::byte* codes, const std::byte* a,
                                             const Patches& p, const std::int32_t* starts, Ahead& ahead, std::int32_t* out) {
  if (d.geometry.bits == 4) NIBBLE_EVERY_HEIGHT(sum_runs, 4, codes, a, p, starts, ahead, out)
  NIBBLE_EVERY_HEIGHT(sum_runs, 8, codes, a, p, starts, ahead, out)
}

/// add() of streams_of(height) row blocks, `apart` bytes from each other, over all of K: sums[streams][height][R].
NIBBLE_VARIANT void add_streams(int bits, int height, const std::byte* codes, std::int64_t apart, const std::byte* a,
                                std::int64_t octets, std::int32_t* sums) {
  const int streams = streams_of(height), vecs = streams * kVecs;  // vector v is of row block v / kVecs
  const Ints flip = splat(static_cast<std::int32_t>(kByteBias * 0x01010101u));
  const int octet_bytes = bits * kRows;
  Ints acc[kTile][kMostStreams * kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < vecs; ++v) acc[r][v] = Ints{};
  for (; octets > 0; --octets, codes += octet_bytes, a += 8 * height) {
    for (int v = 0; v < vecs; ++v) {
      const Quads quads = load_quads(bits, codes + v / kVecs * apart, v % kVecs);
      const Ints low = bits == 4 ? quads.low : quads.low ^ flip, high = bits == 4 ? quads.high : quads.high ^ flip;
      for (int r = 0; r < height; ++r)
        acc[r][v] = dot4(dot4(acc[r][v], low, load_splat(a + 4 * r), bits), high, load_splat(a + 4 * (height + r)), bits);
    }
    for (int s = 0; s < streams; ++s)
      for (int line = 0; line < octet_bytes; line += 64) __builtin_prefetch(codes + s * apart + kPrefetchBytes + line);
  }
  for (int v = 0; v < vecs; ++v)
    for (int r = 0; r < height; ++r) store_ints(sums + (v / kVecs * height + r) * kRows + v % kVecs * kLanes, acc[r][v]);
}
__attribute__((noinline)) void add_any_streams(int height, int bits, const std::byte* codes, std::int64_t apart,
                                               const std::byte* a, std::int64_t octets, std::int32_t* sums) {
  if (bits == 4) NIBBLE_EVERY_HEIGHT_OF_STREAMS(add_streams, 4, codes, apart, a, octets, sums)
  NIBBLE_EVERY_HEIGHT_OF_STREAMS(add_streams, 8, codes, apart, a, octets, sums)
}

/// Multiplied as they are.
struct ChunkCodes {
  static bool in_place(const tile::Geometry&, const std::byte*) { return true; }
  const std::byte* of(const tile::Geometry&, const std::byte* codes, std::int64_t) { return codes; }
};

/// The prefetches of a chunk.
inline std::int64_t prefetches(std::int64_t octets) { return (octets + kPrefetchOctets - 1) / kPrefetchOctets; }

/// sums[height][R] += Σ q·code of octets [begin, begin + octets) of all; `tokens` are those of a prepared tile.
inline void add_chunk(int height, const Decoder& d, const std::byte* codes, const std::byte* tokens, std::int64_t begin,
                      std::int64_t octets, std::int64_t, Ahead& ahead, std::int32_t* sums) {
  add_any(height, d.geometry.bits, begin == 0, codes, tokens + begin * tile::kOctet * height, octets, ahead, sums);
}
#endif

#if NIBBLE_WIDENS
/// The longest task of tokens that are widened.
constexpr std::int64_t kWideTokens = 192;
/// A chunk of a token or an output channel.
constexpr std::int64_t kWideBytes = 2 * tile::kOctet * kChunkOctets;

/// Bytes of `count` quads, of codes or signed, as two words each: of all quads the words of channels 0 and 2, then the others. `codes` is
/// a constant at every call.
NIBBLE_VARIANT void widen(bool codes, const std::byte* quads, std::int64_t count, std::byte* words) {
  std::byte* const odd = words + 4 * count;
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints quad = load_ints(quads + 4 * i);
    store_ints(words + 4 * i, reinterpret_cast<Ints>(codes ? even_codes(quad) : even_bytes(quad)));
    store_ints(odd + 4 * i, reinterpret_cast<Ints>(codes ? odd_codes(quad) : odd_bytes(quad)));
  }
  for (; i < count; ++i) {
    const Ints quad = load_splat(quads + 4 * i);
    const Ints first = reinterpret_cast<Ints>(codes ? even_codes(quad) : even_bytes(quad));
    const Ints second = reinterpret_cast<Ints>(codes ? odd_codes(quad) : odd_bytes(quad));
    std::memcpy(words + 4 * i, &first, 4);
    std::memcpy(odd + 4 * i, &second, 4);
  }
}

/// add() of widened codes and tokens, word by word. `height` is a constant at every call.
NIBBLE_VARIANT void add_wide(int, int height, bool first, const std::byte* codes, const std::byte* a, std::int64_t octets,
                             Ahead& next, std::int32_t* sums) {
  Ahead ahead = next;  // in registers
  Ints acc[kTile][kVecs];
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) acc[r][v] = first ? Ints{} : load_ints(sums + r * kRows + v * kLanes);
  for (std::int64_t o = 0; o < octets; o += kPrefetchOctets) {
    ahead.prefetch();
#pragma GCC unroll 1
    for (std::int64_t words = 4 * least(kPrefetchOctets, octets - o); words > 0; --words, codes += 4 * kRows, a += 4 * height) {
      Shorts w[kVecs];
      for (int v = 0; v < kVecs; ++v) w[v] = reinterpret_cast<Shorts>(load_ints(codes + 4 * v * kLanes));
      for (int r = 0; r < height; ++r) {
        const Shorts pair = reinterpret_cast<Shorts>(load_splat(a + 4 * r));
        for (int v = 0; v < kVecs; ++v) acc[r][v] += multiply_pairs(w[v], pair);
      }
    }
  }
  next = ahead;
  for (int r = 0; r < height; ++r)
    for (int v = 0; v < kVecs; ++v) store_ints(sums + r * kRows + v * kLanes, acc[r][v]);
}
__attribute__((noinline)) void add_any_wide(int height, bool first, const std::byte* codes, const std::byte* a,
                                            std::int64_t octets, Ahead& ahead, std::int32_t* sums) {
  NIBBLE_EVERY_HEIGHT(add_wide, 8, first, codes, a, octets, ahead, sums)
}

/// A chunk as 16-bit integers, where that is what is multiplied. 8-bit codes are widened once for all tokens of a task, and tokens for all row
/// blocks of a group: in the loop over tiles a third of the instructions would be for it.
///
///   codes    channels 0 and 2 of each quad [R], then channels 1 and 3 of each quad [R]      words of two integers
///   tokens   the same of each tile, [H] in place of [R]                                     in L2
struct Widened {
  bool used;
  alignas(64) std::byte codes[kRows * kWideBytes];
  alignas(64) std::byte tokens[kWideTokens * kWideBytes];

  Widened(int bits, std::int64_t tiles, std::int64_t count) : used(bits == 8 && tiles > 1 && count <= kWideTokens) {}

  /// Octets [begin, begin + octets) of tokens [m_begin, m_end); those of a prepared tile begin after `header` bytes a token.
  __attribute__((noinline)) void read_tokens(const DotTask& t, std::int64_t header, std::int64_t m_begin, std::int64_t m_end,
                                             std::int64_t begin, std::int64_t octets) {
    for (std::int64_t m = m_begin; m < m_end; m += t.tile) {
      const std::int64_t height = least(t.m - m, t.tile);
      const std::byte* const quads = t.activations + m * t.token_bytes + (header + begin * tile::kOctet) * height;
      widen(false, quads, 2 * octets * height, tokens + (m - m_begin) * kWideBytes);
    }
  }
  __attribute__((noinline)) void read_codes(const std::byte* octet, std::int64_t octets) {
    widen(true, octet, 2 * octets * kRows, codes);
  }
  /// add_chunk() of the tile of tokens that begins at `token` of them.
  void add(std::int64_t height, std::int64_t token, bool first, std::int64_t octets, Ahead& ahead, std::int32_t* sums) const {
    add_any_wide(static_cast<int>(height), first, codes, tokens + token * kWideBytes, octets, ahead, sums);
  }
};
#else
/// Bytes are multiplied as they are.
struct Widened {
  static constexpr bool used = false;
  Widened(int, std::int64_t, std::int64_t) {}
  void read_tokens(const DotTask&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t) {}
  void read_codes(const std::byte*, std::int64_t) {}
  void add(std::int64_t, std::int64_t, bool, std::int64_t, Ahead&, std::int32_t*) const {}
};
#endif
#undef NIBBLE_EVERY_HEIGHT
#undef NIBBLE_EVERY_HEIGHT_OF_STREAMS

/// Scales, zeros and sum_bias of a row block.
struct Channels {
  alignas(64) float scale[kRows];
  alignas(64) float zero[kRows];             // integers, of the codes minus their bias
  alignas(64) std::int32_t zeros[kRows];     // the same
  alignas(64) std::int32_t columns[kRows];   // Σ(q_w − z_w), where activations have zero points
  alignas(64) std::int32_t sum_bias[kRows];  // 0 where there is none
  bool has_zeros;
};

void read_channels(const Decoder& d, const std::byte* weight, const std::int32_t* sum_bias, std::int64_t block,
                   Channels& channels) {
  const std::byte* const record = weight + d.geometry.record(block, 0);
  const std::int64_t scale_step = d.geometry.scale_bytes / kVecs;
  const std::int64_t zero_step = (d.geometry.header_bytes - d.geometry.scale_bytes) / kVecs;
  channels.has_zeros = d.zero != ZeroKind::none || (d.geometry.bits != 4 && kByteBias != 0);
  for (int v = 0; v < kVecs; ++v) {
    store(channels.scale + v * kLanes, load_as_floats(record + v * scale_step, d.scale_type));
    Vec zero = Vec{} - static_cast<float>(d.geometry.bits != 4 ? kByteBias : 0);
    if (d.zero != ZeroKind::none) zero += load_as_floats(record + d.geometry.scale_bytes + v * zero_step, d.zero_type);
    store(channels.zero + v * kLanes, zero);
    store_ints(channels.zeros + v * kLanes, to_ints(zero));
  }
  for (std::int64_t i = 0, n = block * kRows; i < kRows; ++i)
    channels.sum_bias[i] = sum_bias != nullptr && n + i < d.geometry.n ? sum_bias[n + i] : 0;
}

/// Of a task.
void read_channels(const DotTask& t, std::int64_t block, Channels& channels) {
  read_channels(*t.decoder, t.weight, t.sum_bias, block, channels);
  for (std::int64_t i = 0; i < kRows && t.zero_sums != ZeroSums::none; ++i)
    channels.columns[i] = static_cast<std::int32_t>(t.channel_sums[block * kRows + i]);
}

typedef std::uint32_t Words __attribute__((vector_size(kLanes * 4)));

/// sums − zero·columns, in more than 32 bits. Not inlined: indexing lanes would spill the caller's vectors.
__attribute__((noinline)) Vec less_far_zeros(Ints sums, const std::int32_t* columns, double zero) {
  Vec y{};
  for (int lane = 0; lane < kLanes; ++lane) y[lane] = static_cast<float>(sums[lane] - zero * columns[lane]);
  return y;
}

float float_at(const std::byte* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

std::int32_t integer_at(const std::byte* p) {
  std::int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

/// Σ q·(q_w − z_w) of every token and channel of a tile; q of the activations as they are stored. `a` is past the tile's zero points.
void sum_exactly(const DotTask& t, std::int64_t height, const std::byte* codes, const std::byte* a, const Channels& channels,
                 double* total) {
  const tile::Geometry& geo = t.decoder->geometry;
  alignas(64) std::int32_t acc[kTile * kRows];
  ChunkCodes chunk;
  Ahead none;
  for (std::int64_t i = 0; i < height * kRows; ++i) total[i] = 0;
  for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
    end = t.segments.end(k);
    const std::int64_t octets = tile::Geometry::octets(end - k);
    for (std::int64_t o = 0, count = 0; o < octets; o += count) {
      count = least(kChunkOctets, octets - o);
      add_chunk(static_cast<int>(height), *t.decoder, chunk.of(geo, codes + o * geo.octet_bytes, count), a + 12 * room(height), o,
                count, octets, none, acc);
    }
    for (std::int64_t r = 0; r < height; ++r) {
      const double units = float_at(a + 4 * (room(height) + r)), start = integer_at(a + 4 * (2 * room(height) + r));
      for (std::int64_t i = r * kRows; i < (r + 1) * kRows; ++i)
        total[i] += static_cast<double>(acc[i]) + start - static_cast<double>(channels.zero[i - r * kRows]) * units;
    }
    codes += octets * geo.octet_bytes;
    a += (12 + row_bytes(octets)) * room(height);
  }
}

/// x = fl( fl( x·s_a ) · s_w ) [· scale2].
void apply_scales(const Decoder& d, float token, const Channels& channels, float* x) {
  for (int v = 0; v < kVecs; ++v) {
    Vec y = (load(x + v * kLanes) * token) * load(channels.scale + v * kLanes);
    if (d.has_scale2) y *= d.scale2;
    store(x + v * kLanes, y);
  }
}

/// sum + bias modulo 2³². The sum has more bits where zero points of activations are no codes.
inline std::int32_t biased(double sum, std::int32_t bias) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::int64_t>(sum)) + static_cast<std::uint32_t>(bias));
}
inline float bits_of(std::int32_t sum) {
  float bits;
  std::memcpy(&bits, &sum, 4);
  return bits;
}

/// Whether Σ (q_a − z_a)·(q_w − z_w) fits 32 bits, and K is one segment. Zero points of activations are taken to be codes; a weight's zero
/// point is a byte of either sign.
bool fits_words(const DotTask& t) {
  const std::int64_t reach = (t.zero_sums == ZeroSums::none ? 128 : 255) * (t.decoder->zero == ZeroKind::none ? 128 : 383);
  return t.segments.k <= t.segments.piece && t.segments.k <= INT32_MAX / reach;
}

/// A tile of tokens and a row block from its products acc[height][R], up to the epilogue; for a D of s32 the integers, as floats of the same
/// bits. `a` is the prepared tile. Integers are added up modulo 2³², where the result fits.
void finish(const DotTask& t, std::int64_t height, const std::int32_t* acc, const std::byte* a, const Channels& channels,
            float* out) {
  const Decoder& d = *t.decoder;
  const bool zero_points = t.zero_sums != ZeroSums::none, raw = t.outputs.d->dtype == DType::s32;
  const bool reads_sums = t.outputs.epilogue->reads_sums();
  const std::byte* const zeros = a;
  if (zero_points) a += 4 * room(height);
  for (std::int64_t r = 0; r < height; ++r) {
    const float token = float_at(a + 4 * r);
    const auto units = static_cast<std::uint32_t>(static_cast<std::int32_t>(float_at(a + 4 * (room(height) + r))));
    const std::int32_t zero = zero_points ? integer_at(zeros + 4 * r) : 0;
    const bool far = (zero < -128 || zero > 127) && !reads_sums;
    for (int v = 0; v < kVecs; ++v) {
      const std::int64_t of = v * kLanes;
      Words whole = reinterpret_cast<Words>(load_ints(acc + r * kRows + of));
      whole += static_cast<std::uint32_t>(integer_at(a + 4 * (2 * room(height) + r)));
      if (channels.has_zeros) whole -= reinterpret_cast<Words>(load_ints(channels.zeros + of)) * units;
      if (zero != 0 && !far)
        whole -= reinterpret_cast<Words>(load_ints(channels.columns + of)) * static_cast<std::uint32_t>(zero);
      if (reads_sums) whole += reinterpret_cast<Words>(load_ints(channels.sum_bias + of));
      float* const to = out + r * kRows + of;
      if (raw) {
        store(to, reinterpret_cast<Vec>(whole));
        continue;
      }
      Vec y = to_floats(reinterpret_cast<Ints>(whole));
      if (far) y = less_far_zeros(reinterpret_cast<Ints>(whole), channels.columns + of, zero);
      y = (y * token) * load(channels.scale + of);
      if (d.has_scale2) y *= d.scale2;
      store(to, y);
    }
  }
}

/// The same with its products, where 32 bits do not hold all sums. `columns`: Σ(q_w − z_w), where activations have zero points.
void multiply_exactly(const DotTask& t, std::int64_t height, const std::byte* codes, const std::byte* a, const Channels& channels,
                      const double* columns, float* out) {
  const Decoder& d = *t.decoder;
  const bool zero_points = t.zero_sums != ZeroSums::none;
  const std::byte* zeros = a;
  if (zero_points) a += 4 * room(height);
  const bool reads_sums = t.outputs.epilogue->reads_sums(), raw = t.outputs.d->dtype == DType::s32;
  alignas(64) double total[kTile * kRows];
  sum_exactly(t, height, codes, a, channels, total);
  for (std::int64_t r = 0; r < height; ++r) {
    const std::int32_t zero = zero_points ? integer_at(zeros + 4 * r) : 0;
    for (std::int64_t i = 0; i < kRows; ++i) {
      const double sum = zero == 0 ? total[r * kRows + i] : total[r * kRows + i] - zero * columns[i];
      out[r * kRows + i] = static_cast<float>(sum);
      if (!reads_sums) continue;
      const std::int32_t whole = biased(sum, channels.sum_bias[i]);
      out[r * kRows + i] = raw ? bits_of(whole) : static_cast<float>(whole);
    }
  }
  if (raw) return;
  for (std::int64_t r = 0; r < height; ++r) apply_scales(d, float_at(a + 4 * r), channels, out + r * kRows);
}

/// Floats, or integers as floats of the same bits.
inline void store_tile(const Outputs& outputs, float* sums, std::int64_t block, std::int64_t m, std::int64_t height) {
  if (outputs.d->dtype != DType::s32) return outputs.store(sums, block, m, height);
  alignas(64) std::int32_t integers[kTile * kRows];
  std::memcpy(integers, sums, static_cast<std::size_t>(height * kRows) * 4);
  outputs.store_integers(integers, kRows, block, m, height);
}

#if NIBBLE_ISA != NIBBLE_ISA_AMX
/// A tile of few tokens, several row blocks side by side where memory is read faster so. → the first row block that is left.
std::int64_t linear_streams(const DotTask& t, std::int64_t block, std::int64_t block_end, std::int64_t m, std::int64_t tokens) {
  const std::int64_t streams = tokens <= t.tile && reads_in_streams() && fits_words(t) ? streams_of(static_cast<int>(tokens)) : 1;
  if (streams == 1) return block;
  const tile::Geometry& geo = t.decoder->geometry;
  const std::int64_t header = t.zero_sums != ZeroSums::none ? 16 : 12;
  const std::byte* const a = t.activations + m * t.token_bytes;
  alignas(64) std::int32_t sums[2 * kTile * kRows];
  alignas(64) float out[kTile * kRows];
  Channels channels;
  for (; block + streams <= block_end; block += streams) {
    add_any_streams(static_cast<int>(tokens), geo.bits, t.weight + geo.record(block, 0) + geo.header_bytes, geo.row_block_bytes,
                    a + header * tokens, tile::Geometry::octets(t.segments.k), sums);
    for (std::int64_t i = 0; i < streams; ++i) {
      read_channels(t, block + i, channels);
      finish(t, tokens, sums + i * tokens * kRows, a, channels, out);
      store_tile(t.outputs, out, block + i, m, tokens);
    }
  }
  return block;
}
#endif

/// For each group of row blocks, chunk of K, row block of the group: all tiles of tokens.
void linear_whole(const DotTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t m_begin, std::int64_t m_end) {
  constexpr std::int64_t kMostTiles = kGroupBytes / (kTile * kRows * 4);
  for (; m_end - m_begin > kMostTiles * t.tile; m_begin += kMostTiles * t.tile)
    linear_whole(t, block_begin, block_end, m_begin, m_begin + kMostTiles * t.tile);
#if NIBBLE_ISA != NIBBLE_ISA_AMX
  block_begin = linear_streams(t, block_begin, block_end, m_begin, m_end - m_begin);
#endif
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const std::int64_t octets = tile::Geometry::octets(t.segments.k), header = t.zero_sums != ZeroSums::none ? 16 : 12;
  const std::int64_t tiles = (m_end - m_begin + t.tile - 1) / t.tile;
  const std::int64_t group = (m_end - m_begin) * t.token_bytes <= kResidentBytes ? 1 : kMostTiles / tiles;
  // With one tile nothing is reused, and the loop is the longest over all of K at once.
  const bool single = tiles == 1 && ChunkCodes::in_place(geo, t.weight);
  const std::int64_t chunk = single ? octets : kChunkOctets;
  const bool runs = single && (NIBBLE_ISA == NIBBLE_ISA_AMX || (t.m < kPrefetchRows && low_tile_ahead() != 0));
  // Elsewhere a few tokens leave the ports that load idle; one token and taller tiles read a single chunk as fast without.
  const bool prefetches_ahead = chunk < octets || NIBBLE_ISA == NIBBLE_ISA_AMX || (t.m > 1 && t.m < kPrefetchRows);
  const bool words = fits_words(t);
  alignas(64) std::int32_t sums[kGroupBytes / 4];
  alignas(64) float out[kTile * kRows];
  Channels channels;
  ChunkCodes chunk_codes;
  Widened widened(words ? geo.bits : 0, tiles, m_end - m_begin);
  const auto codes_at = [&](std::int64_t block, std::int64_t octet) {
    return t.weight + geo.record(block, 0) + geo.header_bytes + octet * geo.octet_bytes;
  };
  [[maybe_unused]] const Tiles in_use(m_end - m_begin);
  for (std::int64_t begin = block_begin, end = 0; begin < block_end; begin = end) {
    end = least(begin + group, block_end);
    for (std::int64_t octet = 0, count = 0; octet < octets; octet += count) {
      count = words ? least(chunk, octets - octet) : octets;
      const bool last = octet + count == octets;
      if (widened.used) widened.read_tokens(t, header, m_begin, m_end, octet, count);
      for (std::int64_t block = begin; block < end; ++block) {
        const bool same = block + 1 < end;  // the next chunk is of the same channels, or of the same or the next group
        const std::int64_t next_block = same ? block + 1 : last ? end : begin, next = same ? octet : last ? 0 : octet + count;
        Ahead ahead;
        if (runs) {
          const std::byte* const run = codes_at(block, 0);
          const std::int64_t rest = codes_at(block_end - 1, octets) - run;
          ahead = {run + least(kRunAhead, rest), run + least(kRunAhead + geo.row_block_bytes, rest), prefetches(count)};
        } else if (next_block < block_end && prefetches_ahead)
          ahead = {codes_at(next_block, next), codes_at(next_block, least(next + chunk, octets)), tiles * prefetches(count)};
        if (last) read_channels(t, block, channels);
        const std::byte* codes = codes_at(block, octet);
        if (words) codes = chunk_codes.of(geo, codes, count);
        if (widened.used) widened.read_codes(codes, count);
        for (std::int64_t i = 0; i < tiles; ++i) {
          const std::int64_t m = m_begin + i * t.tile, height = least(t.m - m, t.tile);
          const std::byte* const a = t.activations + m * t.token_bytes;
          if (words) {
            std::int32_t* const tile_sums = sums + ((block - begin) * tiles + i) * kTile * kRows;
            widened.used ? widened.add(height, i * t.tile, octet == 0, count, ahead, tile_sums)
                         : add_chunk(static_cast<int>(height), d, codes, a + header * room(height), octet, count, octets, ahead,
                                     tile_sums);
            if (!last) continue;
            finish(t, height, tile_sums, a, channels, out);
          } else {
            multiply_exactly(t, height, codes, a, channels, t.channel_sums + block * kRows, out);
          }
          store_tile(t.outputs, out, block, m, height);
        }
      }
    }
  }
}

/// Σ of the `count` bytes of a pixel, a multiple of 4.
inline std::int32_t sum_of_bytes(const std::byte* a, std::int64_t count) {
  std::int64_t i = 0;
  Ints lanes{};
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) lanes = dot4(lanes, splat(0x01010101), load_ints(a + i), 4);
  std::int32_t sum = i > 0 ? sum_lanes(lanes) : 0;
  for (; i < count; ++i) sum += static_cast<std::int8_t>(a[i]);
  return sum;
}

/// Σ of the codes of each patch of a row of `count` tokens, from the sums of pixels.
void sum_patches(const PatchTask& t, const std::int32_t* first, std::int64_t count, std::int32_t* sums) {
  for (std::int64_t i = 0; i < count; ++i) sums[i] = 0;
  for (std::int64_t h = 0; h < t.taps_h; ++h)
    for (std::int64_t w = 0; w < t.taps_w; ++w) {
      const std::int32_t* from = first + h * t.tap_down + w * t.tap_beside;
      if (t.pixel_step == 1) {
        for (std::int64_t i = 0; i < count; ++i) sums[i] += from[i];
      } else {
        for (std::int64_t i = 0; i < count; ++i) sums[i] += from[i * t.pixel_step];
      }
    }
}

void sum_pixels(const PatchTask& t) {
  for (std::int64_t i = 0; i < t.pixels; ++i) t.pixel_sums[i] = sum_of_bytes(t.patches->image + i * t.pixel_bytes, t.pixel_bytes);
}

/// The data of row blocks besides their codes.
struct PatchChannels {
  Channels channels[kMaxTaskBlocks];
  // 32-bit integers, like every sum: the sums of codes, and z_a·Σ(q_w − z_w) − sum_bias, or only the Σ where z_a is far.
  alignas(64) std::int32_t zeros[kMaxTaskBlocks * kRows], columns[kMaxTaskBlocks * kRows];
  bool has_zeros, has_columns;
  bool far;  // z_a is outside −128 … 127, and the sum is not wanted modulo 2³²

  PatchChannels(const PatchTask& t, std::int64_t block_begin, std::int64_t block_end)
      : has_zeros(t.decoder->zero != ZeroKind::none || (kByteBias != 0 && t.decoder->geometry.bits != 4)),
        has_columns(t.zero != 0 || t.sum_bias != nullptr),
        far((t.zero < -128 || t.zero > 127) && !t.outputs->epilogue->reads_sums()) {
    for (std::int64_t i = 0; i < block_end - block_begin; ++i) {
      read_channels(*t.decoder, t.weight, t.sum_bias, block_begin + i, channels[i]);
      for (int v = 0; v < kVecs; ++v) store_ints(zeros + i * kRows + v * kLanes, to_ints(load(channels[i].zero + v * kLanes)));
      const double* sums = t.channel_sums + (block_begin + i) * kRows;
      for (int j = 0; j < kRows && has_columns; ++j)
        columns[i * kRows + j] = static_cast<std::int32_t>(static_cast<std::uint32_t>(static_cast<std::int32_t>(sums[j])) *
                                                               static_cast<std::uint32_t>(far ? 1 : t.zero) -
                                                           static_cast<std::uint32_t>(channels[i].sum_bias[j]));
    }
  }

  /// out[count][R] of row block i from the sums of `count` tokens, whose patches' codes have the sums `sums`; `start` is in acc already.
  /// For a D of s32 they are integers, as floats of the same bits.
  void finish(const PatchTask& t, std::int64_t i, const std::int32_t* acc, const std::int32_t* sums, std::int64_t count,
              float* out) const {
    for (std::int64_t r = 0; r < count; ++r)
      for (int v = 0; v < kVecs; ++v) {
        const std::int64_t at = r * kRows + v * kLanes, of = i * kRows + v * kLanes;
        Words whole = reinterpret_cast<Words>(load_ints(acc + at));  // modulo 2³², where the result fits
        if (has_zeros) whole -= reinterpret_cast<Words>(load_ints(zeros + of)) * static_cast<std::uint32_t>(sums[r]);
        if (has_columns && !far) whole -= reinterpret_cast<Words>(load_ints(columns + of));
        if (t.outputs->d->dtype == DType::s32) {
          store(out + at, reinterpret_cast<Vec>(whole));
          continue;
        }
        Vec y = to_floats(reinterpret_cast<Ints>(whole));
        if (far) y = less_far_zeros(reinterpret_cast<Ints>(whole), columns + of, t.zero);
        y = (y * t.scale) * load(channels[i].scale + v * kLanes);
        if (t.decoder->has_scale2) y *= t.decoder->scale2;
        store(out + at, y);
      }
  }
};

/// Σ of the codes of every token's patch.
void sum_tokens(const PatchTask& t, std::int32_t* sums) {
  const std::int64_t columns = t.patches->columns;
  for (std::int64_t row = 0; row < t.rows; ++row) sum_patches(t, t.pixel_sums + row * t.row_down, columns, sums + row * columns);
}

#if NIBBLE_ISA != NIBBLE_ISA_AMX
/// Patches in place: a tile is tokens of one row, which are evenly spaced.
void conv_whole(const PatchTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t block_next) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const Patches& p = *t.patches;
  const PatchChannels channels(t, block_begin, block_end);
  alignas(64) std::int32_t acc[kTile * kRows];
  alignas(64) float out[kTile * kRows];
  std::int32_t sums[kMaxChunkTokens], starts[kMaxChunkTokens];
  sum_tokens(t, sums);
  for (std::int64_t i = 0; i < t.rows * p.columns; ++i) starts[i] = -t.bias * sums[i];
  const std::int64_t prefetches =
      (p.run_bytes / tile::kOctet + kPrefetchOctets - 1) / kPrefetchOctets * p.runs_h * p.runs_w;  // of a tile
  const std::int64_t tiles = t.rows * ((p.columns + t.tile - 1) / t.tile);
  Ahead ahead(t.weight + geo.record(block_end, 0), t.weight + geo.record(block_next, 0),
              tiles * (block_end - block_begin) * prefetches);
  for (std::int64_t row = 0; row < t.rows; ++row)
    for (std::int64_t column = 0, height = 0; column < p.columns; column += height) {
      height = least(p.columns - column, t.tile);
      const std::int64_t token = row * p.columns + column;
      const std::byte* a = p.image + row * p.down + column * p.beside;
      for (std::int64_t block = block_begin; block < block_end; ++block) {
        const std::byte* codes = t.weight + geo.record(block, 0) + geo.header_bytes;
        sum_tile_runs(static_cast<int>(height), d, codes, a, p, starts + token, ahead, acc);
        channels.finish(t, block - block_begin, acc, sums + token, height, out);
        store_tile(*t.outputs, out, block, token, height);
      }
    }
}
#else
/// Patches in place. Sixteen evenly spaced tokens fill a tile register, and two registers, from any places, a tile. Between the last token
/// of a row and the first of the next are the pixels of the filter's edge: where they are few, all rows are one line of tokens, and
/// results for the edge are not stored.
void conv_whole(const PatchTask& t, std::int64_t block_begin, std::int64_t block_end, std::int64_t block_next) {
  const Decoder& d = *t.decoder;
  const Patches& p = *t.patches;
  PatchChannels channels(t, block_begin, block_end);
  std::int32_t sums[kMaxChunkTokens];
  sum_tokens(t, sums);
  // `lines` of `length` places, `pitch` of which are a row's.
  const PixelLines lines = pixel_lines(t.rows, p.columns, t.row_down, t.pixel_step);
  const std::int64_t halves = lines.count * lines.halves();
  const auto place = [&](std::int64_t half) { return half % lines.halves() * kTileRows; };
  const auto address = [&](std::int64_t half) { return p.image + half / lines.halves() * p.down + place(half) * p.beside; };
  // The bias −bias·Σa and the zero point −z·Σa combine to a zero point of the stored code.
  if (t.bias != 0) {
    for (std::int64_t i = 0; i < (block_end - block_begin) * kRows; ++i) channels.zeros[i] += t.bias;
    channels.has_zeros = true;
  }
  alignas(64) std::int32_t acc[kTile * kRows];
  alignas(64) float out[kTile * kRows];
  Ahead ahead = group_after(d.geometry, t.weight, block_begin, block_end, block_next, (halves + 1) / 2);
  const Tiles in_use;
  for (std::int64_t half = 0; half < halves; half += 2) {
    const bool both = half + 1 < halves;
    const std::byte* first = address(half);
    const PixelRows rows{.p = &p, .first = first, .next = both ? address(half + 1) - first : 0};
    for (std::int64_t block = block_begin; block < block_end; ++block) {
      sum_pixel_tile(both, d, t.weight + d.geometry.record(block, 0) + d.geometry.header_bytes, rows, ahead, acc);
      for (std::int64_t i = 0; i < (both ? 2 : 1); ++i) {
        const std::int64_t begin = place(half + i), end = least(begin + kTileRows, lines.length);
        for (std::int64_t at = begin, stop = 0; at < end; at = stop) {
          const std::int64_t row = (half + i) / lines.halves() + at / lines.pitch, column = at % lines.pitch;
          stop = least(end, at + lines.pitch - column);
          const std::int64_t token = row * p.columns + column, count = least(stop - at, p.columns - column);
          if (count <= 0) continue;  // an edge
          channels.finish(t, block - block_begin, acc + (i * kTileRows + at - begin) * kRows, sums + token, count, out);
          store_tile(*t.outputs, out, block, token, count);
        }
      }
    }
  }
}
#endif

#undef NIBBLE_WIDENS
#endif
