// Included once per instruction set by outputs.cpp: the canonical epilogue of whole row blocks, the operations of epilogue::store_row in
// their order, a vector at a time. Activations with exp, tanh or erf, and partial blocks, use store_row itself.
#if NIBBLE_ISA <= NIBBLE_ISA_AVX2 || NIBBLE_ISA == NIBBLE_ISA_AVX512

inline const std::byte* at(const ConstTensorView& v, std::int64_t i) {
  return static_cast<const std::byte*>(v.data) + i * (bits(v.dtype) / 8);
}

/// The quotient, rounded once; inexact only where codes saturate.
struct Divisor {
  float by, inverse;
  bool usual;  // and its inverse is rounded to nearest, so that one step of correction gives the quotient's bits
};
inline Divisor divisor(float by) {
  std::uint32_t word;
  std::memcpy(&word, &by, 4);
  return {by, 1.0f / by, by > 0x1p-60f && by < 0x1p60f && (word & 0x7fffff) != 0x7fffff};
}
inline Vec divide(Vec x, const Divisor& d) {
#if NIBBLE_ISA == NIBBLE_ISA_AVX512 || NIBBLE_ISA == NIBBLE_ISA_AVX2
  if (d.usual) {
    const Vec q = x * d.inverse, by = Vec{} + d.by, inverse = Vec{} + d.inverse;
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
    const Vec rest = _mm512_fnmadd_ps(q, by, x), better = _mm512_fmadd_ps(rest, inverse, q);
#else
    const Vec rest = _mm256_fnmadd_ps(q, by, x), better = _mm256_fmadd_ps(rest, inverse, q);
#endif
    return better == better ? better : q;  // for infinities the remainder is NaN
  }
#endif
  return x / d.by;
}

/// epilogue::quantize.
inline void store_codes(std::byte* to, Vec x, const Divisor& scale, std::int32_t zero) {
  constexpr float kFar = 512;  // codes of larger magnitudes saturate for every zero point
#if NIBBLE_ISA == NIBBLE_ISA_AVX512
  const Vec most = Vec{} + kFar, least = Vec{} - kFar;
  Vec q;
  if (scale.usual) {  // the remainder of a limited quotient is no NaN, and larger quotients stay beyond the limit
    q = _mm512_maskz_min_ps(0xffff, _mm512_maskz_max_ps(0xffff, x * scale.inverse, least), most);
    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, Vec{} + scale.by, x), Vec{} + scale.inverse, q);
  } else {
    q = x / scale.by;
  }
  q = _mm512_maskz_min_ps(0xffff, _mm512_maskz_max_ps(0xffff, q, least), most);
  const auto code = reinterpret_cast<__m512i>(to_ints(q) + zero);
  const __m128i bytes = _mm512_maskz_cvtsepi32_epi8(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), code);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
  const Vec q = divide(x, scale);
  Vec near = q > -kFar ? q : Vec{} - kFar;
  near = near < kFar ? near : Vec{} + kFar;
  Ints code = to_ints(near) + zero;
  code = code > -128 ? code : splat(-128);
  code = code < 127 ? code : splat(127);
  code = q == q ? code : Ints{};
  const Bytes bytes = __builtin_convertvector(code, Bytes);
  std::memcpy(to, &bytes, sizeof bytes);
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

/// One column of vectors: bias, activation, conversion. `activation` and `out` are constants at every call.
NIBBLE_VARIANT void store_column(Activation activation, DType out, const EpilogueSpec& spec, Vec bias, const float* sums,
                                 std::int64_t height, std::byte* to, std::int64_t step) {
  const Divisor scale = divisor(spec.out_scale);
  const Vec low = Vec{} + spec.clamp_low, high = Vec{} + spec.clamp_high;
  for (std::int64_t r = 0; r < height; ++r, to += step) {
    Vec x = load(sums + r * kRows) + bias;
    if (activation == Activation::relu) x = relu(x);
    if (activation == Activation::clamp) x = x < low ? low : x > high ? high : x;
    switch (out) {
      case DType::f32: store(reinterpret_cast<float*>(to), x); break;
      case DType::f16: store_f16(to, x); break;
      case DType::bf16: store_bf16(to, x); break;
      default: store_codes(to, x, scale, spec.out_zero);
    }
  }
}

