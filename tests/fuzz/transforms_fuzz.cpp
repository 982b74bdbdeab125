// Any config, specification and numbers in quantize, convert and dequantize of a small checkpoint: refused with nothing left behind, or
// a checkpoint that opens, whose every quantized module reads.
//
// Input: a few choices, then a config as JSON; its bytes are also those of the tensors.
#include <array>

#include "fuzz/fuzz.hpp"
#include "fuzz/scratch.hpp"
#include "nibble/checkpoint.hpp"

using namespace nibble;
using fuzz::require;

namespace {

struct Shape {
  const char* name;
  DType dtype;
  std::vector<std::int64_t> shape;
};
const std::vector<Shape> kModels[] = {
    {{"a.weight", DType::f16, {8, 32}},
     {"a.bias", DType::f16, {8}},
     {"b.weight", DType::bf16, {16, 16}},
     {"norm.weight", DType::f16, {32}},
     {"lm_head.weight", DType::f32, {8, 32}},
     {"conv.weight", DType::f32, {8, 4, 2, 2}}},
    {{"a.qweight", DType::s32, {32, 2}}, {"a.qzeros", DType::s32, {2, 2}}, {"a.scales", DType::f16, {2, 16}}},
    {{"a.qweight", DType::s32, {4, 32}},
     {"a.qzeros", DType::s32, {2, 4}},
     {"a.scales", DType::f16, {2, 32}},
     {"a.g_idx", DType::s32, {32}}},
    {{"a.weight_packed", DType::s32, {8, 4}},
     {"a.weight_scale", DType::bf16, {8, 2}},
     {"a.weight_zero_point", DType::s32, {1, 2}},
     {"a.weight_shape", DType::s64, {2}}},
    {{"a.weight", DType::s8, {8, 16}},
     {"a.weight_scale", DType::f32, {8, 1}},
     {"a.input_scale", DType::f32, {1}},
     {"a.input_zero_point", DType::s8, {1}}},
    {{"a.weight", DType::e4m3, {8, 16}}, {"a.weight_scale", DType::f32, {1}}, {"a.input_scale", DType::f32, {1}}},
    {{"a.weight", DType::e4m3, {8, 16}}, {"a.weight_scale_inv", DType::f32, {2, 2}}},
};

void write_input(const fuzz::fs::path& directory, const std::vector<Shape>& model, std::string_view bytes, bool plain) {
  std::vector<TensorSource> tensors;
  for (const Shape& shape : model) {
    Tensor tensor(shape.dtype, shape.shape);
    for (std::size_t i = 0; i < tensor.bytes.size(); ++i)
      tensor.bytes[i] =
          plain || bytes.empty() ? static_cast<std::byte>(0x30 + i % 8) : static_cast<std::byte>(bytes[i % bytes.size()]);
    if (std::string_view(shape.name) == "a.weight_shape")
      for (int i = 0; i < 2; ++i) tensor.as<std::int64_t>()[i] = i == 0 ? 8 : 32;
    if (std::string_view(shape.name) == "a.g_idx")
      for (std::int32_t i = 0; i < 32; ++i) tensor.as<std::int32_t>()[i] = i % 2;
    tensors.push_back(
        {shape.name, shape.dtype, shape.shape, [data = tensor.bytes]() -> Result<std::vector<std::byte>> { return data; }});
  }
  require(write_safetensors(directory / "model.safetensors", tensors, {}, true).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fuzz::Scratch scratch;
  static const auto executor = make_executor(1);
  fuzz::Choices choices(data, size);
  const auto operation = choices.below(3);
  const auto& model = choices.of(kModels);
  const fuzz::fs::path in = scratch.root / ("in" + std::to_string(&model - kModels)), out = scratch.root / "out";
  static const auto kFormats = formats();
  const std::string format(choices.of(kFormats).name);
  const bool plain = choices.flag();
  QuantizeCheckpointSpec spec{.format = format};
  static constexpr int kGroups[] = {16, 0, 8, 32, 1, -1, 128, 3};
  spec.scheme.weight.group = GroupShape{1, choices.of(kGroups)};
  static constexpr ZeroKind kZeros[] = {ZeroKind::none, ZeroKind::integer, ZeroKind::offset, ZeroKind::real};
  spec.scheme.weight.zero = choices.of(kZeros);
  static constexpr DType kCodes[] = {DType::u4b8, DType::u4, DType::s8,  DType::e4m3,
                                     DType::u3b4, DType::u8, DType::f16, DType::none};
  spec.scheme.weight.codes = choices.of(kCodes);
  spec.scheme.act.codes = choices.of(kCodes);
  static constexpr GroupShape kShapes[] = {GroupShape::channel(), GroupShape::tensor(), GroupShape::group(16),
                                           GroupShape::block(4, 8)};
  spec.scheme.act.group = choices.of(kShapes);
  if (choices.flag()) spec.scheme.weight.group = choices.of(kShapes);
  spec.clip_search = choices.flag();
  spec.convs = choices.flag();
  static constexpr DType kFloats[] = {DType::f16, DType::bf16, DType::f32, DType::s8};
  const DType dtype = choices.of(kFloats);
  spec.scheme.weight.scale = dtype;
  const std::string_view config = choices.rest();

  static std::array<bool, std::size(kModels)> are_plain;  // the tensors that the inputs hold
  bool& is_plain = are_plain[static_cast<std::size_t>(&model - kModels)];
  fuzz::fs::create_directories(in);
  if (!plain || !is_plain) write_input(in, model, config, plain);
  is_plain = plain;
  scratch.write(in / "config.json", config);
  const TransformOptions options{.overwrite = true, .executor = executor.get()};
  const auto report = operation == 0   ? quantize_checkpoint(in, out, spec, options)
                      : operation == 1 ? convert_checkpoint(in, out, format, options)
                                       : dequantize_checkpoint(in, out, dtype, options);
  require(fuzz::ok(report.status()) == fuzz::fs::exists(out));
  if (report.ok()) {
    const auto checkpoint = Checkpoint::open(out);
    require(checkpoint.ok());
    for (const Module& module : checkpoint->modules()) {
      if (!module.quantized()) continue;
      require(operation != 2);
      const auto q = checkpoint->read(module);
      require(q.ok() && q->validate().ok());
    }
    fuzz::fs::remove_all(out);
  }
  for (const auto& entry : fuzz::fs::directory_iterator(scratch.root))
    require(entry.path().filename().native().starts_with("in"));
  return 0;
}

std::vector<std::string> fuzz_seeds() {
  constexpr std::string_view kConfigs[] = {
      R"({"model_type":"llama"})",
      R"({"quantization_config":{"quant_method":"awq","bits":4,"group_size":16,"zero_point":true,"version":"gemm"}})",
      R"({"quantization_config":{"quant_method":"gptq","bits":4,"group_size":16,"sym":false,"desc_act":true}})",
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"pack-quantized","ignore":["lm_head"],"config_groups":)"
      R"({"group_0":{"targets":["Linear"],"weights":{"num_bits":4,"type":"int","symmetric":false,"strategy":"group","group_size":16}}}}})",
      R"({"quantization_config":{"quant_method":"compressed-tensors","format":"int-quantized","config_groups":{"group_0":{"targets":)"
      R"(["Linear"],"weights":{"num_bits":8,"type":"int","strategy":"channel"},"input_activations":{"num_bits":8,"symmetric":false}}}}})",
      R"({"quantization_config":{"quant_method":"modelopt","quant_algo":"FP8"}})",
      R"({"quantization_config":{"quant_method":"fp8","activation_scheme":"dynamic","weight_block_size":[4,8]}})",
  };
  std::vector<std::string> seeds;
  const auto count = static_cast<char>(formats().size());
  for (char model = 0; model < 7; ++model)
    for (char format = 0; format < count; ++format)
      for (const char operation : {char{0}, char{1}, char{2}}) {
        if ((operation == 0) != (model == 0) || (operation == 2 && format > 0)) continue;
        const std::string choices = {operation, model, format, 1, static_cast<char>(format == 1 ? 8 : 4), 0, 1, 0, 0, 0,
                                     0,         0,     1,      2};
        seeds.push_back(choices + std::string(kConfigs[static_cast<std::size_t>(model)]));
      }
  return seeds;
}
