// cuda.hpp and launch.hpp over the CUDA runtime.
#include "kernels/cuda/launch/launch.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <span>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "kernels/cuda/launch/im2col.hpp"
#include "kernels/cuda/launch/probe.hpp"
#include "kernels/cuda/steps/decode_acts.hpp"
#include "kernels/cuda/steps/epilogue_rows.hpp"
#include "kernels/cuda/steps/experts.hpp"
#include "kernels/cuda/steps/fixed_point_acts.hpp"
#include "kernels/cuda/steps/im2col.hpp"
#include "kernels/cuda/steps/norm_rows.hpp"
#include "kernels/cuda/steps/pair_acts.hpp"
#include "kernels/cuda/steps/quantize_acts.hpp"
#include "kernels/cuda/steps/quantize_blocks.hpp"
#include "kernels/cuda/steps/recode_acts.hpp"
#include "kernels/cuda/steps/route.hpp"
#include "kernels/cuda/tasks/codes.hpp"
#include "kernels/cuda/tasks/conv.hpp"
#include "kernels/cuda/tasks/decode.hpp"
#include "kernels/cuda/tasks/dense.hpp"
#include "kernels/cuda/tasks/gemm.hpp"
#include "kernels/cuda/tasks/linear_simt.hpp"
#include "kernels/cuda/tasks/pairs.hpp"
#include "kernels/cuda/tasks/w8a8.hpp"
#include "kernels/cuda/tasks/wna8.hpp"
#include "kernels/cuda/weights/dequantize.cuh"
#include "kernels/cuda/weights/dequantize_packed.hpp"
#include "kernels/cuda/weights/dequantize_w8.hpp"
#include "kernels/cuda/weights/pack.hpp"

namespace nibble {
namespace {

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

Status no_device(cudaError_t code) {
  (void)cudaGetLastError();
  return error(StatusCode::unsupported, "no CUDA device: {}", cudaGetErrorString(code));
}

/// Ok, or the error of a CUDA call. An error that is not sticky is cleared, so that the next call does not return it.
Status status_of(cudaError_t code, std::string_view what) {
  if (code == cudaSuccess) return {};
  // Any call may be a program's first, and so the one that finds no GPU.
  if (code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver || code == cudaErrorStubLibrary) return no_device(code);
  (void)cudaGetLastError();
  const StatusCode status = code == cudaErrorMemoryAllocation ? StatusCode::io_error : StatusCode::internal;
  return error(status, "CUDA: {}: {}", what, cudaGetErrorString(code));
}

#define NIBBLE_CUDA_RETURN_IF_ERROR(call) NIBBLE_RETURN_IF_ERROR(status_of(call, #call))

/// Machine code for one compute capability runs on those of the same major version that are not older.
bool has_code(std::span<const int> built_for, int compute_capability) {
  return std::ranges::any_of(built_for, [compute_capability](int architecture) {
    return architecture / 10 == compute_capability / 10 && architecture <= compute_capability;
  });
}

/// The levels of this build's kernels that run on a device; sm90 is code for 9.0 alone.
std::uint32_t usable_isas(int compute_capability) {
  constexpr std::array kSimt{NIBBLE_SIMT_ARCHITECTURES};
  constexpr std::array kSm80{NIBBLE_SM80_ARCHITECTURES};
  std::uint32_t isas = 0;
  if (has_code(kSimt, compute_capability)) isas |= 1u << static_cast<int>(Isa::simt);
  if (has_code(kSm80, compute_capability)) isas |= 1u << static_cast<int>(Isa::sm80);
  if (compute_capability == 90) isas |= 1u << static_cast<int>(Isa::sm90);
  return isas;
}

/// cudaDeviceProp loses members between toolkits; attributes are stable and used where they exist.
Result<GpuInfo> query(int ordinal) {
  const auto attribute = [ordinal](cudaDeviceAttr which) {
    int value = 0;
    return status_of(cudaDeviceGetAttribute(&value, which, ordinal), "attribute").ok() ? value : 0;
  };
  cudaDeviceProp properties{};
  if (const cudaError_t code = cudaGetDeviceProperties(&properties, ordinal); code != cudaSuccess) return no_device(code);
  GpuInfo gpu;
  gpu.name = properties.name;
  gpu.ordinal = ordinal;
  gpu.compute_capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  gpu.sms = attribute(cudaDevAttrMultiProcessorCount);
  gpu.shared_bytes_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  gpu.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  gpu.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  // Two transfers a clock; of that an H200 reads 91 % (4470 of 4915 GB/s) at best.
  constexpr double kReadable = 0.91;
  gpu.read_gbytes_per_s =
      kReadable * 2e-6 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  constexpr double kGbytesPerSm = 20;  // if the driver does not say: what data-centre GPUs have, within a factor of two
  if (gpu.read_gbytes_per_s <= 0) gpu.read_gbytes_per_s = kGbytesPerSm * gpu.sms;
  gpu.isas = usable_isas(gpu.compute_capability);
  return gpu;
}

}  // namespace

Result<GpuInfo> this_gpu() {
  int ordinal = 0;
  if (const cudaError_t code = cudaGetDevice(&ordinal); code != cudaSuccess) return no_device(code);
  static std::mutex mutex;
  static std::map<int, GpuInfo> known;
  const std::scoped_lock lock(mutex);
  auto it = known.find(ordinal);
  if (it == known.end()) {
    NIBBLE_ASSIGN_OR_RETURN(GpuInfo gpu, query(ordinal));
    it = known.emplace(ordinal, std::move(gpu)).first;
  }
  return it->second;
}

Result<DeviceMemory> DeviceMemory::allocate(std::size_t bytes) {
  NIBBLE_RETURN_IF_ERROR(this_gpu().status());
  DeviceMemory memory;
  void* data = nullptr;
  NIBBLE_RETURN_IF_ERROR(status_of(cudaMalloc(&data, bytes), fmt::format("{} bytes of device memory", bytes)));
  memory.data_ = static_cast<std::byte*>(data);
  memory.size_ = bytes;
  return memory;
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

Status copy_to_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, native(stream)));
  return synchronize(stream);
}

