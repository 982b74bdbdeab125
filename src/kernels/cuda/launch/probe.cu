// A CTA reads 64 KB of consecutive memory; a thread issues 16 loads of 16 bytes, eight in flight. Many CTAs share an SM, so that hundreds
// of kilobytes per SM are in flight.
#include "kernels/cuda/launch/probe.hpp"

#include <cstdint>

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256, kInFlight = 8;
constexpr int kChunkVectors = kProbeChunk / sizeof(uint4);
static_assert(kChunkVectors % (kThreads * kInFlight) == 0);

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, std::uint32_t* sink) {
  const uint4* chunk = data + std::size_t{blockIdx.x} * kChunkVectors + threadIdx.x;
  std::uint32_t sum = 0;
  for (int i = 0; i < kChunkVectors; i += kThreads * kInFlight) {
    uint4 v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = __ldcs(chunk + i + j * kThreads);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x6e69626c) *sink = sum;  // of random bits, one thread in four billion
}

__global__ void __launch_bounds__(kThreads) fill_kernel(uint4* data) {
  uint4* chunk = data + std::size_t{blockIdx.x} * kChunkVectors;
  for (int i = threadIdx.x; i < kChunkVectors; i += kThreads) {
    std::uint32_t x = (blockIdx.x * kChunkVectors + i) * 2654435761u + 1;  // xorshift32
    const auto next = [&x] {
      x ^= x << 13, x ^= x >> 17, x ^= x << 5;
      return x;
    };
    uint4 v;
    v.x = next(), v.y = next(), v.z = next(), v.w = next();
    chunk[i] = v;
  }
}

// A vector a thread, as kernels of a model's other operators do.
__global__ void __launch_bounds__(kThreads) rewrite_kernel(uint4* data) {
  uint4& v = data[std::size_t{blockIdx.x} * kThreads + threadIdx.x];
  v = uint4{~v.x, ~v.y, ~v.z, ~v.w};
}

unsigned chunks(std::size_t bytes) { return static_cast<unsigned>(bytes / kProbeChunk); }

}  // namespace

cudaError_t fill_random(void* data, std::size_t bytes, cudaStream_t stream) {
  fill_kernel<<<chunks(bytes), kThreads, 0, stream>>>(static_cast<uint4*>(data));
  return cudaGetLastError();
}

cudaError_t read_once(const void* data, std::size_t bytes, void* sink, cudaStream_t stream) {
  read_kernel<<<chunks(bytes), kThreads, 0, stream>>>(static_cast<const uint4*>(data), static_cast<std::uint32_t*>(sink));
  return cudaGetLastError();
}

cudaError_t rewrite(void* data, std::size_t bytes, cudaStream_t stream) {
  rewrite_kernel<<<static_cast<unsigned>(bytes / (kThreads * sizeof(uint4))), kThreads, 0, stream>>>(static_cast<uint4*>(data));
  return cudaGetLastError();
}

}  // namespace nibble::cuda
