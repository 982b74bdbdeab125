#include "kernels/cpu/tiles/decoder.hpp"

namespace nibble::cpu {

Decoder::Decoder(const PackedWeightData& packed, int rows)
    : geometry(tile::geometry(rows, packed.scheme, packed.zero_type, packed.n, packed.k)),
      scale_type(packed.scheme.scale),
      zero_type(packed.zero_type),
      zero(packed.scheme.zero),
      integer_codes(info(packed.scheme.codes).kind != DTypeKind::floating),
      e4m3_codes(packed.scheme.codes == DType::e4m3),
      floats(packed.scheme.is_dense() ? packed.scheme.codes : DType::none),
      bias(static_cast<float>(code_bias(packed.scheme.codes))),
      has_scale2(packed.scale2.has_value()),
      scale2(packed.scale2.value_or(1.0f)) {
  if (!integer_codes && floats == DType::none)
    for (int code = 0; code < 256; ++code)
      table[static_cast<std::size_t>(code)] = code_value(packed.scheme.codes, static_cast<std::uint8_t>(code));
}

}  // namespace nibble::cpu
