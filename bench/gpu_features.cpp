// What the cost models of the wgmma and of the decode kernels know of every measured one, for bench/fit_gpu_costs.py and
// bench/fit_decode_costs.py to fit their numbers to.
//
//   gpu_features bench/results/h100/survey-*.json
//
// A line of JSON for each kernel and layer: its family, tile and layer (N, K, M, pixels of an image), the features (WgmmaFeatures or DecodeFeatures), and the measured
// microseconds less those predicted for the step that prepares its activations.
#include <cstdio>
#include <exception>
#include <string_view>

#include "fmt/format.h"
#include "kernels/cuda/table/conv.hpp"
#include "kernels/cuda/table/decode_cost.hpp"
#include "kernels/cuda/table/pairs.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "plan/choose.hpp"
#include "survey.hpp"

namespace nibble {
namespace {

using cuda::WgmmaFamily, cuda::WgmmaFeatures;

constexpr std::string_view name(WgmmaFamily family) {
  switch (family) {
    case WgmmaFamily::floats: return "floats";
    case WgmmaFamily::bytes: return "bytes";
    case WgmmaFamily::bytes_bf16: return "bytes_bf16";
    case WgmmaFamily::float_folds: return "float_folds";
    case WgmmaFamily::float_patches: return "float_patches";
    case WgmmaFamily::pairs: return "pairs";
    case WgmmaFamily::pair_folds: return "pair_folds";
    case WgmmaFamily::online: return "online";
    case WgmmaFamily::online_tokens: return "online_tokens";
    case WgmmaFamily::online_folds: return "online_folds";
    case WgmmaFamily::s8: return "s8";
    case WgmmaFamily::s8_patches: return "s8_patches";
    case WgmmaFamily::e4m3: return "e4m3";
    case WgmmaFamily::e4m3_groups: return "e4m3_groups";
  }
  return {};
}

WgmmaFeatures features(const Kernel& kernel, const Problem& p) {
  const GpuInfo gpu = cuda::gpu_of(p);
  if (kernel.layout == "gpu_w8n64k128") return cuda::w8a8_sm90_features(kernel.tile, p.act_scheme.codes, gpu, p);
  if (kernel.form == ActForm::f16x2_rows) return cuda::pairs_sm90_features(kernel.tile, gpu, p);
  if (kernel.form == ActForm::s8i16) return cuda::wna8_sm90_features(kernel.tile, gpu, p, cuda::wna8_family(p));
  return cuda::gemm_sm90_features(kernel.tile, gpu, p);
}

/// The predicted time of the steps before the kernel.
double steps_us(const Kernel& kernel, const Problem& p) {
  if (p.op == Op::conv) return p.act_scheme.codes == DType::s8 ? cuda::code_images_us(cuda::gpu_of(p), p) : 0;
  return choose_preparation(kernel, p).cost_us;
}

WgmmaFamily decode_family(const Kernel& kernel, const Problem& p) {
  return kernel.quantizes ? cuda::wna8_decode_family(p) : cuda::wna16_decode_family(p);
}

void print_features(const std::string& path) {
  for (const testing::SurveyedLayer& layer : testing::surveyed_layers(path)) {
    if (layer.conv && layer.problem.op == Op::linear) continue;  // of linear layers there are better surveys
    for (const auto& [kernel_name, us] : layer.us) {
      const Kernel* kernel = find_kernel(kernel_name);
      if (kernel == nullptr || kernel->op != layer.problem.op) continue;  // a row that is gone
      if (kernel->isa == Isa::sm90 && kernel->configure != nullptr) {
        if (layer.problem.a_dtype == DType::bf16) continue;  // as f16, and the time in which they become that
        const WgmmaFamily family = decode_family(*kernel, layer.problem);
        const cuda::DecodeFeatures f = cuda::decode_features(family, kernel->tile.m, cuda::gpu_of(layer.problem), layer.problem);
        fmt::print(
            R"({{"family": "{}", "tile": [{}, {}, {}], "layer": [{}, {}, {}], "us": {:.4f}, "launches": {}, "tokens": {}, )"
            R"("stages": {}, "rounds": {}, "records": {}, "clusters": {:d}, "ctas": {}, "early": {:d}, "memory_us": {:.4f}, "fill_us": {:.4f}, "codes": {:.6g}}})"
            "\n",
            name(family), kernel->tile.m, kernel->tile.n, kernel->tile.split, layer.problem.n, layer.problem.k, layer.problem.m,
            us, f.launches, f.tokens, f.stages, f.rounds, f.records, f.clusters, f.ctas, f.early, f.memory_us, f.fill_us,
            f.codes);
        continue;
      }
      if (kernel->form == ActForm::s8x3_rows) continue;  // predicted by the numbers of int8 activations
      if (kernel_name.find("sm90_wgmma") == std::string::npos && kernel_name.find("sm90_streamk") == std::string::npos) continue;
      const WgmmaFeatures f = features(*kernel, layer.problem);
      const ConvGeometry& g = layer.problem.geometry;
      const std::int64_t rows = layer.problem.m * (layer.problem.op == Op::conv ? g.out_height() * g.out_width() : 1);
      fmt::print(R"({{"family": "{}", "tile": [{}, {}, {}], "layer": [{}, {}, {}, {}], "us": {:.4f}, "memory_us": {:.4f}, )"
                 R"("l2_us": {:.4f}, "passes": {:.6g}, "steps": {:.6g}, "blocks": {:.6g}, "parts": {:.6g}}})"
                 "\n",
                 name(f.family), f.tile.m, f.tile.n, f.tile.split, layer.problem.n, layer.problem.k, rows, g.height * g.width,
                 us - steps_us(*kernel, layer.problem), f.memory_us, f.l2_us, f.passes, f.steps, f.blocks, f.parts);
    }
  }
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) try {
  if (argc < 2) return fmt::print(stderr, "usage: gpu_features SURVEY.json...\n"), 2;
  for (int i = 1; i < argc; ++i) nibble::print_features(argv[i]);
  return 0;
} catch (const std::exception& e) {
  fmt::print(stderr, "gpu_features: {}\n", e.what());
  return 4;
}
