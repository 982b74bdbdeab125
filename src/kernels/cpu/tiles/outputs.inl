// Included once per instruction set by outputs.cpp: the canonical epilogue of whole row blocks, the operations of epilogue::store_row in
// their order, a vector at a time, and those of a glu by a sigmoid. Other glus, activations with exp, tanh or erf, and partial blocks use
// store_row itself.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

inline const std::byte* at(const ConstTensorView& v, std::int64_t i) {
  return static_cast<const std::byte*>(v.data) + i * (bits(v.dtype) / 8);
}

/// The quotient, rounded once; inexact only where codes saturate.
struct Divisor {
  Vec by, inverse;
  bool usual;  // and each inverse is rounded to nearest, so that one step of correction gives the quotient's bits
};
inline bool is_usual(float by) {
  std::uint32_t word;
  std::memcpy(&word, &by, 4);
  return by > 0x1p-60f && by < 0x1p60f && (word & 0x7fffff) != 0x7fffff;
}
/// By the scales of codes of the channels from n on.
inline Divisor divisor(const epilogue::OutCodes& codes, std::int64_t n) {
  const float* const first = codes.scales + n * codes.step;
  const Vec by = codes.step == 0 ? Vec{} + *first : load(first);
  bool usual = is_usual(*first);
  for (int i = 1; i < kLanes && codes.step != 0; ++i) usual &= is_usual(first[i]);
  return {by, 1.0f / by, usual};
}
inline Vec divide(Vec x, const Divisor& d) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX2
  if (d.usual) {
    const Vec q = x * d.inverse;
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
    const Vec rest = _mm512_fnmadd_ps(q, d.by, x), better = _mm512_fmadd_ps(rest, d.inverse, q);
#else
    const Vec rest = _mm256_fnmadd_ps(q, d.by, x), better = _mm256_fmadd_ps(rest, d.inverse, q);
#endif
    return better == better ? better : q;  // for infinities the remainder is NaN
  }
#endif
  return x / d.by;
}

/// epilogue::quantize.
inline void store_codes(std::byte* to, Vec x, const Divisor& scale, std::int32_t zero, epilogue::CodeRange range) {
  constexpr float kFar = 512;  // codes of larger magnitudes saturate for every zero point
  const Ints low = splat(static_cast<std::int32_t>(range.low)), high = splat(static_cast<std::int32_t>(range.high));
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  Vec q;
  if (scale.usual) {  // the remainder of a limited quotient is no NaN, and larger quotients stay beyond the limit
    q = within(x * scale.inverse, kFar);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, scale.by, x), scale.inverse, q);
  } else {
    q = x / scale.by;
  }
  const Ints near = to_ints(within(q, kFar)) + zero;
  __m512i code = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), reinterpret_cast<__m512i>(near));
  code = _mm512_maskz_max_epi32(0xffff, code, reinterpret_cast<__m512i>(low));
  code = _mm512_maskz_min_epi32(0xffff, code, reinterpret_cast<__m512i>(high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, code));
#else
  const Vec q = divide(x, scale);
  Ints code = to_ints(within(q, kFar)) + zero;
  code = q == q ? code : Ints{};
  code = code > low ? code : low;
  code = code < high ? code : high;
  store_bytes(to, code);
#endif
}

inline Vec relu(Vec x) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  return _mm512_maskz_max_ps(0xffff, Vec{}, x);  // the second one where it is NaN, and of two zeros
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  return _mm256_max_ps(Vec{}, x);
#else
  return x < 0.0f ? Vec{} : x;
#endif
}

/// A column of vectors of D: the channels from n on.
struct Column {
  const EpilogueSpec& spec;
  const Operands& args;
  std::int64_t n;
  Vec bias;
  std::byte* to;      // its first vector
  std::int64_t step;  // bytes to the next one
};

