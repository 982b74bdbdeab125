// As OpenBLAS: as many threads as the benchmark uses, which sleep between calls.
#include "bench/dnnl.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace nibble::cli {
namespace {

/// dnnl_version_t begins so.
struct Version {
  int major, minor, patch;
};

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

const Dnnl* Dnnl::load(int threads) {
  static const Dnnl* loaded = [threads]() -> const Dnnl* {
    setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 1);
    setenv("OMP_WAIT_POLICY", "passive", 0);
    void* library = nullptr;
    for (const char* file : {"libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"}) {
      if (library == nullptr) library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return nullptr;
    static Dnnl dnnl;
    const Version* (*version)() = nullptr;
    find(library, "dnnl_version", version);
    find(library, "dnnl_sgemm", dnnl.gemm_);
    find(library, "dnnl_gemm_bf16bf16f32", dnnl.gemm_bf16_);
    find(library, "dnnl_gemm_s8s8s32", dnnl.gemm_s8_);
    if (version == nullptr || dnnl.gemm_ == nullptr || dnnl.gemm_s8_ == nullptr) return nullptr;
    dnnl.description_ = fmt::format("oneDNN {}.{}.{}", version()->major, version()->minor, version()->patch);
    return &dnnl;
  }();
  return loaded;
}

bool Dnnl::linear(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, const float* w, float* d) const {
  return gemm_('N', 'T', m, n, k, 1.0f, a, k, w, k, 0.0f, d, n) == 0;
}

bool Dnnl::linear_bf16(std::int64_t m, std::int64_t n, std::int64_t k, const void* a, const void* w, float* d) const {
  return gemm_bf16_ != nullptr && gemm_bf16_('N', 'T', m, n, k, 1.0f, a, k, w, k, 0.0f, d, n) == 0;
}

bool Dnnl::linear_s8(std::int64_t m, std::int64_t n, std::int64_t k, const std::int8_t* a, const std::int8_t* w,
                     std::int32_t* d) const {
  const std::int32_t offset = 0;
  return gemm_s8_('N', 'T', 'F', m, n, k, 1.0f, a, k, 0, w, k, 0, 0.0f, d, n, &offset) == 0;
}

}  // namespace nibble::cli
