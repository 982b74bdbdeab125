// oneDNN as a baseline for benchmarks, found at run time like OpenBLAS: its products of dense matrices in f32, bf16 and int8.
#pragma once

#include <cstdint>
#include <string>

namespace nibble::cli {

class Dnnl {
 public:
  /// Null when this machine has no oneDNN. The thread count of the first call stays.
  static const Dnnl* load(int threads);

  /// D[M,N] = A[M,K] · W[N,K]ᵀ, all dense and row-major, D in f32, or s32 for integers. False where this version has no such product.
  bool linear(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* w, float* d) const;
  bool linear_bf16(std::int64_t m, std::int64_t n, std::int64_t k, const void* a, const void* w, float* d) const;
  bool linear_s8(std::int64_t m, std::int64_t n, std::int64_t k, const std::int8_t* a, const std::int8_t* w,
                 std::int32_t* d) const;
  bool has_bf16() const { return gemm_bf16_ != nullptr; }
  /// "oneDNN 2.6.3"
  const std::string& description() const { return description_; }

 private:
  using Dim = std::int64_t;
  template <class In>
  using Gemm = int(char, char, Dim, Dim, Dim, float, const In*, Dim, const In*, Dim, float, float*, Dim);
  using GemmS8 = int(char, char, char, Dim, Dim, Dim, float, const std::int8_t*, Dim, std::int8_t, const std::int8_t*, Dim,
                     std::int8_t, float, std::int32_t*, Dim, const std::int32_t*);
  Gemm<float>* gemm_ = nullptr;
  Gemm<void>* gemm_bf16_ = nullptr;
  GemmS8* gemm_s8_ = nullptr;
  std::string description_;
};

}  // namespace nibble::cli
