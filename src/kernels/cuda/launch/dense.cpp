// The dense tier of launch.hpp, and products of codes to compare with. cuBLASLt is not linked: it is loaded when a plan first asks for it,
// so that programs run without it and share a copy that a framework has already loaded. A plan asks it for algorithms; runs neither search
// nor allocate.
//
//   W packed ──dequantize──▶ W [N,K] of the activations' type ──┐
//                                             x [M,K] ──────────┴─cuBLASLt─▶ D, or f32 sums ──epilogue_rows──▶ D
//
// A dense W of the activations' type is multiplied where it lies.
#include "kernels/cuda/launch/dense.hpp"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"

namespace nibble::cuda {
namespace {

/// The functions of cuBLASLt that are used.
struct Library {
  decltype(&cublasLtGetCudartVersion) cuda_version = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
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
           found("cublasLtCreate", create) && found("cublasLtMatrixLayoutInit_internal", layout_init) &&
           found("cublasLtMatmulDescCreate", operation_create) && found("cublasLtMatmulDescDestroy", operation_destroy) &&
           found("cublasLtMatmulDescSetAttribute", operation_set) && found("cublasLtMatmulPreferenceCreate", preference_create) &&
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

cudaDataType_t native(DType type) {
  switch (type) {
    case DType::f16: return CUDA_R_16F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::s8: return CUDA_R_8I;
    case DType::s32: return CUDA_R_32I;
    case DType::e4m3: return CUDA_R_8F_E4M3;
    default: return CUDA_R_32F;
  }
}

/// The alignment of rows of x and D of which the fastest kernels of cuBLASLt make use.
constexpr int kVector = 16;  // bytes
bool aligned(const void* p, std::int64_t row_bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % kVector == 0 && row_bytes % kVector == 0;
}

template <class T>
using Owned = std::unique_ptr<T, cublasStatus_t (*)(T*)>;

/// x · Wᵀ, in cuBLASLt's order Dᵀ = W · xᵀ; the types of its sums and of alpha.
Result<Owned<cublasLtMatmulDescOpaque_t>> make_operation(cublasComputeType_t sums, cudaDataType_t alpha) {
  cublasLtMatmulDesc_t raw = nullptr;
  NIBBLE_RETURN_IF_ERROR(status_of(library()->operation_create(&raw, sums, alpha), "cublasLtMatmulDescCreate"));
  Owned<cublasLtMatmulDescOpaque_t> operation(raw, library()->operation_destroy);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  NIBBLE_RETURN_IF_ERROR(
      status_of(library()->operation_set(raw, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)), "TRANSA"));
  return operation;
}

/// A matrix as cuBLASLt describes it, on the stack. It is column-major: a matrix [rows, columns] here is [columns, rows] there.
struct Matrix {
  cublasLtMatrixLayoutOpaque_t layout;

  Matrix(DType type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    (void)library()->layout_init(&layout, sizeof layout, native(type), static_cast<std::uint64_t>(columns),
                                 static_cast<std::uint64_t>(rows), stride);  // fails for a wrong size only
  }
};

/// The handle of a device; never destroyed: CUDA is gone before the destructors of statics run.
Result<cublasLtHandle_t> handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::scoped_lock lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) NIBBLE_RETURN_IF_ERROR(status_of(library()->create(&handle), "cublasLtCreate"));
  return handle;
}

}  // namespace

using Algorithm = std::optional<cublasLtMatmulAlgo_t>;  // none: cuBLASLt has none

/// Algorithms for M of each power of two, because the best one depends on M: entry i is for up to 2^i rows.
struct DenseConfig {
  struct Algorithms {
    Algorithm aligned, any;  // rows of x and D at multiples of kVector; of their elements
  };
  cublasLtHandle_t handle = nullptr;
  Owned<cublasLtMatmulDescOpaque_t> operation;
  std::vector<Algorithms> algorithms;

  const Algorithms& at(std::int64_t m) const {
    return algorithms[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(m - 1)))];
  }
};

