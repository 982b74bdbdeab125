#include "emulator/conformance/launchers.hpp"

#include "kernels/cuda/simt/dense.cu"

namespace nibble::emulator {

int linear_dense_simt(const cuda::DenseTask& task) { return cuda::linear_dense_simt(task, nullptr); }
int dequantize_dense(const cuda::DenseWeight& weight, void* out, DType type, std::int64_t stride, bool transposed) {
  return cuda::dequantize_dense(weight, out, type, stride, transposed, nullptr);
}

}  // namespace nibble::emulator
