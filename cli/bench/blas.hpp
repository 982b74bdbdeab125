// OpenBLAS as a baseline for benchmarks: found at run time, so that the tool neither needs it nor pays for loading it.
#pragma once

#include <cstdint>
#include <string>

namespace nibble::cli {

class Blas {
 public:
  /// Null when this machine has no OpenBLAS. The thread count of the first call stays.
  static const Blas* load(int threads);

  /// D[M,N] = A[M,K] · W[N,K]ᵀ in f32, all dense and row-major.
  void linear(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* w, float* d) const;
  /// "OpenBLAS 0.3.21 ...", as the library describes itself.
  const std::string& description() const { return description_; }

 private:
  using Gemm = void(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  using Gemv = void(int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
  Gemm* gemm_ = nullptr;
  Gemv* gemv_ = nullptr;
  std::string description_;
};

}  // namespace nibble::cli
