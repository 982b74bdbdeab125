// Which D and epilogues the fast store of the wgmma kernels (half_out.cuh) supports.
#pragma once

#include <cstdint>

#include "epilogue/element.hpp"

namespace nibble::cuda {

/// The contiguous dimension of D, and the number of pieces in which 16 bytes are stored: two where the pixels are a multiple of 4 but not
/// of 8.
enum class HalfOut : std::uint8_t { no, channels, pixels, pixel_fours };

/// Whether the epilogue is a bias at most.
inline bool is_bias(const epilogue::Element& e) {
  return e.acc_scale == 1.0f && e.unscaled() && e.activation == Activation::none && e.glu_half == 0 && e.gate.data == nullptr &&
         e.residual.data == nullptr;
}
/// The same, and D is of 16-bit floats.
inline bool is_short(const epilogue::Element& e) { return is_bias(e) && (e.out == DType::f16 || e.out == DType::bf16); }
/// Whether D [M, n] is of codes of 8 bits with one scale, after a bias at most, and 16 bytes of it can be stored at a time. The scale is known
/// here, and no product with it or its inverse is beyond f32.
inline bool stores_codes(const epilogue::Element& e, std::int64_t n) {
  const bool whole = n % 16 == 0 && e.d_stride % 16 == 0 && reinterpret_cast<std::uintptr_t>(e.d) % 16 == 0;
  const bool known = e.out_scales == nullptr && e.out_zeros == nullptr && e.out_scale > 1e-25f && e.out_scale < 1e25f;
  return is_bias(e) && (e.out == DType::s8 || e.out == DType::u8) && known && whole;
}
/// Whether D [M, n] is of f32, after a bias at most, and 8 bytes of it can be stored at a time.
inline bool stores_floats(const epilogue::Element& e, std::int64_t n) {
  return is_bias(e) && e.out == DType::f32 && n % 2 == 0 && e.d_stride % 2 == 0 && reinterpret_cast<std::uintptr_t>(e.d) % 8 == 0;
}
/// The kind that an epilogue and its D [M, n] allow.
inline HalfOut half_out(const epilogue::Element& e, std::int64_t n) {
  const bool whole = n % 8 == 0 && e.d_stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(e.d) % 16 == 0;
  return is_short(e) && whole ? HalfOut::channels : HalfOut::no;
}
/// The same for a D of images, whose channels are `channel` elements apart.
inline HalfOut half_out(const epilogue::Element& e, std::int64_t image, std::int64_t channel, int pixels) {
  const auto multiple = [&](int of) {
    return image % of == 0 && channel % of == 0 && pixels % of == 0 &&
           reinterpret_cast<std::uintptr_t>(e.d) % (2 * static_cast<unsigned>(of)) == 0;
  };
  if (!is_short(e)) return HalfOut::no;
  return multiple(8) ? HalfOut::pixels : multiple(4) ? HalfOut::pixel_fours : HalfOut::no;
}

}  // namespace nibble::cuda
