// The plain layout: the canonical arrays one after the other. What the reference kernel reads.
#include <cstring>

#include "layouts/layout.hpp"

namespace nibble {
namespace {

std::size_t column_bytes(const WeightScheme& scheme, DType type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(storage_bytes(type, static_cast<std::uint64_t>(scheme.group.rows(n) * scheme.group.cols(k))));
}

std::size_t size(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(n * k) + column_bytes(scheme, scheme.scale, n, k) + column_bytes(scheme, zero_type, n, k);
}

// docs: begin pack
void pack(const QuantTensor& q, PackedWeightData& packed, Executor&) {
  std::byte* to = packed.bytes.data();
  for (std::int64_t row = 0; row < q.n; ++row)
    for (std::int64_t i = 0; i < q.k; ++i) {
      const std::int64_t k = packed.perm.empty() ? i : packed.perm[static_cast<std::size_t>(i)];
      to[row * q.k + i] = static_cast<std::byte>(q.codes[static_cast<std::size_t>(row * q.k + k)]);
    }
  to += q.n * q.k;
  std::memcpy(to, q.scales.bytes.data(), q.scales.bytes.size());
  if (!q.zeros.empty()) std::memcpy(to + q.scales.bytes.size(), q.zeros.bytes.data(), q.zeros.bytes.size());
}
// docs: end pack

void unpack(const PackedWeightData& packed, QuantTensor& q) {
  const std::byte* from = packed.bytes.data();
  for (std::int64_t row = 0; row < q.n; ++row)
    for (std::int64_t i = 0; i < q.k; ++i) {
      const std::int64_t k = packed.perm.empty() ? i : packed.perm[static_cast<std::size_t>(i)];
      q.codes[static_cast<std::size_t>(row * q.k + k)] = static_cast<std::uint8_t>(from[row * q.k + i]);
    }
  from += q.n * q.k;
  std::memcpy(q.scales.bytes.data(), from, q.scales.bytes.size());
  if (!q.zeros.empty()) std::memcpy(q.zeros.bytes.data(), from + q.scales.bytes.size(), q.zeros.bytes.size());
}

}  // namespace

// docs: begin row
const Layout kPlainLayout{.name = "plain",
                          .drawing = R"(
codes[N][K], one byte each (K in g_idx order) | scales[rows][groups] | zeros[rows][groups]?
)",
                          .size = size,
                          .pack = pack,
                          .unpack = unpack};
// docs: end row

}  // namespace nibble
