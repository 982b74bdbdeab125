// The layers of a survey of a GPU or a CPU (bench/survey.py): the problem of each, and what every kernel took.
#pragma once

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernel.hpp"
#include "nibble/cuda.hpp"
#include "plan/choose.hpp"

namespace nibble::testing {

/// A layer, and the microseconds of each kernel with the step that prepares its activations.
struct SurveyedLayer {
  Problem problem;
  std::string scheme;
  std::map<std::string, double, std::less<>> us;
  bool conv = false;  // the problem of a pointwise convolution is a linear one
};

/// The geometry of a surveyed convolution, as `nibble bench` writes it.
inline ConvGeometry conv_geometry(const nlohmann::json& conv) {
  const auto extent = [&](const char* key) { return Extent{conv[key][0], conv[key][1]}; };
  const nlohmann::json& padding = conv["padding"];
  return {.in_channels = conv["in_channels"],
          .out_channels = conv["out_channels"],
          .height = conv["height"],
          .width = conv["width"],
          .filter = extent("filter"),
          .stride = extent("stride"),
          .padding = {padding[0], padding[1], padding[2], padding[3]},
          .dilation = extent("dilation"),
          .groups = conv["groups"]};
}

/// Weights of a CPU are packed for up to so many tokens.
constexpr std::int64_t kCpuTokens = 256;

/// The machine that a survey of a CPU was made on.
inline Roofline roofline_of(const nlohmann::json& device) {
  return {.threads = device["threads"],
          .read_gbytes_per_s = device["read_gbytes_per_s"],
          .f32_gflops = device["f32_gflops"],
          .bf16_gflops = device["bf16_gflops"],
          .int8_gops = device["int8_gops"]};
}

/// A row with what most rows of the file have.
inline nlohmann::json whole_row(const nlohmann::json& every, const nlohmann::json& given) {
  nlohmann::json row = every;
  for (const auto& [key, value] : given.items()) {
    if (value.is_null())
      row.erase(key);
    else
      row[key] = value;
  }
  return row;
}

/// The layers of a file under bench/results/h100 or bench/results/h200, or of a CPU's. Throws where the file cannot be read.
inline std::vector<SurveyedLayer> surveyed_layers(const std::string& path) {
  static const GpuInfo kH100 = *described_gpu("h100"), kH200 = *described_gpu("h200");
  std::ifstream in(path);
  if (!in) throw std::runtime_error("cannot read " + path);
  const nlohmann::json data = nlohmann::json::parse(in);
  const bool on_cpu = !data["device"].contains("sms") && data["device"].contains("isa");
  std::vector<SurveyedLayer> layers;
  for (const nlohmann::json& given : data["rows"]) {
    const nlohmann::json row = whole_row(data["every"], given);
    if (row.value("calls", "back-to-back") != "back-to-back") continue;
    SurveyedLayer& layer = layers.emplace_back();
    layer.scheme = row["scheme"];
    const Scheme scheme = *Scheme::parse(layer.scheme);
    const bool w8 = scheme.weight.codes == DType::s8 || scheme.weight.codes == DType::e4m3;
    const DType a_dtype = *parse_dtype(row["a_dtype"].get<std::string>());
    const DType out = is_compute_float(a_dtype) ? a_dtype : DType::f16;
    layer.problem = {.m = row["m"],
                     .n = row["n"],
                     .k = row["k"],
                     .scheme = scheme.weight,
                     .layout = w8 ? "gpu_w8n64k128" : "gpu_n64k128",
                     .memory = Backend::cuda,
                     .a_dtype = a_dtype,
                     .epilogue = {.out = out},
                     .act_scheme = scheme.act,
                     .gpu = path.find("/h100/") != std::string::npos ? &kH100 : &kH200};
    if (on_cpu) {
      layer.problem.memory = Backend::cpu;
      layer.problem.gpu = nullptr;
      layer.problem.cpu =
          *std::ranges::find(kAllIsas, data["device"]["isa"].get<std::string>(), [](Isa isa) { return name(isa); });
      layer.problem.machine = roofline_of(data["device"]);
      layer.problem.layout = {};
      layer.problem.layout = choose_packing(layer.problem, kCpuTokens, {})->layout->name;
    }
    layer.conv = row.contains("conv");
    if (layer.conv) {
      // A pointwise convolution is a linear layer of its pixels, as for a plan.
      const ConvSpec spec{.geometry = conv_geometry(row["conv"]),
                          .input = row["conv"]["input"] == "nhwc" ? ImageLayout::nhwc : ImageLayout::nchw,
                          .output = row["conv"]["output"] == "nhwc" ? ImageLayout::nhwc : ImageLayout::nchw};
      if (!as_linear(spec)) {
        layer.problem.op = Op::conv;
        layer.problem.m = row["conv"]["batch"];
        layer.problem.geometry = spec.geometry;
        layer.problem.input = spec.input;
        layer.problem.output = spec.output;
      }
    }
    if (row["us"].is_array()) {
      for (std::size_t i = 0; i < row["us"].size(); ++i)
        if (!row["us"][i].is_null()) layer.us[data["kernels"][i]] = row["us"][i];
    } else {
      for (const auto& [number, us] : row["us"].items()) layer.us[data["kernels"][std::stoul(number)]] = us;
    }
  }
  return layers;
}

}  // namespace nibble::testing
