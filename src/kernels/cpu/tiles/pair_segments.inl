// Integer products by segments of K in pairs of rows (row_pairs.inl). Included by dot_tile.inl for i8mm, whose loop it takes the place of for
// two rows and more. The sums of a segment go through L1: they are more than registers hold.
//
//   for each segment of K
//     for each pass over the row block: acc[rows][R] = initial sums + Σ bytes · codes     a loop of its own for each number of rows
//     for each token: out[R] += s_a · s_w ∘ (digits of acc joined − z ∘ Σa)               one loop for all

/// A segment of a tile. `starts` are the initial sums of its rows, `bytes` their octets; column[R] = Σ codes, where they are summed.
struct PairSegment {
  const tile::Geometry* geo;
  const std::byte *starts, *codes, *bytes;
  std::int64_t octets;
  Ints (*acc)[kVecs];
  Ints* column;
};

/// `bits` (4, 8; 0: any width), `rows` and `sums_columns` are constants at every call.
NIBBLE_VARIANT void sum_pairs(int bits, bool sums_columns, int rows, const PairSegment& s) {
  const tile::Planes planes = tile::planes(s.geo->bits);
  for (int begin = 0; begin < kVecs; begin += pass_vecs(rows)) {
    Ints squares[kMostPairs][2 * kVecs], pairs[2 * kVecs], column[kVecs] = {};
    for (int r = 0; r < rows; ++r)
      for (int v = begin; v < begin + pass_vecs(rows); ++v) s.acc[r][v] = load_splat(s.starts + 4 * r);
    squares_of(rows, begin, s.acc, squares);
    const std::byte *octet = s.codes, *bytes = s.bytes;
    const int octet_bytes = bits == 0 ? static_cast<int>(s.geo->octet_bytes) : bits * kRows;
    for (std::int64_t o = s.octets; o > 0; --o, octet += octet_bytes, bytes += 8 * rows) {
      for (int v = 0; v < pass_vecs(rows); ++v) {
        const Quads quads = bits == 0 ? load_any_quads(planes, octet, begin + v) : load_quads(bits, octet, begin + v);
        if (sums_columns) column[v] = add_codes(column[v], quads.low, quads.high, bits == 4 ? 4 : 8);
        pairs_of_codes(quads, pairs + 2 * v);
      }
      for (int line = 0; begin == 0 && rows >= kPrefetchRows && line < octet_bytes; line += 64)
        __builtin_prefetch(octet + kPrefetchBytes + line);
      multiply_octet(rows, pairs, bytes, 4, 4 * rows, squares);
    }
    rows_of(rows, begin, squares, s.acc);
    for (int v = 0; v < pass_vecs(rows); ++v) s.column[begin + v] = column[v];
  }
}

NIBBLE_VARIANT void sum_rows(int bits, bool sums_columns, int rows, const PairSegment& s) {
  switch (rows) {
    case 2: return sum_pairs(bits, sums_columns, 2, s);
    case 3: return sum_pairs(bits, sums_columns, 3, s);
    case 4: return sum_pairs(bits, sums_columns, 4, s);
    case 5: return sum_pairs(bits, sums_columns, 5, s);
    case 6: return sum_pairs(bits, sums_columns, 6, s);
    case 7: return sum_pairs(bits, sums_columns, 7, s);
    case 8: return sum_pairs(bits, sums_columns, 8, s);
    case 9: return sum_pairs(bits, sums_columns, 9, s);
    case 10: return sum_pairs(bits, sums_columns, 10, s);
    case 11: return sum_pairs(bits, sums_columns, 11, s);
    case 12: return sum_pairs(bits, sums_columns, 12, s);
    default: return;
  }
}

/// Codes of other widths are rare: their sums are computed whether they are needed or not.
__attribute__((noinline)) void sum_segment(int bits, bool sums_columns, int rows, const PairSegment& s) {
  if (bits == 4) return sums_columns ? sum_rows(4, true, rows, s) : sum_rows(4, false, rows, s);
  if (bits == 8) return sums_columns ? sum_rows(8, true, rows, s) : sum_rows(8, false, rows, s);
  sum_rows(0, true, rows, s);
}