namespace {

/// What a search prefers, beside the size of the workspace.
using Preferences = std::vector<std::pair<cublasLtMatmulPreferenceAttributes_t, std::uint32_t>>;

/// The algorithm that cuBLASLt puts first for these matrices, if it has one.
Result<Algorithm> best_algorithm(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, Matrix& w, Matrix& x, Matrix& d,
                                 const Preferences& preferences) {
  const Library& lib = *library();
  cublasLtMatmulPreference_t raw = nullptr;
  NIBBLE_RETURN_IF_ERROR(status_of(lib.preference_create(&raw), "cublasLtMatmulPreferenceCreate"));
  const Owned<cublasLtMatmulPreferenceOpaque_t> preference(raw, lib.preference_destroy);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
    return status_of(lib.preference_set(raw, what, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
  };
  NIBBLE_RETURN_IF_ERROR(prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{DenseScratch::kLibraryBytes}));
  for (const auto& [what, value] : preferences) NIBBLE_RETURN_IF_ERROR(prefer(what, value));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t asked =
      lib.heuristic(handle, operation, &w.layout, &x.layout, &d.layout, &d.layout, preference.get(), 1, &best, &found);
  if (asked == CUBLAS_STATUS_NOT_SUPPORTED || (asked == CUBLAS_STATUS_SUCCESS && found == 0)) return Algorithm();
  NIBBLE_RETURN_IF_ERROR(status_of(asked, "cublasLtMatmulAlgoGetHeuristic"));
  NIBBLE_RETURN_IF_ERROR(status_of(best.state, "the algorithm"));
  return Algorithm(best.algo);
}

/// The algorithm for D[M,N] = alpha · x[M,K] · Wᵀ, if there is one. `alignment`: bytes of the rows of x and D.
Result<Algorithm> find_algorithm(const DenseConfig& config, const DenseSpec& spec, std::int64_t m, int alignment) {
  const DType out = spec.writes_d ? spec.out : DType::f32;
  const DenseScratch scratch = dense_scratch(m, spec.n, spec.k, spec.writes_d, spec.in_place);
  const auto row = [&](std::int64_t elements, DType type) {  // an odd stride where rows begin anywhere
    const std::int64_t vector = kVector * 8 / bits(type);
    return alignment == kVector ? (elements + vector - 1) / vector * vector : elements | 1;
  };
  Matrix w(spec.a_dtype, spec.n, spec.k, scratch.w_stride), x(spec.a_dtype, m, spec.k, row(spec.k, spec.a_dtype)),
      d(out, m, spec.n, row(spec.n, out));
  const auto bytes = static_cast<std::uint32_t>(alignment);
  const std::uint32_t out_bytes = spec.writes_d ? bytes : kVector;  // sums are in the workspace
  // Split-K only with f32 partial sums in a fixed order: not in D, which may have 16 bits, and not by atomics.
  return best_algorithm(config.handle, config.operation.get(), w, x, d,
                        {{CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE},
                         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, spec.in_place ? std::uint32_t{kVector} : 256},
                         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes},
                         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_bytes},
                         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_bytes}});
}

/// A product of a run: x and D begin `x_stride` and `d_stride` elements apart.
struct Product {
  std::int64_t m, n, k, w_stride, x_stride, d_stride;
  DType a_dtype, out;
  const void *w, *x;
  void* d;
  float alpha;
};

/// `scratch`: DenseScratch::kLibraryBytes.
Status multiply(const DenseConfig& config, const Product& p, void* scratch, cudaStream_t stream) {
  const bool vectors = aligned(p.x, p.x_stride * bits(p.a_dtype) / 8) && aligned(p.d, p.d_stride * bits(p.out) / 8);
  const DenseConfig::Algorithms& algorithms = config.at(p.m);
  const auto& algorithm = vectors && algorithms.aligned ? algorithms.aligned : algorithms.any;
  if (!algorithm)
    return error(StatusCode::unsupported,
                 "cuBLASLt has no algorithm for M={} N={} K={} {} to {} with rows of x {} apart and of D {}", p.m, p.n, p.k,
                 name(p.a_dtype), name(p.out), p.x_stride, p.d_stride);
  Matrix w(p.a_dtype, p.n, p.k, p.w_stride), x(p.a_dtype, p.m, p.k, p.x_stride), d(p.out, p.m, p.n, p.d_stride);
  const float beta = 0.0f;  // D is not read
  return status_of(library()->matmul(config.handle, config.operation.get(), &p.alpha, p.w, &w.layout, p.x, &x.layout, &beta, p.d,
                                     &d.layout, p.d, &d.layout, &*algorithm, scratch, DenseScratch::kLibraryBytes, stream),
                   "cublasLtMatmul");
}

}  // namespace