Status copy_from_device(void* to, const void* from, std::size_t bytes, Stream stream) {
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, native(stream)));
  return synchronize(stream);
}

Status synchronize(Stream stream) {
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(native(stream)));
  return {};
}

Result<GpuReadProbe> GpuReadProbe::make() {
  NIBBLE_ASSIGN_OR_RETURN(const GpuInfo gpu, this_gpu());
  constexpr std::size_t kEnough = std::size_t{4} << 30;  // large enough that hits in L2 between passes do not matter
  const std::size_t bytes = std::min(kEnough, static_cast<std::size_t>(gpu.memory_bytes) / 8);
  GpuReadProbe probe;
  NIBBLE_ASSIGN_OR_RETURN(probe.memory_, DeviceMemory::allocate(bytes / cuda::kProbeChunk * cuda::kProbeChunk));
  NIBBLE_ASSIGN_OR_RETURN(probe.sink_, DeviceMemory::allocate(sizeof(std::uint32_t)));
  NIBBLE_CUDA_RETURN_IF_ERROR(cuda::fill_random(probe.memory_.data(), probe.memory_.size(), nullptr));
  return probe;
}

Result<double> GpuReadProbe::measure() {
  constexpr int kPasses = 4;
  struct Event {
    cudaEvent_t handle = nullptr;
    ~Event() { (void)cudaEventDestroy(handle); }
  } begin, end;
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventCreate(&begin.handle));
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventCreate(&end.handle));
  for (int pass = -1; pass < kPasses; ++pass) {  // the first one warms the GPU up
    if (pass == 0) NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventRecord(begin.handle, nullptr));
    NIBBLE_CUDA_RETURN_IF_ERROR(cuda::read_once(memory_.data(), memory_.size(), sink_.data(), nullptr));
  }
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventRecord(end.handle, nullptr));
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(end.handle));
  float ms = 0;
  NIBBLE_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, begin.handle, end.handle));
  return 1e-6 * kPasses * static_cast<double>(memory_.size()) / static_cast<double>(ms);
}

