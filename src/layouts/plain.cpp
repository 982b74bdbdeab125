// The plain layout: the canonical arrays one after the other. What the reference kernel reads.
#include <cstring>

#include "layouts/layout.hpp"

namespace nibble {
namespace {

std::size_t column_bytes(const WeightScheme& scheme, DType type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(storage_bytes(type, static_cast<std::uint64_t>(scheme.group.rows(n) * scheme.group.cols(k))));
}

std::size_t size(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n * k * code_bytes(scheme.codes)) + column_bytes(scheme, scheme.scale, n, k) +
         column_bytes(scheme, zero_type, n, k);
}

// docs: begin pack
void pack(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed) {
  const std::int64_t row_bytes = q.k * code_bytes(q.scheme.codes);
  for (std::int64_t n = codes.begin; n < codes.end; ++n) {
    std::byte* const to = packed.bytes.data() + n * row_bytes;
    const std::uint8_t* const row = codes.row(n);
    if (packed.perm.empty() && !codes.pairs)
      std::memcpy(to, row, static_cast<std::size_t>(row_bytes));
    else
      for (std::int64_t i = 0; i < q.k; ++i)
        to[i] = static_cast<std::byte>(codes.code(row, packed.perm.empty() ? i : packed.perm[static_cast<std::size_t>(i)]));
  }
  if (codes.begin != 0) return;
  std::byte* const to = packed.bytes.data() + q.n * row_bytes;
  if (!q.scales.empty()) std::memcpy(to, q.scales.bytes.data(), q.scales.bytes.size());
  if (!q.zeros.empty()) std::memcpy(to + q.scales.bytes.size(), q.zeros.bytes.data(), q.zeros.bytes.size());
}
// docs: end pack

void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const std::byte* from = packed.bytes.data();
  if (packed.perm.empty())
    std::memcpy(q.codes.data(), from, q.codes.size());
  else
    for (std::int64_t row = 0; row < q.n; ++row)
      for (std::int64_t i = 0; i < q.k; ++i)
        q.codes[static_cast<std::size_t>(row * q.k + packed.perm[static_cast<std::size_t>(i)])] =
            static_cast<std::uint8_t>(from[row * q.k + i]);
  from += q.codes.size();
  if (!q.scales.empty()) std::memcpy(q.scales.bytes.data(), from, q.scales.bytes.size());
  if (!q.zeros.empty()) std::memcpy(q.zeros.bytes.data(), from + q.scales.bytes.size(), q.zeros.bytes.size());
}

}  // namespace

// docs: begin row
const Layout kPlainLayout{.name = "plain",
                          .drawing = R"(
codes[N][K], one byte each, of dense weights 2 or 4 (K in g_idx order) | scales[rows][groups] | zeros[rows][groups]?
)",
                          .size = size,
                          .pack = pack,
                          .unpack = unpack};
// docs: end row

}  // namespace nibble