/// Bias, activation, conversion. `activation` and `out` are constants at every call.
NIBBLE_VARIANT void store_column(Activation activation, DType out, const Column& column, const float* sums, std::int64_t height) {
  const EpilogueSpec& spec = column.spec;
  const epilogue::OutCodes codes(spec, column.args);
  const Divisor scale = out == DType::s8 ? divisor(codes, column.n) : Divisor{};
  std::byte* to = column.to;
  const Vec low = Vec{} + spec.clamp_low, high = Vec{} + spec.clamp_high;
  for (std::int64_t r = 0; r < height; ++r, to += column.step) {
    Vec x = load(sums + r * kRows) + column.bias;
    if (activation == Activation::relu) x = relu(x);
    if (activation == Activation::clamp) x = x < low ? low : x > high ? high : x;
    switch (out) {
      case DType::f32: store(reinterpret_cast<float*>(to), x); break;
      case DType::f16: store_f16(to, x); break;
      case DType::bf16: store_bf16(to, x); break;
      default: store_codes(to, x, scale, codes.zero, codes.range);
    }
  }
}

NIBBLE_VARIANT void store_any(Activation activation, const Column& column, const float* sums, std::int64_t height) {
  switch (column.spec.out) {
    case DType::f32: return store_column(activation, DType::f32, column, sums, height);
    case DType::f16: return store_column(activation, DType::f16, column, sums, height);
    case DType::bf16: return store_column(activation, DType::bf16, column, sums, height);
    default: return store_column(activation, DType::s8, column, sums, height);  // or u8, with another range
  }
}

/// With gate, residual or both: the parts in their order, in place, then the conversion.
void store_with_images(Column column, float* sums, std::int64_t m, std::int64_t height) {
  const EpilogueSpec& spec = column.spec;
  const Operands& args = column.args;
  const Vec low = Vec{} + spec.clamp_low, high = Vec{} + spec.clamp_high;
  for (std::int64_t r = 0; r < height; ++r) {
    Vec x = load(sums + r * kRows) + column.bias;
    if (spec.activation == Activation::relu) x = relu(x);
    if (spec.activation == Activation::clamp) x = x < low ? low : x > high ? high : x;
    if (spec.gate) x *= load_as_floats(at(args.gate, (m + r) * args.gate.stride(0) + column.n), args.gate.dtype);
    if (spec.residual) x += load_as_floats(at(args.residual, (m + r) * args.residual.stride(0) + column.n), args.residual.dtype);
    store(sums + r * kRows, x);
  }
  column.bias = -Vec{};
  store_any(Activation::none, column, sums, height);
}

/// The numbers of even and of odd place in two vectors: the halves of a glu, which lie in pairs.
inline Vec evens(Vec a, Vec b) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}
inline Vec odds(Vec a, Vec b) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif NIBBLE_ISA == NIBBLE_ISA_AVX2
  return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

/// Rounded to a type of D.
inline Vec rounded(Vec x, DType type) {
  std::byte there[kLanes * sizeof(float)];
  if (type == DType::f16) return store_f16(there, x), load_f16(there);
  if (type == DType::bf16) return store_bf16(there, x), load_as_floats(there, type);
  return x;
}

/// One half of a glu: the sums of kLanes channels of x from i on as the activation function, or the product, takes them.
inline Vec half_of_glu(const EpilogueSpec& spec, const Operands& args, Vec x, std::int64_t i, float row_scale) {
  if (spec.row_scale) x *= row_scale;
  if (spec.col_scale) x *= load_as_floats(at(args.col_scale, i), DType::f32);
  if (spec.bias) x += load_as_floats(at(args.bias, i), args.bias.dtype);
  return x;
}