Status GpuReadProbe::separate(Stream stream) const {
  constexpr std::size_t kBytes = 4 * cuda::kProbeChunk;
  NIBBLE_CUDA_RETURN_IF_ERROR(cuda::rewrite(memory_.data(), kBytes, native(stream)));
  return {};
}

Status dequantize(const CheckpointTensors& from, const TensorView& out, bool transposed, Stream stream) {
  NIBBLE_RETURN_IF_ERROR(runs_here(Isa::sm80));  // compiled with that family
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"N", from.n}, {"K", from.k}}));
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"group", from.group}}, 0));
  NIBBLE_RETURN_IF_ERROR(check_elements("W", {from.n, from.k}));
  const std::int64_t rows = transposed ? from.k : from.n, cols = transposed ? from.n : from.k;
  if (out.rank != 2 || out.dim(0) != rows || out.dim(1) != cols || out.stride(1) != 1 || (rows > 1 && out.stride(0) != cols))
    return error(StatusCode::invalid_argument, "the output of W[{},{}] must be [{},{}] and dense", from.n, from.k, rows, cols);
  const cuda::CheckpointWeight weight{
      .format = from.format == CheckpointTensors::Format::awq ? cuda::CheckpointFormat::awq : cuda::CheckpointFormat::gptq,
      .bits = from.bits,
      .zeros_minus_one = from.zeros_minus_one,
      .scale = from.scale,
      .n = from.n,
      .k = from.k,
      .group = from.group,
      .qweight = from.qweight,
      .qzeros = from.qzeros,
      .scales = from.scales,
      .g_idx = from.g_idx};
  if (const char* reason = cuda::dequantize_refusal(weight, out.data, out.dtype); reason != nullptr)
    return error(StatusCode::invalid_argument, "W[{},{}] of {} bits, groups of {}, {} scales, to {}: {}", from.n, from.k,
                 from.bits, from.group, name(from.scale), name(out.dtype), reason);
  const auto order = transposed ? cuda::WeightOrder::kn : cuda::WeightOrder::nk;
  return status_of(static_cast<cudaError_t>(cuda::dequantize(weight, out.data, out.dtype, order, stream.handle)), "dequantize");
}

