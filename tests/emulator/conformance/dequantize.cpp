#include "emulator/conformance/launchers.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/weights/dequantize_packed.cu"

int nibble::emulator::dequantize_packed(const cuda::DeviceWeight& weight, void* out, DType type, std::int64_t stride,
                                        bool transposed) {
  return cuda::dequantize_packed(weight, out, type, stride, transposed, nullptr);
}
