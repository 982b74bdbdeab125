// The limits of normalizing activations on the GPU (steps/norm_rows.cu).
#pragma once

#include <cstdint>

namespace nibble::cuda {

/// The most channels of a token: a CTA of 512 threads keeps it in registers, six vectors of eight channels a thread in 48 of its 128
/// registers.
constexpr int kNormThreads = 512, kNormVectors = 6;
constexpr std::int64_t kNormChannels = std::int64_t{8} * kNormVectors * kNormThreads;

/// The most channels of a token that is quantized next: two vectors of each of 1024 threads.
constexpr std::int64_t kNormCodesChannels = std::int64_t{8} * 2 * 1024;

}  // namespace nibble::cuda
