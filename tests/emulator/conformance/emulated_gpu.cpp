// cuda.hpp and launch.hpp on the emulated GPU, in the place of no_cuda.cpp: device memory is the host's, a launch runs to its end before it
// returns, and only the kernels of every GPU run. With NIBBLE_EMULATED_GPU=80 or 75 in the environment it is of compute capability 8.0 or 7.5,
// and sm_80's kernels for floats, for codes, for experts and for convolutions run, too. Plans, packing, workspaces and the functions of kernel rows are the library's own.
#include <cstdlib>
#include <cstring>

#include "conformance/rows.hpp"
#include "emulator/conformance/launchers.hpp"
#include "emulator/conformance/status.hpp"
#include "emulator/gpu.hpp"

namespace nibble {

const bool kGpuRowsAreBuilt = true;

namespace {

Status not_emulated() { return {StatusCode::unsupported, "not on the emulated GPU"}; }
using emulator::status_of;

}  // namespace

Result<GpuInfo> this_gpu() {
  const bool has_tensor_cores = emulator::asked_capability() != 0;
  return GpuInfo{.name = "emulated",
                 .compute_capability = has_tensor_cores ? emulator::asked_capability() : 75,
                 .sms = emulator::kMultiprocessors,
                 .shared_bytes_per_block = emulator::most_shared_bytes(),
                 .l2_bytes = 1 << 20,
                 .memory_bytes = std::int64_t{1} << 34,
                 .read_gbytes_per_s = 100,
                 .isas = 1U << static_cast<int>(Isa::simt) | (has_tensor_cores ? 1U << static_cast<int>(Isa::sm80) : 0U)};
}

Result<DeviceMemory> DeviceMemory::allocate(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;  // cudaMalloc's
  DeviceMemory memory;
  memory.data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
  memory.size_ = bytes;
  return memory;
}
DeviceMemory::~DeviceMemory() { std::free(data_); }
Status copy_to_device(void* to, const void* from, std::size_t bytes, Stream) { return std::memcpy(to, from, bytes), Status(); }
Status copy_from_device(void* to, const void* from, std::size_t bytes, Stream) { return std::memcpy(to, from, bytes), Status(); }
Status synchronize(Stream) { return {}; }
Result<GpuReadProbe> GpuReadProbe::make() { return not_emulated(); }
Result<double> GpuReadProbe::measure() { return not_emulated(); }
Status GpuReadProbe::separate(Stream) const { return not_emulated(); }
Result<GpuCodesProduct> GpuCodesProduct::make(std::int64_t, std::int64_t, std::int64_t, DType, DType, Accumulation) {
  return not_emulated();
}
Status GpuCodesProduct::run(const void*, const void*, void*, Stream) const { return not_emulated(); }
Status dequantize(const CheckpointTensors&, const TensorView&, bool, Stream) { return not_emulated(); }

namespace cuda {

Result<int> current_device() { return 0; }
Result<RingRoom> ring_room() { return not_emulated(); }
Status launch_linear_sm90(const LinearTask&, const DecodeConfig&, Stream) { return not_emulated(); }
Status launch_decode_joined_sm90(const LinearTask&, const DecodeConfig&, const LinearTask&, const DecodeConfig&, Stream) {
  return not_emulated();
}
Status launch_linear_sm80(const LinearTask& task, int split, Stream) {
  return status_of(emulator::linear_decode_sm80(task, split));
}
Status launch_linear_wgmma(const LinearTask&, int, int, int, Stream) { return not_emulated(); }
Status launch_wna8_sm80(const Wna8Task& task, int split, Stream) { return status_of(emulator::linear_wna8_sm80(task, split)); }
Status launch_gemm_sm80_experts(const LinearTask& task, int rows, Stream) {
  return status_of(emulator::linear_gemm_sm80_experts(task, rows));
}
Status launch_w8a8_sm80_experts(const W8A8Task& task, int rows, Stream) {
  return status_of(emulator::linear_w8a8_sm80_experts(task, rows));
}
Status launch_wna8_sm80_experts(const Wna8Task& task, int rows, Stream) {
  return status_of(emulator::linear_wna8_sm80_experts(task, rows));
}
Status launch_wna8_sm90(const Wna8Task&, int, int, int, Stream) { return not_emulated(); }
Status launch_wna8_decode_sm90(const Wna8DecodeTask&, const DecodeConfig&, Stream) { return not_emulated(); }
Status launch_conv_sm90(const ConvTask&, int, int, int, Stream) { return not_emulated(); }
Status launch_conv_sm80(const ConvTask& task, Stream) { return status_of(emulator::conv_gemm_sm80(task)); }
Status launch_conv_w8a8_sm90(const ConvTask&, int, int, int, Stream) { return not_emulated(); }
Status launch_conv_wna8_sm90(const ConvTask&, int, int, Stream) { return not_emulated(); }
Status launch_conv_wna8_sm80(const ConvTask& task, Stream) { return status_of(emulator::conv_wna8_sm80(task)); }
Status launch_conv_w8a8_sm80(const ConvTask& task, Stream) { return status_of(emulator::conv_w8a8_sm80(task)); }
Status launch_gemm_sm80(const LinearTask& task, int split, Stream) { return status_of(emulator::linear_gemm_sm80(task, split)); }
Status launch_fixed_point_acts(const QuantizeTask& task, Stream) { return status_of(emulator::fixed_point_acts(task)); }
Status launch_pair_acts(const QuantizeTask&, Stream) { return not_emulated(); }
Status launch_pairs_sm90(const PairTask&, int, int, int, Stream) { return not_emulated(); }
Status launch_epilogue_rows(const epilogue::Element& epilogue, const StoredSums& sums, std::int64_t m, int n, Stream) {
  return status_of(emulator::epilogue_rows(epilogue, sums, m, n));
}
Status copy_on_device(void* to, const void* from, std::size_t bytes) { return std::memcpy(to, from, bytes), Status(); }
Status launch_sort_rows(const SortTask& task, Stream) { return status_of(emulator::sort_rows(task)); }
Status launch_gather_expert_rows(const GatherRowsTask& task, Stream) { return status_of(emulator::gather_expert_rows(task)); }
Status launch_combine_rows(const CombineTask& task, Stream) { return status_of(emulator::combine_rows(task)); }
Result<std::shared_ptr<const DenseConfig>> configure_dense(const DenseSpec&) { return not_emulated(); }
Status launch_linear_dense(const LinearTask&, const DenseConfig&, Stream) { return not_emulated(); }
Status launch_dense_weight(const DenseTask&, const DenseConfig&, Stream) { return not_emulated(); }
Status dense_runs_here() { return not_emulated(); }
Status launch_dense_simt(const DenseTask& task, Stream) { return status_of(emulator::linear_dense_simt(task)); }
Status launch_dequantize_w8(const W8Weight& weight, void* out, DType type, std::int64_t stride, bool transposed, Stream) {
  return status_of(emulator::dequantize_w8(weight, out, type, stride, transposed));
}
Status launch_dequantize_dense(const DenseWeight& weight, void* out, DType type, std::int64_t stride, bool transposed, Stream) {
  return status_of(emulator::dequantize_dense(weight, out, type, stride, transposed));
}
Status launch_w8a8_sm90(const W8A8Task&, int, int, int, int, Stream) { return not_emulated(); }
Status launch_w8a8_sm90_floats(const W8A8Task&, const FloatActs&, int, Stream) { return not_emulated(); }

Status launch_linear_simt(const LinearTask& task, Stream) { return status_of(emulator::linear_simt(task)); }
Status launch_w8a8_simt(const W8A8Task& task, Stream) { return status_of(emulator::linear_w8a8_simt(task)); }
Status launch_codes_simt(const CodesTask& task, Stream) { return status_of(emulator::linear_codes_simt(task)); }
Status launch_conv_direct(const ConvTask& task, Stream) { return status_of(emulator::conv_direct(task)); }
Status launch_conv_direct_s8(const ConvTask& task, Stream) { return status_of(emulator::conv_direct_s8(task)); }
Status launch_quantize_acts(const QuantizeTask& task, Stream) { return status_of(emulator::quantize_acts(task)); }
Status launch_quantize_patches(const QuantizeTask& task, const PatchRows& patches, Stream) {
  return status_of(emulator::quantize_patches(task, patches));
}
Status launch_decode_acts(const QuantizedActs& acts, DType type, const std::int32_t* perm, std::int64_t m, std::int64_t k,
                          float* x, Stream) {
  return status_of(emulator::decode_acts(acts, type, perm, m, k, x));
}
Status launch_code_halves(const CodeHalves& task, Stream) { return status_of(emulator::code_halves(task)); }
Status launch_norm_rows(const NormTask& task, Stream) { return status_of(emulator::norm_rows(task)); }
Status launch_norm_codes(const NormTask& task, const QuantizeTask& codes, Stream) {
  return status_of(emulator::norm_codes(task, codes));
}
Status launch_recode_acts(const RecodeTask& task, Stream) { return status_of(emulator::recode_acts(task)); }
Status launch_sum_codes(const QuantizedActs& acts, std::int64_t m, std::int64_t k, std::int32_t* sums, Stream) {
  return status_of(emulator::sum_codes(acts, m, k, sums));
}
Status launch_dequantize(const DeviceWeight& weight, void* out, DType type, std::int64_t stride, bool transposed, Stream) {
  return status_of(emulator::dequantize_packed(weight, out, type, stride, transposed));
}
Status launch_pack(const gpu_tile::Geometry& geometry, const WeightScheme& scheme, DType zero_type, const CanonicalArrays& arrays,
                   void* records, Stream) {
  return status_of(emulator::pack_gpu_tile(geometry, scheme, zero_type, arrays, records));
}

}  // namespace cuda
}  // namespace nibble
