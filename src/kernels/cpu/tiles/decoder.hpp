// The values of the codes of a packed weight, computed once per run.
#pragma once

#include <array>
#include <cstdint>

#include "layouts/layout.hpp"
#include "layouts/tile.hpp"

namespace nibble::cpu {

struct Decoder {
  tile::Geometry geometry;
  DType scale_type;
  DType zero_type;
  ZeroKind zero;
  bool integer_codes;  // the value is the stored code − bias; else table[code]
  bool e4m3_codes;
  DType floats;  // of a dense weight: their type; else none
  float bias;    // of integer codes
  bool has_scale2;
  float scale2;
  std::array<float, 256> table;  // values of float codes

  explicit Decoder(const PackedWeightData& packed, int rows);
};

/// Prefetches what lies some octets behind one that is about to be decoded into a panel. Decoding takes so many instructions that a core
/// has few loads in flight, and the prefetchers of some machines do not make up for it.
[[gnu::always_inline]] inline void prefetch_after(const std::byte* octet, std::int64_t octet_bytes) {
  constexpr std::int64_t kAhead = 2048, kLine = 64;
  for (std::int64_t line = 0; line < octet_bytes; line += kLine) __builtin_prefetch(octet + kAhead + line);
}

}  // namespace nibble::cpu
