// A weight of 8-bit codes in gpu_w8n64k128.
#pragma once

#include <cstddef>
#include <vector>

#include "layouts/gpu_w8.hpp"

namespace nibble::emulator {

/// Memory for a weight, with its codes [n,k] in place.
template <class Byte>
std::vector<std::byte> packed_codes(const gpu_w8::Geometry& geometry, const std::vector<Byte>& codes) {
  std::vector<std::byte> packed(static_cast<std::size_t>(geometry.total_bytes()));
  for (int n = 0; n < geometry.n; ++n)
    for (int k = 0; k < geometry.k; ++k)
      packed[static_cast<std::size_t>(geometry.record(n / gpu_w8::kRows, k / gpu_w8::kChannels) +
                                      gpu_w8::place(n % gpu_w8::kRows, k % gpu_w8::kChannels))] =
          static_cast<std::byte>(codes[static_cast<std::size_t>(n * geometry.k + k)]);
  return packed;
}

}  // namespace nibble::emulator
