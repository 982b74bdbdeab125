// Octets of codes (layouts/tile.hpp) → floats, for every scheme. Included by the loops of an instruction set that need them.

/// The scales and zeros of a record as floats; integer codes fold their bias into the zero.
struct Header {
  alignas(64) float scale[kRows];
  alignas(64) float zero[kRows];
  bool simple;  // W = (code − zero)·scale, exact but for one rounding
  bool e4m3;    // W = value·scale, likewise
};

inline void read_header(const Decoder& d, const std::byte* record, Header& header) {
  const std::int64_t scale_step = d.geometry.scale_bytes / kVecs;
  const std::int64_t zero_step = (d.geometry.header_bytes - d.geometry.scale_bytes) / kVecs;
  header.simple = d.integer_codes && (d.zero == ZeroKind::none || d.zero == ZeroKind::integer);
  header.e4m3 = d.e4m3_codes && d.zero == ZeroKind::none;
  for (int v = 0; v < kVecs; ++v) {
    store(header.scale + v * kLanes, load_as_floats(record + v * scale_step, d.scale_type));
    Vec zero{};
    if (d.zero != ZeroKind::none) zero = load_as_floats(record + d.geometry.scale_bytes + v * zero_step, d.zero_type);
    if (header.simple) zero += d.bias;
    store(header.zero + v * kLanes, zero);
  }
}

/// An octet of integer codes → W, directly from words to floats. `bits` (4, 8; 0: any other width) is a constant at every call.
NIBBLE_VARIANT void decode_simple(int bits, const Header& h, const tile::Planes& planes, const std::byte* octet, float* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Vec zero = load(h.zero + v * kLanes), scale = load(h.scale + v * kLanes);
    const Quads quads = bits == 0 ? load_any_quads(planes, octet, v) : load_quads(bits, octet, v);
    for (int j = 0; j < tile::kOctet; ++j) {
      const Ints code = ((j < 4 ? quads.low : quads.high) >> (8 * (j % 4))) & 255;
      store(panel + j * kRows + v * kLanes, (to_floats(code) - zero) * scale);
    }
  }
}

inline void decode_e4m3(const Header& h, const std::byte* octet, float* panel) {
  for (int v = 0; v < kVecs; ++v) {
    const Vec scale = load(h.scale + v * kLanes);
    const Quads quads = load_quads(8, octet, v);
    for (int j = 0; j < tile::kOctet; ++j)
      store(panel + j * kRows + v * kLanes, from_e4m3(((j < 4 ? quads.low : quads.high) >> (8 * (j % 4))) & 255) * scale);
  }
}

/// Everything else, in double so that W is rounded once, as QuantTensor defines it.
inline void decode_general(const Decoder& d, const Header& h, const tile::Planes& planes, const std::byte* octet, float* panel) {
  alignas(64) std::int32_t codes[tile::kOctet * kRows];
  for (int v = 0; v < kVecs; ++v) {
    const Quads quads = load_any_quads(planes, octet, v);
    for (int j = 0; j < tile::kOctet; ++j)
      store_ints(codes + j * kRows + v * kLanes, ((j < 4 ? quads.low : quads.high) >> (8 * (j % 4))) & 255);
  }
  const bool offset = d.zero == ZeroKind::offset;
  for (int i = 0; i < tile::kOctet * kRows; ++i) {
    const int r = i % kRows;
    const double q = d.integer_codes ? static_cast<double>(codes[i]) - static_cast<double>(d.bias)
                                     : static_cast<double>(d.table[static_cast<std::size_t>(codes[i])]);
    const double s = h.scale[r], z = h.zero[r];
    const double product = q * s;
    panel[i] = static_cast<float>(offset ? product + z : (q - z) * s);
  }
}

/// Whole octets, so up to 7 channels more than `count`.
inline void decode_chunk(const Decoder& d, const Header& h, const std::byte* octets, int count, float* panel) {
  const tile::Planes planes = tile::planes(d.geometry.bits);
  for (int k = 0; k < count; k += tile::kOctet, octets += d.geometry.octet_bytes) {
    float* to = panel + k * kRows;
    if (h.e4m3) {
      decode_e4m3(h, octets, to);
    } else if (!h.simple) {
      decode_general(d, h, planes, octets, to);
    } else if (d.geometry.bits == 4) {
      decode_simple(4, h, planes, octets, to);
    } else if (d.geometry.bits == 8) {
      decode_simple(8, h, planes, octets, to);
    } else {
      decode_simple(0, h, planes, octets, to);
    }
  }
  if (d.has_scale2)
    for (int i = 0; i < count * kRows; ++i) panel[i] *= d.scale2;
}
