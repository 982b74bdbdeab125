// cuBLAS as a baseline for benchmarks on the GPU: found at run time, so that the tool neither needs it nor pays for loading it.
#pragma once

#include <cublas_v2.h>

#include <cstdint>
#include <string>

#include "nibble/cuda.hpp"

namespace nibble::cli {

class Cublas {
 public:
  /// Null when this machine has no cuBLAS.
  static Cublas* load();

  /// Enqueues D[M,N] = A[M,K] · W[N,K]ᵀ, all f16 in device memory, dense and row-major, accumulated in f32.
  Status linear(std::int64_t m, std::int64_t n, std::int64_t k, const void* a, const void* w, void* d, cudaStream_t stream);
  /// "cuBLAS 13.1.0".
  const std::string& description() const { return description_; }

 private:
  bool find(void* library);

  decltype(&cublasCreate_v2) create_ = nullptr;
  decltype(&cublasGetVersion_v2) version_ = nullptr;
  decltype(&cublasSetStream_v2) set_stream_ = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace_ = nullptr;
  // cublasGemmEx is overloaded.
  cublasStatus_t (*gemm_)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                          cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                          cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
  cublasHandle_t handle_ = nullptr;
  DeviceMemory workspace_;
  std::string description_;
};

}  // namespace nibble::cli
