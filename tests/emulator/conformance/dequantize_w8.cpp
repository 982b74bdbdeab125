#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/weights/dequantize_w8.cu"

int nibble::emulator::dequantize_w8(const cuda::W8Weight& weight, void* out, DType type, std::int64_t stride, bool transposed) {
  return cuda::dequantize_w8(weight, out, type, stride, transposed, nullptr);
}
