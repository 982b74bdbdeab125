// OpenBLAS is loaded with as many threads as the benchmark uses, told to stop spinning soon after a call: its workers would otherwise
// occupy the cores of the next contestant.
#include "bench/blas.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace nibble::cli {
namespace {

constexpr int kRowMajor = 101, kNoTranspose = 111, kTranspose = 112;

template <class Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

const Blas* Blas::load(int threads) {
  static const Blas* loaded = [threads]() -> const Blas* {
    setenv("OPENBLAS_NUM_THREADS", std::to_string(threads).c_str(), 1);
    setenv("OPENBLAS_THREAD_TIMEOUT", "20", 0);  // spin for 2^20 cycles, a fraction of a millisecond
    void* library = nullptr;
    for (const char* file : {"libopenblas.so.0", "libopenblas.so"}) {
      if (library == nullptr) library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return nullptr;
    static Blas blas;
    blas.gemm_ = find<Gemm>(library, "cblas_sgemm");
    blas.gemv_ = find<Gemv>(library, "cblas_sgemv");
    if (blas.gemm_ == nullptr || blas.gemv_ == nullptr) return nullptr;
    if (auto* config = find<char*()>(library, "openblas_get_config")) blas.description_ = config();
    while (!blas.description_.empty() && blas.description_.back() == ' ') blas.description_.pop_back();
    return &blas;
  }();
  return loaded;
}

void Blas::linear(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* w, float* d) const {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), depth = static_cast<int>(k);
  if (m == 1) return gemv_(kRowMajor, kNoTranspose, columns, depth, 1.0f, w, depth, a, 1, 0.0f, d, 1);
  gemm_(kRowMajor, kNoTranspose, kTranspose, rows, columns, depth, 1.0f, a, depth, w, depth, 0.0f, d, columns);
}

}  // namespace nibble::cli
