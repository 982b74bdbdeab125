// The dense tier of launch.hpp. cuBLASLt is not linked: it is loaded when a plan first asks for it, so that programs run without it and
// share a copy that a framework has already loaded.
//
//   W packed ──dequantize──▶ W [N,K] of the activations' type ──┐
//                                             x [M,K] ──────────┴─cuBLASLt─▶ D, or f32 sums ──epilogue_rows──▶ D
#include "kernels/cuda/launch/dense.hpp"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/steps/epilogue_rows.hpp"

namespace nibble::cuda {
namespace {

/// The functions of cuBLASLt that are used.
struct Library {
  decltype(&cublasLtGetCudartVersion) cuda_version = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulDescCreate) operation_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) operation_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) operation_set = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;

  bool find(void* library) {
    const auto found = [library](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return found("cublasLtGetCudartVersion", cuda_version) && found("cublasLtGetStatusString", status_string) &&
           found("cublasLtCreate", create) && found("cublasLtMatrixLayoutCreate", layout_create) &&
           found("cublasLtMatrixLayoutDestroy", layout_destroy) && found("cublasLtMatmulDescCreate", operation_create) &&
           found("cublasLtMatmulDescDestroy", operation_destroy) && found("cublasLtMatmulDescSetAttribute", operation_set) &&
           found("cublasLtMatmulPreferenceCreate", preference_create) &&
           found("cublasLtMatmulPreferenceDestroy", preference_destroy) &&
           found("cublasLtMatmulPreferenceSetAttribute", preference_set) && found("cublasLtMatmulAlgoGetHeuristic", heuristic) &&
           found("cublasLtMatmul", matmul);
  }
};

/// The library that the process has loaded already, or else the newest one for this driver.
Result<Library> load() {
  constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  std::string reasons;
  for (const int only_loaded : {RTLD_NOLOAD, 0})
    for (const char* name : kNames) {
      void* const handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL | only_loaded);
      if (handle == nullptr) continue;
      Library library;
      if (!library.find(handle))
        reasons = fmt::format("; {} lacks functions", name);
      else if (const std::size_t made_for = library.cuda_version(); made_for / 1000 > static_cast<std::size_t>(driver) / 1000)
        reasons = fmt::format("; {} is for CUDA {}, the driver for {}", name, made_for / 1000, driver / 1000);
      else
        return library;  // stays open
      (void)dlclose(handle);
    }
  return error(StatusCode::unsupported, "needs cuBLASLt: there is no libcublasLt.so.13 or libcublasLt.so.12 that can be loaded{}",
               reasons);
}

const Result<Library>& library() {
  static const Result<Library> kLibrary = load();
  return kLibrary;
}

Status status_of(cublasStatus_t code, std::string_view what) {
  if (code == CUBLAS_STATUS_SUCCESS) return {};
  return error(StatusCode::internal, "cuBLASLt: {}: {}", what, library()->status_string(code));
}

