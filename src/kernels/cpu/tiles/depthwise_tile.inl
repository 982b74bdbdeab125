// Included once per instruction set by depthwise_tile.cpp. See depthwise_tile.hpp for the algorithm.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

constexpr int kTokens = kVecs == 4 ? 2 : 4;  // and kVecs sums each

void expand(const DepthwiseTask& t) {
  for (std::int64_t p = 0; p < t.pixels; ++p) {
    const std::byte* from = t.patches->image + p * t.pixel_bytes;
    float* to = t.floats + p * kRows;
    if (t.multiplier == 1 && t.count == kRows) {
      for (int v = 0; v < kVecs; ++v)
        store(to + v * kLanes, load_as_floats(from + v * kLanes * (bits(t.type) / 8), t.type) - t.zero);
      continue;
    }
    for (std::int64_t j = 0; j < kRows; ++j) {
      const std::int64_t channel = j < t.count ? (t.skipped + j) / t.multiplier : 0;
      float x;
      std::uint16_t half;
      std::memcpy(&half, from + 2 * channel, t.type == DType::s8 ? 0 : 2);
      switch (t.type) {
        case DType::f32: std::memcpy(&x, from + 4 * channel, 4); break;
        case DType::f16: x = to_f32(f16{half}); break;
        case DType::bf16: x = to_f32(bf16{half}); break;
        default: x = static_cast<float>(static_cast<std::int8_t>(from[channel])) - t.zero;
      }
      to[j] = j < t.count ? x : 0.0f;
    }
  }
}

/// Σ over taps for `tokens` neighbours. `tokens` is a constant at every call.
NIBBLE_VARIANT void add_taps(int tokens, const DepthwiseTask& t, const float* x, float* out) {
  Vec acc[kTokens][kVecs];
  for (int i = 0; i < tokens; ++i)
    for (int v = 0; v < kVecs; ++v) acc[i][v] = Vec{};
  const float* w = t.panel;
  const std::int64_t step = t.pixel_step * kRows;
  for (std::int64_t h = 0; h < t.taps_h; ++h)
    for (std::int64_t k = 0; k < t.taps_w; ++k, w += kRows) {
      const float* from = x + (h * t.tap_down + k * t.tap_beside) * kRows;
      for (int i = 0; i < tokens; ++i)
        for (int v = 0; v < kVecs; ++v) acc[i][v] += load(from + i * step + v * kLanes) * load(w + v * kLanes);
    }
  for (int i = 0; i < tokens; ++i)
    for (int v = 0; v < kVecs; ++v) {
      Vec y = acc[i][v];
      if (t.scale != nullptr) {
        y = (y * t.token_scale) * load(t.scale + v * kLanes);
        if (t.scale2 != 1.0f) y *= t.scale2;
      }
      store(out + i * kRows + v * kLanes, y);
    }
}

void multiply(const DepthwiseTask& t) {
  expand(t);
  float* out = t.sums;
  for (std::int64_t row = 0; row < t.rows; ++row) {
    const float* x = t.floats + row * t.row_down * kRows;
    std::int64_t column = 0;
    for (; column + kTokens <= t.patches->columns; column += kTokens, out += kTokens * kRows)
      add_taps(kTokens, t, x + column * t.pixel_step * kRows, out);
    for (; column < t.patches->columns; ++column, out += kRows) add_taps(1, t, x + column * t.pixel_step * kRows, out);
  }
}

#endif
