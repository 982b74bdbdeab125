#include "bench/cublas.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

namespace nibble::cli {
namespace {

template <class Function>
bool find_symbol(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

bool Cublas::find(void* library) {
  return find_symbol(library, "cublasCreate_v2", create_) && find_symbol(library, "cublasGetVersion_v2", version_) &&
         find_symbol(library, "cublasSetStream_v2", set_stream_) &&
         find_symbol(library, "cublasSetWorkspace_v2", set_workspace_) && find_symbol(library, "cublasGemmEx", gemm_);
}

Cublas* Cublas::load() {
  static Cublas* loaded = []() -> Cublas* {
    void* library = nullptr;
    for (const char* file : {"libcublas.so.13", "libcublas.so.12"}) {
      if (library == nullptr) library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    }
    // Never freed: CUDA is gone before the destructors of statics run.
    static auto* const cublas = new Cublas;
    if (library == nullptr || !cublas->find(library)) return nullptr;
    auto workspace =
        DeviceMemory::allocate(std::size_t{32} << 20);  // what NVIDIA recommends for sm_90; captured work needs its own workspace
    if (!workspace.ok() || cublas->create_(&cublas->handle_) != CUBLAS_STATUS_SUCCESS) return nullptr;
    cublas->workspace_ = *std::move(workspace);
    int version = 0;
    cublas->version_(cublas->handle_, &version);
    cublas->description_ = fmt::format("cuBLAS {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
    return cublas;
  }();
  return loaded;
}

Status Cublas::linear(std::int64_t m, std::int64_t n, std::int64_t k, const void* a, const void* w, void* d,
                      cudaStream_t stream) {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), depth = static_cast<int>(k);
  const float one = 1.0f, zero = 0.0f;
  cublasStatus_t status = set_stream_(handle_, stream);
  if (status == CUBLAS_STATUS_SUCCESS) status = set_workspace_(handle_, workspace_.data(), workspace_.size());
  if (status == CUBLAS_STATUS_SUCCESS)  // cuBLAS is column-major: Dᵀ[N,M] = W[N,K] · Aᵀ[K,M]
    status = gemm_(handle_, CUBLAS_OP_T, CUBLAS_OP_N, columns, rows, depth, &one, w, CUDA_R_16F, depth, a, CUDA_R_16F, depth,
                   &zero, d, CUDA_R_16F, columns, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return {StatusCode::internal, fmt::format("cublasGemmEx of {}×{}×{} failed with status {}", m, n, k, static_cast<int>(status))};
}

}  // namespace nibble::cli