cudaDataType_t native(DType type) { return type == DType::f16 ? CUDA_R_16F : type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

/// D[M,N] = alpha · x[M,K] · Wᵀ, with everything that the choice of an algorithm depends on. cuBLASLt is column-major: Dᵀ[N,M] = W · xᵀ.
struct Shape {
  int device = 0;
  std::int64_t m = 1, n = 1, k = 1;
  std::int64_t w_stride = 0, x_stride = 0, d_stride = 0;  // elements between rows
  DType a_dtype = DType::f16, out = DType::f16;
  std::uint32_t x_alignment = 16, d_alignment = 16;  // bytes; W is aligned to 256

  auto operator<=>(const Shape&) const = default;
};

/// The alignment of a pointer, at most 16: no kernel gains from more.
std::uint32_t alignment(const void* p) {
  std::uint32_t bytes = 16;
  while (reinterpret_cast<std::uintptr_t>(p) % bytes != 0) bytes /= 2;
  return bytes;
}

template <class T>
using Owned = std::unique_ptr<T, cublasStatus_t (*)(T*)>;

/// The descriptors that cuBLASLt needs for a product.
struct Gemm {
  cublasLtHandle_t handle = nullptr;
  Owned<cublasLtMatmulDescOpaque_t> operation;
  Owned<cublasLtMatrixLayoutOpaque_t> w, x, d;
  cublasLtMatmulAlgo_t algorithm;
};

Result<Owned<cublasLtMatrixLayoutOpaque_t>> make_layout(DType type, std::int64_t rows, std::int64_t columns,
                                                        std::int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  NIBBLE_RETURN_IF_ERROR(status_of(library()->layout_create(&layout, native(type), static_cast<std::uint64_t>(rows),
                                                            static_cast<std::uint64_t>(columns), stride),
                                   "cublasLtMatrixLayoutCreate"));
  return Owned<cublasLtMatrixLayoutOpaque_t>(layout, library()->layout_destroy);
}

Result<Gemm> make_gemm(cublasLtHandle_t handle, const Shape& shape) {
  const Library& lib = *library();
  cublasLtMatmulDesc_t raw_operation = nullptr;
  NIBBLE_RETURN_IF_ERROR(
      status_of(lib.operation_create(&raw_operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate"));
  Owned<cublasLtMatmulDescOpaque_t> operation(raw_operation, lib.operation_destroy);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  NIBBLE_RETURN_IF_ERROR(
      status_of(lib.operation_set(operation.get(), CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)), "TRANSA"));
  NIBBLE_ASSIGN_OR_RETURN(auto w, make_layout(shape.a_dtype, shape.k, shape.n, shape.w_stride));
  NIBBLE_ASSIGN_OR_RETURN(auto x, make_layout(shape.a_dtype, shape.k, shape.m, shape.x_stride));
  NIBBLE_ASSIGN_OR_RETURN(auto d, make_layout(shape.out, shape.n, shape.m, shape.d_stride));

  cublasLtMatmulPreference_t raw_preference = nullptr;
  NIBBLE_RETURN_IF_ERROR(status_of(lib.preference_create(&raw_preference), "cublasLtMatmulPreferenceCreate"));
  const Owned<cublasLtMatmulPreferenceOpaque_t> preference(raw_preference, lib.preference_destroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    return status_of(lib.preference_set(preference.get(), what, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
  };
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{DenseScratch::kLibraryBytes}));
  // Split-K only with f32 partial sums in a fixed order: not in D, which may have 16 bits, and not by atomics.
  NIBBLE_RETURN_IF_ERROR(
      prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, std::uint32_t{256}));
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.x_alignment));
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.d_alignment));
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.d_alignment));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t asked =
      lib.heuristic(handle, operation.get(), w.get(), x.get(), d.get(), d.get(), preference.get(), 1, &best, &found);
  if (asked == CUBLAS_STATUS_SUCCESS && found == 0) return status_of(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm");
  NIBBLE_RETURN_IF_ERROR(status_of(asked, "cublasLtMatmulAlgoGetHeuristic"));
  NIBBLE_RETURN_IF_ERROR(status_of(best.state, "the algorithm"));
  return Gemm{handle, std::move(operation), std::move(w), std::move(x), std::move(d), best.algo};
}

/// Runs do not allocate, lock or search, except here: the algorithm depends on strides, pointers and M, which a plan does not know. The
/// first run of a shape searches; later ones look the algorithm up under a shared lock, without allocating. Entries have about a kilobyte
/// and are never removed.
Result<const Gemm*> gemm_for(const Shape& shape) {
  struct Known {
    std::shared_mutex mutex;
    std::map<int, cublasLtHandle_t> handles;  // by device
    std::map<Shape, Gemm> gemms;
  };
  static Known& known = *new Known;  // never freed: CUDA is gone before the destructors of statics run
  {
    const std::shared_lock lock(known.mutex);
    if (const auto it = known.gemms.find(shape); it != known.gemms.end()) return &it->second;
  }
  const std::unique_lock lock(known.mutex);
  cublasLtHandle_t& handle = known.handles[shape.device];
  if (handle == nullptr) NIBBLE_RETURN_IF_ERROR(status_of(library()->create(&handle), "cublasLtCreate"));
  if (const auto it = known.gemms.find(shape); it != known.gemms.end()) return &it->second;
  Result<Gemm> made = make_gemm(handle, shape);
  if (!made.ok())
    return made.status().with_context(fmt::format("M={} N={} K={} {} to {}, rows of x {} apart, of D {}", shape.m, shape.n,
                                                  shape.k, name(shape.a_dtype), name(shape.out), shape.x_stride, shape.d_stride));
  return &known.gemms.emplace(shape, *std::move(made)).first->second;
}