NIBBLE_VARIANT void store_any(Activation activation, DType out, const EpilogueSpec& spec, Vec bias, const float* sums,
                              std::int64_t height, std::byte* to, std::int64_t step) {
  switch (out) {
    case DType::f32: return store_column(activation, DType::f32, spec, bias, sums, height, to, step);
    case DType::f16: return store_column(activation, DType::f16, spec, bias, sums, height, to, step);
    case DType::bf16: return store_column(activation, DType::bf16, spec, bias, sums, height, to, step);
    default: return store_column(activation, DType::s8, spec, bias, sums, height, to, step);
  }
}

/// With gate, residual or both: the parts in their order, in place, then the conversion.
void store_with_images(const Outputs& o, Vec bias, float* column, std::int64_t i, std::int64_t m, std::int64_t height,
                       std::byte* to) {
  const EpilogueSpec& spec = *o.epilogue;
  const Operands& args = *o.operands;
  const Vec low = Vec{} + spec.clamp_low, high = Vec{} + spec.clamp_high;
  for (std::int64_t r = 0; r < height; ++r) {
    Vec x = load(column + r * kRows) + bias;
    if (spec.activation == Activation::relu) x = relu(x);
    if (spec.activation == Activation::clamp) x = x < low ? low : x > high ? high : x;
    if (spec.gate) x *= load_as_floats(at(args.gate, (m + r) * args.gate.stride(0) + i), args.gate.dtype);
    if (spec.residual) x += load_as_floats(at(args.residual, (m + r) * args.residual.stride(0) + i), args.residual.dtype);
    store(column + r * kRows, x);
  }
  store_any(Activation::none, o.d->dtype, spec, -Vec{}, column, height, to, o.d->stride(0) * (bits(o.d->dtype) / 8));
}

void store(const Outputs& o, float* sums, std::int64_t block, std::int64_t m, std::int64_t height) {
  const EpilogueSpec& spec = *o.epilogue;
  const Operands& args = *o.operands;
  const std::int64_t n = block * kRows;
  const bool simple =
      spec.activation == Activation::none || spec.activation == Activation::relu || spec.activation == Activation::clamp;
  if (!simple || o.n_begin > n || o.n_end < n + kRows) {
    for (std::int64_t r = 0; r < height; ++r) store_part(o, sums + r * kRows, n, kRows, m + r);
    return;
  }
  const int width = bits(o.d->dtype) / 8;
  const std::int64_t step = o.d->stride(0) * width;
  for (int v = 0; v < kVecs; ++v) {
    const std::int64_t i = n + v * kLanes;
    float* column = sums + v * kLanes;
    if (spec.row_scale)
      for (std::int64_t r = 0; r < height; ++r)
        store(column + r * kRows, load(column + r * kRows) * static_cast<const float*>(args.row_scale.data)[m + r]);
    if (spec.col_scale) {
      const Vec scale = load_as_floats(at(args.col_scale, i), DType::f32);
      for (std::int64_t r = 0; r < height; ++r) store(column + r * kRows, load(column + r * kRows) * scale);
    }
    // −0 added leaves every number as it is.
    const Vec bias = spec.bias ? load_as_floats(at(args.bias, i), args.bias.dtype) : -Vec{};
    std::byte* to = static_cast<std::byte*>(o.d->data) + (m * o.d->stride(0) + i) * width;
    if (spec.gate || spec.residual) {
      store_with_images(o, bias, column, i, m, height, to);
    } else if (spec.activation == Activation::relu) {
      store_any(Activation::relu, o.d->dtype, spec, bias, column, height, to, step);
    } else if (spec.activation == Activation::clamp) {
      store_any(Activation::clamp, o.d->dtype, spec, bias, column, height, to, step);
    } else {
      store_any(Activation::none, o.d->dtype, spec, bias, column, height, to, step);
    }
  }
}

#endif
