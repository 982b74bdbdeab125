// Formats that nibble recognises by their tensors but cannot decode: an error that names the format is better than a list of dense layers.
//
// Each row is a set of suffixes with dtypes; the first row whose tensors are all present names the module. A leading * stands for any
// prefix. Quark's config names its weights itself. Source: the projects named in each row.
#include <algorithm>
#include <array>

#include "checkpoint/codecs/table.hpp"
#include "checkpoint/config/claims.hpp"
#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

struct Part {
  std::string_view suffix;    // empty: no further part
  DType dtype = DType::none;  // none: any
};
struct Row {
  std::string_view what;
  std::array<Part, 3> parts;
};

constexpr DType kU8 = DType::u8, kS8 = DType::s8, kS16 = DType::s16, kS32 = DType::s32, kE4m3 = DType::e4m3;

// Rows with more parts precede rows with a subset of them.
constexpr Row kRows[] = {
    {"MXFP8", {{{"weight", kE4m3}, {"weight_scale", kU8}}}},
    {"MXFP8", {{{"weight", kE4m3}, {"weight_scale", DType::e8m0}}}},
    {"FP8 e4m3 with E8M0 scales per block", {{{"weight", kE4m3}, {"weight_scale_inv"}}}},
    {"FP8 e4m3 without weight_scale", {{{"weight", kE4m3}}}},
    {"FP8 e5m2", {{{"weight", DType::e5m2}}}},
    {"NVFP4 (compressed-tensors)", {{{"weight_packed", kU8}, {"weight_global_scale"}}}},
    {"MXFP4 (compressed-tensors)", {{{"weight_packed", kU8}}}},
    {"NVFP4 (ModelOpt, Quark)", {{{"weight", kU8}, {"weight_scale", kE4m3}}}},
    {"quanto", {{{"weight._data"}, {"weight._scale"}}}},
    {"INT4 (Quark)", {{{"weight", kS32}, {"weight_scale"}}}},
    {"MXFP4 (ModelOpt, Quark)", {{{"weight", kU8}, {"weight_scale", kU8}}}},
    {"unsigned bytes with scales (Quark, stacked experts of ModelOpt)", {{{"weight", kU8}, {"weight_scale"}}}},
    {"MXFP4 (gpt-oss), in tensors that do not fit each other", {{{"*_blocks", kU8}, {"*_scales", kU8}}}},
    {"MXFP4 (gpt-oss)", {{{"blocks", kU8}, {"scales", kU8}}}},
    {"LLM.int8 (bitsandbytes)", {{{"weight", kS8}, {"SCB"}}}},
    {"int8 without weight_scale", {{{"weight", kS8}}}},
    {"4-bit NF4 or FP4 (bitsandbytes)", {{{"weight", kU8}}}},
    {"HQQ", {{{"W_q"}, {"scale"}}}},
    {"QServe W4A8", {{{"qweight", kS8}, {"s1_scales"}}}},
    {"AWQ (llm-awq, TinyChat)", {{{"qweight", kS16}, {"scaled_zeros"}}}},
    {"AWQ gemv_fast", {{{"qweight", kS16}, {"qzeros", DType::f16}}}},
    {"GPTQ in words of 8, 16 or 64 bits (pack_dtype)", {{{"qweight"}, {"qzeros"}, {"g_idx"}}}},
    {"Marlin (AWQ or GPTQ weights in the order of its kernel)", {{{"qweight", kS32}, {"scales"}}}},
    {"Marlin (weights in the order of its kernel)", {{{"B", kS32}, {"s"}}}},
    {"Marlin 2:4 sparse (compressed-tensors)", {{{"weight_packed", kS32}, {"scale_packed"}}}},
    {"sparse bitmask (compressed-tensors)", {{{"compressed"}, {"bitmask"}}}},
    {"torchao", {{{"*_weight_qdata"}}}},
    {"MLX quantization", {{{"weight", DType::u32}, {"scales"}, {"biases"}}}},
};

bool matches(const Part& part, std::string_view suffix, DType dtype) {
  if (part.dtype != DType::none && part.dtype != dtype) return false;
  return part.suffix.front() == '*' ? suffix.ends_with(part.suffix.substr(1)) : suffix == part.suffix;
}

std::optional<Result<Module>> detect(const ModuleTensors& tensors, const QuantConfig& config) {
  const auto present = [&](const Part& part) {
    return part.suffix.empty() ||
           std::ranges::any_of(tensors.by_suffix, [&](const auto& t) { return matches(part, t.first, t.second.dtype); });
  };
  for (const Row& row : kRows) {
    if (!std::ranges::all_of(row.parts, present)) continue;
    const std::string quark = quark_weights(tensors.module, config);
    const std::string what = quark.empty() ? std::string(row.what) : quark + " (Quark)";
    std::string shapes;
    for (const auto& [suffix, view] : tensors.by_suffix)
      shapes += fmt::format("{}{} {}", shapes.empty() ? "" : ", ", suffix, describe(view));
    return error(StatusCode::unsupported, "{}: recognised but not yet supported: {} ({})", tensors.module, what, shapes);
  }
  return std::nullopt;
}

Result<QuantTensor> read(const ModuleTensors& tensors, const Module&, const QuantConfig&, std::vector<Note>&) {
  return error(StatusCode::unsupported, "{} has no decoder", tensors.module);
}

}  // namespace

const Format kUnsupported{"unsupported", "recognised and named, but not decoded", false, {}, {}, detect, read, nullptr, nullptr,
                          nullptr};

}  // namespace nibble::codec