Status dense_runs_here() { return library().status(); }

Result<std::shared_ptr<const DenseConfig>> configure_dense(const DenseSpec& spec) {
  NIBBLE_RETURN_IF_ERROR(dense_runs_here());
  NIBBLE_ASSIGN_OR_RETURN(const int device, current_device());
  NIBBLE_ASSIGN_OR_RETURN(const cublasLtHandle_t handle, handle_of(device));
  NIBBLE_ASSIGN_OR_RETURN(auto operation, make_operation(CUBLAS_COMPUTE_32F, CUDA_R_32F));
  auto config = std::make_shared<DenseConfig>(DenseConfig{.handle = handle, .operation = std::move(operation), .algorithms = {}});
  for (std::int64_t m = 1;; m = std::min(2 * m, spec.m)) {
    NIBBLE_ASSIGN_OR_RETURN(const auto vectors, find_algorithm(*config, spec, m, kVector));
    NIBBLE_ASSIGN_OR_RETURN(const auto any, find_algorithm(*config, spec, m, bits(spec.a_dtype) / 8));
    config->algorithms.push_back({vectors, any});
    if (m == spec.m) break;
  }
  return std::shared_ptr<const DenseConfig>(std::move(config));
}

namespace {

/// Multiplies a W of the type of x; the scratch is laid out as `parts` says.
Status multiply_dense(const DenseTask& task, const DenseScratch& parts, const DenseConfig& config, Stream stream) {
  const auto native_stream = static_cast<cudaStream_t>(stream.handle);
  const DenseWeight& w = task.weight;
  const epilogue::Element& e = task.epilogue;
  const bool writes_d = dense_writes_d(e, task.a_dtype);
  std::byte* const scratch = static_cast<std::byte*>(task.scratch);
  const std::byte* x = static_cast<const std::byte*>(task.x);
  std::byte* d = writes_d ? static_cast<std::byte*>(e.d) : scratch + parts.sums;
  Product product{.m = task.m,
                  .n = w.n,
                  .k = w.k,
                  .w_stride = w.stride,
                  .x_stride = task.x_stride,
                  .d_stride = writes_d ? e.d_stride : parts.sums_stride,
                  .a_dtype = task.a_dtype,
                  .out = writes_d ? e.out : DType::f32,
                  .w = w.rows,
                  .x = x,
                  .d = d,
                  .alpha = writes_d ? e.acc_scale : 1.0f};
  const std::int64_t x_step = task.x_stride * bits(task.a_dtype) / 8, d_step = product.d_stride * bits(product.out) / 8;
  if (task.m > 1 && task.x_stride < w.k) product.m = 1;  // cuBLASLt refuses overlapping rows of x: multiply one row at a time
  if (product.m == 1) product.x_stride = w.k, product.d_stride = w.n;  // strides of a single row are arbitrary
  for (std::int64_t row = 0; row < task.m; row += product.m) {
    product.x = x + row * x_step;
    product.d = d + row * d_step;
    NIBBLE_RETURN_IF_ERROR(multiply(config, product, scratch, native_stream));
  }
  if (writes_d) return {};
  return launch_epilogue_rows(e, {.data = reinterpret_cast<const float*>(scratch + parts.sums), .stride = parts.sums_stride},
                              task.m, static_cast<int>(w.n), stream);
}

}  // namespace