/// A glu by a sigmoid, as of silu: of channels j and N/2 + j of x, which lie side by side, D's channels j. No gate and no residual.
void store_glu(const Outputs& o, float* sums, std::int64_t n, std::int64_t m, std::int64_t height) {
  const EpilogueSpec& spec = *o.epilogue;
  const Operands& args = *o.operands;
  const std::int64_t half = o.d->dim(1);
  const DType factors = spec.factor_type();
  const epilogue::GluLimits limits{spec.glu_limit, spec.glu_offset};
  const Vec most = Vec{} + limits.limit, least = -most;
  const epilogue::Sigmoid sigmoid = epilogue::sigmoid_of(spec.activation);
  for (int v = 0; v < kVecs; v += 2) {
    const std::int64_t j = (n + v * kLanes) / 2;
    Column column{.spec = spec, .args = args, .n = j, .bias = -Vec{}, .to = static_cast<std::byte*>(o.d->data), .step = 0};
    for (std::int64_t r = 0; r < height; ++r) {
      float* const row = sums + r * kRows + v * kLanes;
      const Vec first = rounded(load(row), factors), second = rounded(load(row + kLanes), factors);
      const float scale = spec.row_scale ? static_cast<const float*>(args.row_scale.data)[m + r] : 1.0f;
      Vec gate = half_of_glu(spec, args, evens(first, second), j, scale);
      Vec other = half_of_glu(spec, args, odds(first, second), half + j, scale);
      gate = gate > most ? most : gate;
      other = (other < least ? least : other > most ? most : other) + limits.offset;
      Vec power = -sigmoid.beta * gate;
      epilogue::exp_in_sum<Vec, Unsigned>(power);
      store(row, (sigmoid.times_x ? gate : Vec{} + 1.0f) / (1.0f + power) * other);
    }
    column.to += (m * o.d->stride(0) + j) * (bits(o.d->dtype) / 8);
    column.step = o.d->stride(0) * (bits(o.d->dtype) / 8);
    store_any(Activation::none, column, sums + v * kLanes, height);
  }
}

void store(const Outputs& o, float* sums, std::int64_t block, std::int64_t m, std::int64_t height) {
  const EpilogueSpec& spec = *o.epilogue;
  const Operands& args = *o.operands;
  const std::int64_t n = block * kRows;
  const bool simple = !spec.glu && (spec.activation == Activation::none || spec.activation == Activation::relu ||
                                    spec.activation == Activation::clamp);
  const bool whole = o.n_begin <= n && o.n_end >= n + kRows;
  if (whole && spec.glu && epilogue::is_sigmoid(spec.activation) && !spec.gate && !spec.residual)
    return store_glu(o, sums, n, m, height);
  if (!simple || !whole) {
    for (std::int64_t r = 0; r < height; ++r) store_part(o, sums + r * kRows, n, kRows, m + r);
    return;
  }
  const int width = bits(o.d->dtype) / 8;
  const std::int64_t step = o.d->stride(0) * width;
  for (int v = 0; v < kVecs; ++v) {
    const std::int64_t i = n + v * kLanes;
    float* const at_channel = sums + v * kLanes;
    if (spec.row_scale)
      for (std::int64_t r = 0; r < height; ++r)
        store(at_channel + r * kRows, load(at_channel + r * kRows) * static_cast<const float*>(args.row_scale.data)[m + r]);
    if (spec.col_scale) {
      const Vec scale = load_as_floats(at(args.col_scale, i), DType::f32);
      for (std::int64_t r = 0; r < height; ++r) store(at_channel + r * kRows, load(at_channel + r * kRows) * scale);
    }
    const Column column{.spec = spec,
                        .args = args,
                        .n = i,
                        // −0 added leaves every number as it is.
                        .bias = spec.bias ? load_as_floats(at(args.bias, i), args.bias.dtype) : -Vec{},
                        .to = static_cast<std::byte*>(o.d->data) + (m * o.d->stride(0) + i) * width,
                        .step = step};
    if (spec.gate || spec.residual) {
      store_with_images(column, at_channel, m, height);
    } else if (spec.activation == Activation::relu) {
      store_any(Activation::relu, column, at_channel, height);
    } else if (spec.activation == Activation::clamp) {
      store_any(Activation::clamp, column, at_channel, height);
    } else {
      store_any(Activation::none, column, at_channel, height);
    }
  }
}

#endif
