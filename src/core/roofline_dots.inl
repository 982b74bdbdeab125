// Included once per kind of dot product, inside a namespace and a target region, with
//   NIBBLE_DOTS            the name of the function to define
//   NIBBLE_VECTOR          the type of one register, of the elements that are accumulated: with __m512i GCC copies registers
//   NIBBLE_DOT(acc, a, b)  acc with the products of a and b added

/// Runs `rounds` (≥ 1) × kAccumulators dot-product steps on registers; the value only keeps the work alive.
std::uint32_t NIBBLE_DOTS(std::int64_t rounds, std::uint32_t seed) {
  NIBBLE_VECTOR acc[kAccumulators], a, b, sum;
  std::uint8_t bytes[sizeof(NIBBLE_VECTOR)];
  for (std::size_t i = 0; i < sizeof bytes; ++i) bytes[i] = static_cast<std::uint8_t>(0x3c + ((seed + i) & 3));  // 0.7 as f32
  std::memcpy(&a, bytes, sizeof a);
  std::memcpy(&b, bytes, sizeof b);
#pragma GCC unroll 12
  for (int i = 0; i < kAccumulators; ++i) std::memcpy(&acc[i], bytes, sizeof a);
  do {
#pragma GCC unroll 12
    for (int i = 0; i < kAccumulators; ++i) {
      __asm__ volatile(""
                       : "+" NIBBLE_REGISTER(a));  // else the part that does not depend on acc would be hoisted out of the loop
      acc[i] = NIBBLE_DOT(acc[i], a, b);
    }
  } while (--rounds > 0);
  sum = acc[0];
#pragma GCC unroll 12
  for (int i = 1; i < kAccumulators; ++i) sum = NIBBLE_DOT(sum, acc[i], b);
  std::uint32_t word;
  std::memcpy(&word, &sum, 4);
  return word;
}

#undef NIBBLE_DOTS
#undef NIBBLE_VECTOR
#undef NIBBLE_DOT
