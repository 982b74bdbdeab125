// Streams of weights (ahead.hpp) of the integer dot products, by instruction set.

/// How many row blocks a tile of `rows` tokens, or digits of tokens, multiplies side by side where memory is read faster so: as many as
/// leave registers for codes and broadcasts.
constexpr int streams_of(int rows) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX512VNNI
  return rows <= 3 ? kMostStreams : rows <= 6 ? 2 : 1;  // 24 of 32
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX2VNNI
  return rows == 1 ? kMostStreams : 1;  // 8 of 16
#else
  return rows > 0 ? 1 : 0;
#endif
}
