// The GPU layout gpu_rows: see gpu_rows.hpp.
#include "layouts/gpu_rows.hpp"

#include <fmt/format.h>

#include <cstring>

#include "layouts/layout.hpp"

namespace nibble {
namespace {

std::string refusal(const WeightScheme& scheme, DType, std::int64_t) {
  if (scheme.is_dense()) return {};
  return fmt::format("codes of type {} are none of f32, f16, bf16", name(scheme.codes));
}

std::size_t row_bytes(DType type, std::int64_t k) { return static_cast<std::size_t>(k * code_bytes(type)); }

std::size_t size(const WeightScheme& scheme, DType, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n) * row_bytes(scheme.codes, gpu_rows::stride(k));
}

void pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed) {
  const std::size_t bytes = row_bytes(q.scheme.codes, q.k), apart = row_bytes(q.scheme.codes, gpu_rows::stride(q.k));
  for (std::int64_t n = codes.begin; n < codes.end; ++n) {
    std::byte* const to = packed.bytes.data() + static_cast<std::size_t>(n) * apart;
    std::memcpy(to, codes.row(n), bytes);
    std::memset(to + bytes, 0, apart - bytes);
  }
}

void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const std::size_t bytes = row_bytes(q.scheme.codes, q.k), apart = row_bytes(q.scheme.codes, gpu_rows::stride(q.k));
  for (std::size_t n = 0; n < static_cast<std::size_t>(q.n); ++n)
    std::memcpy(q.codes.data() + n * bytes, packed.bytes.data() + n * apart, bytes);
}

}  // namespace

const Layout kGpuRowsLayout{.name = "gpu_rows",
                            .drawing = R"(
weight    = row 0 | row 1 | ...      of output channels: dense weights only
row       = W[n,0] | W[n,1] | ... | W[n,K-1] | zeros      up to a multiple of 8 numbers: f32, f16 or bf16
)",
                            .backend = Backend::cuda,
                            .refusal = refusal,
                            .size = size,
                            .pack = pack,
                            .unpack = unpack};

}  // namespace nibble
