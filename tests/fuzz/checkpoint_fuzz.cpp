// Any text as the config.json of a small checkpoint, or as the index of another if it has a map of weights: refused or opened, and then every module is read or
// refused with a reason.
#include <string_view>

#include "fuzz/fuzz.hpp"
#include "fuzz/scratch.hpp"
#include "nibble/checkpoint.hpp"

using namespace nibble;
namespace fs = std::filesystem;

namespace {

TensorSource tensor(std::string name, DType dtype, std::vector<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t dim : shape) count *= dim;
  const std::vector<std::byte> bytes(storage_bytes(dtype, static_cast<std::uint64_t>(count)), std::byte{0x33});
  return {std::move(name), dtype, std::move(shape), [bytes]() -> Result<std::vector<std::byte>> { return bytes; }};
}

/// Two directories that hold a module of each kind.
struct Inputs : fuzz::Scratch {
  Inputs() {
    const TensorSource tensors[] = {
        tensor("awq.qweight", DType::s32, {32, 2}),
        tensor("awq.qzeros", DType::s32, {2, 2}),
        tensor("awq.scales", DType::f16, {2, 16}),
        tensor("gptq.qweight", DType::s32, {4, 16}),
        tensor("gptq.qzeros", DType::s32, {2, 2}),
        tensor("gptq.scales", DType::f16, {2, 16}),
        tensor("gptq.g_idx", DType::s32, {32}),
        tensor("ct.weight_packed", DType::s32, {8, 4}),
        tensor("ct.weight_scale", DType::bf16, {8, 1}),
        tensor("ct.weight_shape", DType::s64, {2}),
        tensor("int.weight", DType::s8, {8, 16}),
        tensor("int.weight_scale", DType::f32, {8, 1}),
        tensor("int.input_scale", DType::f32, {1}),
        tensor("fp8.weight", DType::e4m3, {8, 16}),
        tensor("fp8.weight_scale", DType::f32, {8, 1}),
        tensor("hf.weight", DType::e4m3, {8, 16}),
        tensor("hf.weight_scale_inv", DType::f32, {2, 2}),
        tensor("dense.weight", DType::f16, {8, 16}),
        tensor("dense.bias", DType::f16, {8}),
    };
    for (const char* name : {"config", "index"}) {
      fs::create_directories(root / name);
      fuzz::require(write_safetensors(root / name / "model.safetensors", tensors, {}, true).ok());
    }
  }
  void open(const char* name, const char* file, std::string_view text) const;
};

void Inputs::open(const char* name, const char* file, std::string_view text) const {
  write(fs::path(name) / file, text);
  const Result<Checkpoint> checkpoint = Checkpoint::open(root / name);
  if (!fuzz::ok(checkpoint.status())) return;
  for (const Module& module : checkpoint->modules()) {
    std::vector<Note> notes;
    const Result<QuantTensor> q = checkpoint->read(module, &notes);
    fuzz::require(!fuzz::ok(q.status()) || q->validate().ok());
    for (const LayerPart& part :
         {LayerPart{LayerPart::Of::outputs, 0, module.n / 2}, {LayerPart::Of::inputs, module.k / 2, module.k}}) {
      const Result<QuantTensor> half = checkpoint->read(module, part);
      fuzz::require(!fuzz::ok(half.status()) || half->validate().ok());
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Inputs inputs;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (text.find("weight_map") == text.npos)
    inputs.open("config", "config.json", text);
  else
    inputs.open("index", "model.safetensors.index.json", text);
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  return {
      R"({"quantization_config":{"quant_method":"awq","bits":4,"group_size":16,"zero_point":true,"version":"gemm",)"
      R"("modules_to_not_convert":["dense"]}})",
      R"({"text_config":{"quantization_config":{"quant_method":"gptq","bits":4,"group_size":16,"sym":false,"desc_act":true,)"
      R"("checkpoint_format":"gptq_v2","dynamic":{"+:ct":{"bits":8}}}}})",
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["dense","re:.*x"],)"
      R"("config_groups":{"group_0":{"targets":["Linear"],"weights":{"num_bits":4,"type":"int","symmetric":true,)"
      R"("strategy":"group","group_size":16,"actorder":null},"input_activations":{"num_bits":8,"dynamic":true}}}}})",
      R"({"quantization_config":{"quant_method":"fp8","activation_scheme":"dynamic","weight_block_size":[4,8],"fmt":"e4m3"}})",
      R"({"quantization_config":{"quant_method":"fbgemm_fp8","activation_scale_ub":1200.0}})",
      R"({"model_type":"llama","quantization_config":{"quant_method":"modelopt","quant_algo":"MIXED_PRECISION",)"
      R"("quantized_layers":{"fp8":{"quant_algo":"FP8_PER_CHANNEL_PER_TOKEN"}}}})",
      R"({"metadata":{"total_size":1},"weight_map":{"dense.weight":"model.safetensors","dense.bias":"model.safetensors"}})",
      R"({"time_step_limit":[0.0,Infinity],"x":NaN})",
  };
}