Status launch_linear_dense(const LinearTask& task, const DenseConfig& config, Stream stream) {
  const gpu_tile::Geometry& geo = task.weight.geometry;
  const DenseScratch parts = dense_scratch(task.m, geo.n, geo.k, dense_writes_d(task.epilogue, task.a_dtype));
  std::byte* const rows = static_cast<std::byte*>(task.scratch) + parts.w;
  DeviceWeight weight = task.weight;
  weight.scale2 = 1.0f;  // scale2 is part of acc_scale, and W is rounded without it
  NIBBLE_RETURN_IF_ERROR(launch_dequantize(weight, rows, task.a_dtype, parts.w_stride, false, stream));
  return multiply_dense({.weight = {.rows = rows, .type = task.a_dtype, .n = geo.n, .k = geo.k, .stride = parts.w_stride},
                         .m = task.m,
                         .a_dtype = task.a_dtype,
                         .x = task.x,
                         .x_stride = task.x_stride,
                         .scratch = task.scratch,
                         .epilogue = task.epilogue},
                        parts, config, stream);
}

Status launch_dense_weight(const DenseTask& task, const DenseConfig& config, Stream stream) {
  const bool writes_d = dense_writes_d(task.epilogue, task.a_dtype);
  return multiply_dense(task, dense_scratch(task.m, task.weight.n, task.weight.k, writes_d, true), config, stream);
}

}  // namespace nibble::cuda

namespace nibble {

struct GpuCodesProduct::Impl {
  cublasLtHandle_t handle;
  cuda::Owned<cublasLtMatmulDescOpaque_t> operation;
  mutable cuda::Matrix w, x, d;  // cuBLASLt takes them without const
  cublasLtMatmulAlgo_t algorithm;
  bool sums;  // D is s32, and so are alpha and beta
  DeviceMemory workspace;
};

Result<GpuCodesProduct> GpuCodesProduct::make(std::int64_t m, std::int64_t n, std::int64_t k, DType codes, DType out,
                                              Accumulation accumulation) {
  const bool integers = codes == DType::s8, sums = integers && out != DType::s8;
  if (!integers && !is_compute_float(out))
    return error(StatusCode::unsupported, "cuBLASLt does not multiply {} to {}", name(codes), name(out));
  NIBBLE_RETURN_IF_ERROR(cuda::dense_runs_here());
  NIBBLE_ASSIGN_OR_RETURN(const int device, cuda::current_device());
  NIBBLE_ASSIGN_OR_RETURN(const cublasLtHandle_t handle, cuda::handle_of(device));
  NIBBLE_ASSIGN_OR_RETURN(
      auto operation, cuda::make_operation(integers ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F, sums ? CUDA_R_32I : CUDA_R_32F));
  if (const std::int8_t fast = accumulation == Accumulation::fast; !integers)
    NIBBLE_RETURN_IF_ERROR(cuda::status_of(
        cuda::library()->operation_set(operation.get(), CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast), "FAST_ACCUM"));
  cuda::Matrix w(codes, n, k, k), x(codes, m, k, k), d(sums ? DType::s32 : out, m, n, n);
  NIBBLE_ASSIGN_OR_RETURN(const cuda::Algorithm algorithm, cuda::best_algorithm(handle, operation.get(), w, x, d, {}));
  if (!algorithm)
    return error(StatusCode::unsupported, "cuBLASLt has no algorithm for M={} N={} K={} {} to {}", m, n, k, name(codes),
                 name(out));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory workspace, DeviceMemory::allocate(cuda::DenseScratch::kLibraryBytes));
  GpuCodesProduct product;
  product.impl_ =
      std::make_shared<const Impl>(Impl{handle, std::move(operation), w, x, d, *algorithm, sums, std::move(workspace)});
  return product;
}

Status GpuCodesProduct::run(const void* a, const void* w, void* d, Stream stream) const {
  const Impl& p = *impl_;
  const float one = 1, zero = 0;
  const std::int32_t integer_one = 1, integer_zero = 0;
  const auto alpha = p.sums ? static_cast<const void*>(&integer_one) : &one,
             beta = p.sums ? static_cast<const void*>(&integer_zero) : &zero;
  return cuda::status_of(cuda::library()->matmul(p.handle, p.operation.get(), alpha, w, &p.w.layout, a, &p.x.layout, beta, d,
                                                 &p.d.layout, d, &p.d.layout, &p.algorithm, p.workspace.data(),
                                                 p.workspace.size(), static_cast<cudaStream_t>(stream.handle)),
                         "cublasLtMatmul");
}

}  // namespace nibble
