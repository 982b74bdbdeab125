// cuda.hpp and launch.hpp in a build without CUDA: every call returns unsupported.
#include "kernels/cuda/launch/launch.hpp"

#include "kernels/cuda/launch/im2col.hpp"

namespace nibble {
namespace {

Status no_cuda() { return {StatusCode::unsupported, "built without CUDA; configure with NIBBLE_CUDA=ON"}; }

}  // namespace

Result<GpuInfo> this_gpu() { return no_cuda(); }
Result<DeviceMemory> DeviceMemory::allocate(std::size_t) { return no_cuda(); }
DeviceMemory::~DeviceMemory() {}  // there is never memory to free
Status copy_to_device(void*, const void*, std::size_t, Stream) { return no_cuda(); }
Status copy_from_device(void*, const void*, std::size_t, Stream) { return no_cuda(); }
Status synchronize(Stream) { return no_cuda(); }
Result<GpuReadProbe> GpuReadProbe::make() { return no_cuda(); }
Result<double> GpuReadProbe::measure() { return no_cuda(); }
Status GpuReadProbe::separate(Stream) const { return no_cuda(); }
Result<GpuCodesProduct> GpuCodesProduct::make(std::int64_t, std::int64_t, std::int64_t, DType, DType, Accumulation) {
  return no_cuda();
}
Status GpuCodesProduct::run(const void*, const void*, void*, Stream) const { return no_cuda(); }
Status dequantize(const CheckpointTensors&, const TensorView&, bool, Stream) { return no_cuda(); }

namespace cuda {

Result<int> current_device() { return no_cuda(); }
Result<RingRoom> ring_room() { return no_cuda(); }
Status launch_linear_sm90(const LinearTask&, const DecodeConfig&, Stream) { return no_cuda(); }
Status launch_decode_joined_sm90(const LinearTask&, const DecodeConfig&, const LinearTask&, const DecodeConfig&, Stream) {
  return no_cuda();
}
Status launch_linear_sm80(const LinearTask&, int, Stream) { return no_cuda(); }
Status launch_linear_wgmma(const LinearTask&, int, int, int, Stream) { return no_cuda(); }
Status launch_wna8_sm80(const Wna8Task&, int, Stream) { return no_cuda(); }
Status launch_gemm_sm80_experts(const LinearTask&, int, Stream) { return no_cuda(); }
Status launch_w8a8_sm80_experts(const W8A8Task&, int, Stream) { return no_cuda(); }
Status launch_wna8_sm80_experts(const Wna8Task&, int, Stream) { return no_cuda(); }
Status copy_on_device(void*, const void*, std::size_t) { return no_cuda(); }
Status launch_route(const RouteTask&, Stream) { return no_cuda(); }
Status launch_sort_rows(const SortTask&, Stream) { return no_cuda(); }
Status launch_gather_expert_rows(const GatherRowsTask&, Stream) { return no_cuda(); }
Status launch_combine_rows(const CombineTask&, Stream) { return no_cuda(); }
Status launch_wna8_sm90(const Wna8Task&, int, int, int, Stream) { return no_cuda(); }
Status launch_wna8_decode_sm90(const Wna8DecodeTask&, const DecodeConfig&, Stream) { return no_cuda(); }
Status launch_conv_sm90(const ConvTask&, int, int, int, Stream) { return no_cuda(); }
Status launch_conv_sm80(const ConvTask&, Stream) { return no_cuda(); }
Status launch_conv_w8a8_sm90(const ConvTask&, int, int, int, Stream) { return no_cuda(); }
Status launch_conv_wna8_sm90(const ConvTask&, int, int, Stream) { return no_cuda(); }
Status launch_conv_wna8_sm80(const ConvTask&, Stream) { return no_cuda(); }
Status launch_conv_w8a8_sm80(const ConvTask&, Stream) { return no_cuda(); }
Status launch_conv_direct(const ConvTask&, Stream) { return no_cuda(); }
Status launch_conv_direct_s8(const ConvTask&, Stream) { return no_cuda(); }
Status launch_gemm_sm80(const LinearTask&, int, Stream) { return no_cuda(); }
Status launch_linear_simt(const LinearTask&, Stream) { return no_cuda(); }
Result<std::shared_ptr<const DenseConfig>> configure_dense(const DenseSpec&) { return no_cuda(); }
Status launch_linear_dense(const LinearTask&, const DenseConfig&, Stream) { return no_cuda(); }
Status launch_dense_weight(const DenseTask&, const DenseConfig&, Stream) { return no_cuda(); }
Status dense_runs_here() { return no_cuda(); }
Status launch_dense_simt(const DenseTask&, Stream) { return no_cuda(); }
Status launch_dequantize_w8(const W8Weight&, void*, DType, std::int64_t, bool, Stream) { return no_cuda(); }
Status launch_dequantize_dense(const DenseWeight&, void*, DType, std::int64_t, bool, Stream) { return no_cuda(); }
Status launch_quantize_acts(const QuantizeTask&, Stream) { return no_cuda(); }
Status launch_fixed_point_acts(const QuantizeTask&, Stream) { return no_cuda(); }
Status launch_pair_acts(const QuantizeTask&, Stream) { return no_cuda(); }
Status launch_pairs_sm90(const PairTask&, int, int, int, Stream) { return no_cuda(); }
Status launch_epilogue_rows(const epilogue::Element&, const StoredSums&, std::int64_t, int, Stream) { return no_cuda(); }
Status launch_quantize_patches(const QuantizeTask&, const PatchRows&, Stream) { return no_cuda(); }
Status launch_code_halves(const CodeHalves&, Stream) { return no_cuda(); }
Status launch_im2col(const Im2colTask&, Stream) { return no_cuda(); }
Status launch_col2im(const Col2imTask&, Stream) { return no_cuda(); }
Status launch_decode_acts(const QuantizedActs&, DType, const std::int32_t*, std::int64_t, std::int64_t, float*, Stream) {
  return no_cuda();
}
Status launch_recode_acts(const RecodeTask&, Stream) { return no_cuda(); }
Status launch_norm_rows(const NormTask&, Stream) { return no_cuda(); }
Status launch_norm_codes(const NormTask&, const QuantizeTask&, Stream) { return no_cuda(); }
Status launch_sum_codes(const QuantizedActs&, std::int64_t, std::int64_t, std::int32_t*, Stream) { return no_cuda(); }
Status launch_w8a8_simt(const W8A8Task&, Stream) { return no_cuda(); }
Status launch_w8a8_sm80(const W8A8Task&, int, Stream) { return no_cuda(); }
Status launch_w8a8_sm90(const W8A8Task&, int, int, int, int, Stream) { return no_cuda(); }
Status launch_w8a8_sm90_floats(const W8A8Task&, const FloatActs&, int, Stream) { return no_cuda(); }
Status launch_codes_simt(const CodesTask&, Stream) { return no_cuda(); }
Status launch_dequantize(const DeviceWeight&, void*, DType, std::int64_t, bool, Stream) { return no_cuda(); }
Status launch_pack(const gpu_tile::Geometry&, const WeightScheme&, DType, const CanonicalArrays&, void*, Stream) {
  return no_cuda();
}

}  // namespace cuda
}  // namespace nibble