namespace cuda {

Result<int> current_device() {
  int ordinal = 0;
  if (const cudaError_t code = cudaGetDevice(&ordinal); code != cudaSuccess) return no_device(code);
  return ordinal;
}

Result<RingRoom> ring_room() {
  RingRoom room;
  NIBBLE_RETURN_IF_ERROR(status_of(ring_room_sm90(room), "ring_room_sm90"));
  return room;
}

Status launch_linear_sm90(const LinearTask& task, const DecodeConfig& config, Stream stream) {
  return status_of(linear_decode_sm90(task, config, native(stream)), "linear_decode_sm90");
}

Status launch_decode_joined_sm90(const LinearTask& first, const DecodeConfig& config, const LinearTask& second,
                                 const DecodeConfig& second_config, Stream stream) {
  return status_of(decode_joined_sm90(first, config, second, second_config, native(stream)), "decode_joined_sm90");
}

Status launch_linear_sm80(const LinearTask& task, int split, Stream stream) {
  return status_of(linear_decode_sm80(task, split, native(stream)), "linear_decode_sm80");
}

Status launch_linear_wgmma(const LinearTask& task, int tokens, int depth, int split, Stream stream) {
  const cudaError_t code = linear_gemm_sm90(task, {.tokens = tokens, .split = split, .depth = depth}, native(stream));
  if (code == cudaSuccess) return {};
  return status_of(code, fmt::format("linear_gemm_sm90 M={} N={} K={}, {} tokens, {} CTAs", task.m, task.weight.geometry.n,
                                     task.weight.geometry.k, tokens, split));
}

Status launch_wna8_sm80(const Wna8Task& task, int split, Stream stream) {
  return status_of(wna8_sm80_launcher(task)(task, split, native(stream)),
                   fmt::format("linear_wna8_sm80 M={} N={} K={}", task.m, task.weight.geometry.n, task.weight.geometry.k));
}

Status launch_gemm_sm80_experts(const LinearTask& task, int rows, Stream stream) {
  return status_of(linear_gemm_sm80_experts(task, rows, native(stream)),
                   fmt::format("linear_gemm_sm80_experts M={} N={} K={}, tiles of {} rows", task.m, task.weight.geometry.n,
                               task.weight.geometry.k, rows));
}

Status launch_w8a8_sm80_experts(const W8A8Task& task, int rows, Stream stream) {
  return status_of(linear_w8a8_sm80_experts(task, rows, native(stream)),
                   fmt::format("linear_w8a8_sm80_experts M={} N={} K={}, tiles of {} rows", task.m, task.weight.geometry.n,
                               task.weight.geometry.k, rows));
}

Status launch_wna8_sm80_experts(const Wna8Task& task, int rows, Stream stream) {
  return status_of(linear_wna8_sm80_experts(task, rows, native(stream)),
                   fmt::format("linear_wna8_sm80_experts M={} N={} K={}, tiles of {} rows", task.m, task.weight.geometry.n,
                               task.weight.geometry.k, rows));
}

Status launch_wna8_sm90(const Wna8Task& task, int tokens, int depth, int split, Stream stream) {
  const cudaError_t code = linear_wna8_sm90(task, {.tokens = tokens, .split = split, .depth = depth}, native(stream));
  if (code == cudaSuccess) return {};
  return status_of(code, fmt::format("linear_wna8_sm90 M={} N={} K={}, {} tokens, {} CTAs", task.m, task.weight.geometry.n,
                                     task.weight.geometry.k, tokens, split));
}

Status launch_wna8_decode_sm90(const Wna8DecodeTask& task, const DecodeConfig& config, Stream stream) {
  return status_of(linear_wna8_decode_sm90(task, config, native(stream)), "linear_wna8_decode_sm90");
}

static std::string describe(std::string_view what, const ConvTask& task) {
  const Patches& p = task.patches;
  return fmt::format("{}, {} images of {}x{}x{}, a filter of {}x{}", what, task.images, p.channels * p.groups, p.height, p.width,
                     p.filter_h, p.filter_w);
}

Status launch_conv_sm90(const ConvTask& task, int tokens, int depth, int split, Stream stream) {
  return status_of(conv_gemm_sm90(task, {.tokens = tokens, .split = split, .depth = depth}, native(stream)),
                   describe("conv_gemm_sm90", task));
}

Status launch_conv_sm80(const ConvTask& task, Stream stream) {
  return status_of(conv_gemm_sm80(task, native(stream)), describe("conv_gemm_sm80", task));
}

Status launch_conv_w8a8_sm90(const ConvTask& task, int tokens, int blocks, int split, Stream stream) {
  return status_of(conv_w8a8_sm90(task, {.tokens = tokens, .blocks = blocks, .split = split}, native(stream)),
                   describe("conv_w8a8_sm90", task));
}

Status launch_conv_wna8_sm90(const ConvTask& task, int tokens, int split, Stream stream) {
  return status_of(conv_wna8_sm90(task, {.tokens = tokens, .split = split}, native(stream)), describe("conv_wna8_sm90", task));
}

Status launch_conv_wna8_sm80(const ConvTask& task, Stream stream) {
  return status_of(conv_wna8_sm80(task, native(stream)), describe("conv_wna8_sm80", task));
}

Status launch_conv_w8a8_sm80(const ConvTask& task, Stream stream) {
  return status_of(conv_w8a8_sm80(task, native(stream)), describe("conv_w8a8_sm80", task));
}

Status launch_conv_direct(const ConvTask& task, Stream stream) {
  return status_of(conv_direct(task, native(stream)), describe("conv_direct", task));
}

Status launch_conv_direct_s8(const ConvTask& task, Stream stream) {
  return status_of(conv_direct_s8(task, native(stream)), describe("conv_direct_s8", task));
}

Status launch_gemm_sm80(const LinearTask& task, int split, Stream stream) {
  return status_of(linear_gemm_sm80(task, split, native(stream)), "linear_gemm_sm80");
}

Status launch_linear_simt(const LinearTask& task, Stream stream) {
  return status_of(linear_simt(task, native(stream)), "linear_simt");
}

Status launch_dense_simt(const DenseTask& task, Stream stream) {
  return status_of(linear_dense_simt(task, native(stream)),
                   fmt::format("linear_dense_simt M={} N={} K={}", task.m, task.weight.n, task.weight.k));
}

Status launch_quantize_acts(const QuantizeTask& task, Stream stream) {
  return status_of(quantize_acts(task, native(stream)),
                   fmt::format("quantize_acts M={} K={}, groups of {}", task.m, task.k, task.group));
}

Status launch_fixed_point_acts(const QuantizeTask& task, Stream stream) {
  return status_of(fixed_point_acts(task, native(stream)), fmt::format("fixed_point_acts M={} K={}", task.m, task.k));
}

Status copy_on_device(void* to, const void* from, std::size_t bytes) {
  return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr), fmt::format("a copy of {} bytes", bytes));
}