/// One product. `scratch`: DenseScratch::kLibraryBytes.
Status multiply(Shape shape, float alpha, const void* w, const void* x, void* d, void* scratch, cudaStream_t stream) {
  shape.x_alignment = alignment(x);
  shape.d_alignment = alignment(d);
  if (const cudaError_t code = cudaGetDevice(&shape.device); code != cudaSuccess)
    return error(StatusCode::internal, "CUDA: cudaGetDevice: {}", cudaGetErrorString(code));
  NIBBLE_ASSIGN_OR_RETURN(const Gemm* gemm, gemm_for(shape));
  const float beta = 0.0f;  // D is not read
  return status_of(
      library()->matmul(gemm->handle, gemm->operation.get(), &alpha, w, gemm->w.get(), x, gemm->x.get(), &beta, d, gemm->d.get(),
                        d, gemm->d.get(), &gemm->algorithm, scratch, DenseScratch::kLibraryBytes, stream),
      "cublasLtMatmul");
}

}  // namespace

Status dense_runs_here() { return library().status(); }

Status launch_linear_dense(const LinearTask& task, Stream stream) {
  NIBBLE_RETURN_IF_ERROR(dense_runs_here());
  const auto native_stream = static_cast<cudaStream_t>(stream.handle);
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const epilogue::Element& e = task.epilogue;
  const bool writes_d = dense_writes_d(e, task.a_dtype);
  const DenseScratch parts = dense_scratch(task.m, geo.n, geo.k, writes_d);
  std::byte* const scratch = static_cast<std::byte*>(task.scratch);

  DeviceWeight weight = task.weight;
  weight.scale2 = 1.0f;  // scale2 is part of acc_scale, and W is rounded without it
  NIBBLE_RETURN_IF_ERROR(launch_dequantize(weight, scratch + parts.w, task.a_dtype, parts.w_stride, false, stream));

  Shape shape{.m = task.m,
              .n = geo.n,
              .k = geo.k,
              .w_stride = parts.w_stride,
              .x_stride = task.x_stride,
              .d_stride = writes_d ? e.d_stride : parts.sums_stride,
              .a_dtype = task.a_dtype,
              .out = writes_d ? e.out : DType::f32};
  const float alpha = writes_d ? e.acc_scale : 1.0f;
  const std::byte* x = static_cast<const std::byte*>(task.x);
  std::byte* d = writes_d ? static_cast<std::byte*>(e.d) : scratch + parts.sums;
  const std::int64_t x_step = task.x_stride * bits(task.a_dtype) / 8, d_step = shape.d_stride * bits(shape.out) / 8;
  if (task.m > 1 && task.x_stride < geo.k) shape.m = 1;  // cuBLASLt refuses overlapping rows of x: multiply one row at a time
  if (shape.m == 1) shape.x_stride = geo.k, shape.d_stride = geo.n;  // strides of a single row are arbitrary
  for (std::int64_t row = 0; row < task.m; row += shape.m)
    NIBBLE_RETURN_IF_ERROR(multiply(shape, alpha, scratch + parts.w, x + row * x_step, d + row * d_step, scratch, native_stream));
  if (writes_d) return {};
  const cudaError_t code = epilogue_rows(e, reinterpret_cast<const float*>(scratch + parts.sums), task.m, static_cast<int>(geo.n),
                                         parts.sums_stride, native_stream);
  return code == cudaSuccess ? Status() : error(StatusCode::internal, "CUDA: epilogue_rows: {}", cudaGetErrorString(code));
}

}  // namespace nibble::cuda