/// multiply() of dot_tile.inl for two rows and more. `digits` is a constant at every call.
NIBBLE_VARIANT void multiply_in_pairs(int digits, int height, bool sums_columns, const DotTask& t, const std::byte* block,
                                      const std::byte* a, Columns columns, float* out) {
  const Decoder& d = *t.decoder;
  const tile::Geometry& geo = d.geometry;
  const int rows = height * digits;
  const bool has_columns = digits == 1 && columns.sums != nullptr, paired = has_columns && t.paired;
  const bool subtracts = !paired && (d.zero == ZeroKind::integer || d.zero == ZeroKind::real);
  const bool regular = t.segments.regular(), common = has_common_header(d);
  const int bits = regular && (geo.bits == 4 || geo.bits == 8) ? geo.bits : 0;
  for (int i = 0; i < height * kVecs; ++i) store(out + i * kLanes, Vec{});

  Ints acc[kPairRows][kVecs], column[kVecs];
  GroupHeader header;
  const std::byte* codes = block;
  std::int64_t group_left = 0, lead = 0;
  for (std::int64_t k = 0, length = 0; k < geo.k; k += length) {
    if (group_left == 0) {
      group_left = geo.group < geo.k - k ? geo.group : geo.k - k;
      if (common)
        read_common_header(0, d, codes, header);
      else
        read_group_header(d, codes, header);
      codes += geo.header_bytes;
    }
    length = t.segments.piece < group_left ? t.segments.piece : group_left;
    if (!regular) {
      length = t.segments.end(k) - k;
      lead = t.segments.lead(k);
    }
    group_left -= length;

    const auto* scales = reinterpret_cast<const float*>(a);
    const float* sums = scales + height;
    a += 8 * height;
    const std::byte* zeros = a;
    if (has_columns) a += 4 * height;
    const std::int64_t octets = tile::Geometry::octets(lead + length);
    const std::byte* const first_octet = codes;
    sum_segment(bits, sums_columns, rows, {&geo, a, codes, a + 4 * rows, octets, acc, column});
    codes += octets * geo.octet_bytes;
    a += (4 + tile::kOctet * octets) * rows;

    if (!regular) {  // the last octet is the next segment's first, too, unless the group ends
      const std::int64_t behind = group_left == 0 ? 0 : octets * tile::kOctet - (lead + length);
      if (behind != 0) codes -= geo.octet_bytes;
      if (sums_columns && !paired && lead + behind != 0) {
        Ints others[kVecs];
        sum_other_codes(d, first_octet, lead, behind != 0 ? codes : first_octet, behind, others);
        for (int v = 0; v < kVecs; ++v) column[v] -= others[v];
      }
    }
    const Ints biases = splat(static_cast<std::int32_t>(-static_cast<int>(d.bias) * length));
    for (int v = 0; sums_columns && v < kVecs; ++v) {
      const Ints pair = column[v] << 16 | (to_ints(header.zero[v]) & 0xffff);
      store(columns.sums + v * kLanes, paired ? reinterpret_cast<Vec>(pair) : to_floats(column[v] + biases));
    }
    for (int m = 0; m < height; ++m)
      for (int v = 0; v < kVecs; ++v) {
        Ints sum = acc[digits * m][v];
        if (paired) sum = add_pairs(sum, reinterpret_cast<Ints>(load(columns.sums + v * kLanes)), load_splat(zeros + 4 * m));
        Vec dot = to_floats(sum);
        if (digits != 1) dot = to_floats((acc[digits * m + 2][v] << 8) + acc[digits * m + 1][v]) * 256.0f + dot;
        if (has_columns && !paired) dot -= load(columns.sums + v * kLanes) * splat_at(reinterpret_cast<const float*>(zeros) + m);
        if (subtracts) dot -= header.zero[v] * sums[m];
        float* const to = out + m * kRows + v * kLanes;
        Vec x = load(to) + (dot * splat_at(scales + m)) * header.scale[v];
        if (d.zero == ZeroKind::offset) x += (splat_at(sums + m) * splat_at(scales + m)) * header.offset[v];
        store(to, x);
      }
    if (has_columns) columns.sums += columns.step;
  }
}