Status launch_route(const RouteTask& task, Stream stream) {
  return status_of(route_tokens(task, native(stream)), fmt::format("route of {} tokens, {} experts", task.tokens, task.experts));
}

Status launch_sort_rows(const SortTask& task, Stream stream) {
  return status_of(sort_rows(task, native(stream)), fmt::format("sort_rows of {} rows, {} experts", task.rows, task.experts));
}

Status launch_gather_expert_rows(const GatherRowsTask& task, Stream stream) {
  return status_of(gather_expert_rows(task, native(stream)),
                   fmt::format("gather_expert_rows M={} K={}", task.rows, task.columns));
}

Status launch_combine_rows(const CombineTask& task, Stream stream) {
  return status_of(combine_rows(task, native(stream)),
                   fmt::format("combine_rows of {} tokens, {} experts each, N={}", task.tokens, task.top_k, task.n));
}

Status launch_pair_acts(const QuantizeTask& task, Stream stream) {
  return status_of(pair_acts(task, native(stream)), fmt::format("pair_acts M={} K={}", task.m, task.k));
}

Status launch_pairs_sm90(const PairTask& task, int tokens, int depth, int split, Stream stream) {
  const cudaError_t code = linear_pairs_sm90(task, {.tokens = tokens, .split = split, .depth = depth}, native(stream));
  if (code == cudaSuccess) return {};
  return status_of(code, fmt::format("linear_pairs_sm90 M={} N={} K={}, {} tokens, {} CTAs", task.m, task.weight.geometry.n,
                                     task.weight.geometry.k, tokens, split));
}

Status launch_epilogue_rows(const epilogue::Element& epilogue, const StoredSums& sums, std::int64_t m, int n, Stream stream) {
  return status_of(epilogue_rows(epilogue, sums, m, n, native(stream)), fmt::format("epilogue_rows M={} N={}", m, n));
}

Status launch_im2col(const Im2colTask& task, Stream stream) {
  return status_of(im2col(task, native(stream)), fmt::format("im2col of {} patches", task.tokens));
}

Status launch_col2im(const Col2imTask& task, Stream stream) {
  return status_of(col2im(task, native(stream)), fmt::format("col2im of {} pixels, {} channels", task.tokens, task.channels));
}

Status launch_quantize_patches(const QuantizeTask& task, const PatchRows& patches, Stream stream) {
  return status_of(quantize_blocks(task, patches, native(stream)),
                   fmt::format("quantize_blocks of {} patches, K={}, blocks of {}", task.m, task.k, task.group));
}

Status launch_decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, std::int64_t k,
                          float* x, Stream stream) {
  return status_of(decode_acts(acts, type, perm, m, static_cast<int>(k), x, native(stream)),
                   fmt::format("decode_acts M={} K={}", m, k));
}

Status launch_code_halves(const CodeHalves& task, Stream stream) {
  return status_of(code_halves(task, native(stream)), fmt::format("code_halves M={} K={}", task.m, task.k));
}

Status launch_norm_rows(const NormTask& task, Stream stream) {
  return status_of(norm_rows(task, native(stream)), fmt::format("norm_rows M={} K={}", task.m, task.k));
}

Status launch_norm_codes(const NormTask& task, const QuantizeTask& codes, Stream stream) {
  return status_of(norm_codes(task, codes, native(stream)),
                   fmt::format("norm_codes M={} K={}, groups of {}", task.m, task.k, codes.group));
}

Status launch_recode_acts(const RecodeTask& task, Stream stream) {
  return status_of(recode_acts(task, native(stream)),
                   fmt::format("recode_acts of {} codes", task.images * task.rows * task.length));
}

Status launch_sum_codes(const QuantizedActs& acts, std::int64_t m, std::int64_t k, std::int32_t* sums, Stream stream) {
  return status_of(sum_codes(acts.codes, acts.pitch, m, k, sums, native(stream)), "sum_codes");
}

static std::string describe(std::string_view what, const W8A8Task& task) {
  return fmt::format("{} M={} N={} K={}", what, task.m, task.weight.geometry.n, task.weight.geometry.k);
}

Status launch_w8a8_simt(const W8A8Task& task, Stream stream) {
  return status_of(linear_w8a8_simt(task, native(stream)), describe("linear_w8a8_simt", task));
}

Status launch_w8a8_sm80(const W8A8Task& task, int split, Stream stream) {
  return status_of(linear_w8a8_sm80(task, split, native(stream)), describe("linear_w8a8_sm80", task));
}

Status launch_w8a8_sm90(const W8A8Task& task, int tokens, int blocks, int depth, int split, Stream stream) {
  const W8A8Config config{.tokens = tokens, .blocks = blocks, .depth = depth, .split = split};
  const cudaError_t code = linear_w8a8_sm90(task, config, native(stream));
  if (code == cudaSuccess) return {};
  return status_of(
      code, fmt::format("{}, {} tokens, {} row blocks, {} CTAs", describe("linear_w8a8_sm90", task), tokens, blocks, split));
}

Status launch_w8a8_sm90_floats(const W8A8Task& task, const FloatActs& floats, int blocks, Stream stream) {
  return status_of(linear_w8a8_sm90_floats(task, floats, blocks, native(stream)), describe("linear_w8a8_sm90_floats", task));
}

Status launch_codes_simt(const CodesTask& task, Stream stream) {
  return status_of(linear_codes_simt(task, native(stream)),
                   fmt::format("linear_codes_simt M={} N={} K={}", task.m, task.weight.geometry.n, task.weight.geometry.k));
}

Status launch_dequantize(const DeviceWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                         Stream stream) {
  return status_of(dequantize_packed(weight, out, out_type, out_stride, transposed, native(stream)), "dequantize_packed");
}

Status launch_dequantize_w8(const W8Weight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                            Stream stream) {
  return status_of(dequantize_w8(weight, out, out_type, out_stride, transposed, native(stream)), "dequantize_w8");
}

Status launch_dequantize_dense(const DenseWeight& weight, void* out, DType out_type, std::int64_t out_stride, bool transposed,
                               Stream stream) {
  return status_of(dequantize_dense(weight, out, out_type, out_stride, transposed, native(stream)), "dequantize_dense");
}

Status launch_pack(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type, const CanonicalArrays& from,
                   void* records, Stream stream) {
  return status_of(
      pack_gpu_tile(geometry, scheme, zero_type, from.codes, from.scales, from.zeros, from.perm, records, native(stream)),
      "pack_gpu_tile");
}

}  // namespace cuda
}  // namespace nibble
