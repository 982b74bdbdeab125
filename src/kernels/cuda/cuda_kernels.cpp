#include "kernels/cuda/cuda_kernels.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/device_weight.hpp"
#include "kernels/cuda/launch.hpp"

namespace nibble::cuda {
namespace {

template <Status (*kLaunch)(const LinearTask&, Stream)>
Status run_linear(const Kernel&, const StepArgs& args) {
  LinearTask task{.weight = device_weight(*args.weight),
                  .m = static_cast<int>(args.a.dim(0)),
                  .act = args.a.dtype,
                  .x = args.a.data,
                  .x_stride = args.a.stride(0)};
  task.epilogue = epilogue::element(*args.epilogue, args.operands, args.d, task.weight.scale2);
  return kLaunch(task, args.stream);
}

Status run_dequantize(const Kernel&, const StepArgs& args) {
  return launch_dequantize(device_weight(*args.weight), args.d.data, args.d.dtype, args.d.stride(0), args.transposed,
                           args.stream);
}

/// Sizes are counted in 32 bits inside the kernels.
constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;
/// A slice of one token's activations has to fit into a CTA's shared memory: an eighth of K on sm_90.
constexpr std::int64_t kMostChannels = std::int64_t{1} << 19;

/// The current GPU. Asked of problems that accepts_common has accepted: there is one then.
GpuInfo current_gpu() {
  Result<GpuInfo> gpu = this_gpu();
  return gpu.ok() ? *std::move(gpu) : GpuInfo{.sms = 1, .read_gbytes_per_s = 1};
}

/// What all rows ask of a weight.
Status accepts_weight(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  if (std::max({p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension is beyond {}", p.m, p.n, p.k, kMostDimension);
  return {};
}

Status accepts_simt(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_weight(self, p));
  if (p.quantize.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies floats, the activations are to be quantized to {}", name(p.quantize.codes));
  return {};
}

Status accepts_tensor_core(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_simt(self, p));
  if (name(p.act) != self.act)
    return error(StatusCode::unsupported, "multiplies {} activations, they are {}", self.act, name(p.act));
  if (p.prescales_k) return error(StatusCode::unsupported, "activations times a prescale are not {}", self.act);
  if (p.k > kMostChannels) return error(StatusCode::unsupported, "K={} is beyond {}", p.k, kMostChannels);
  const int needed = sm80_least_shared(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).record_bytes());
  if (const std::int64_t most = current_gpu().shared_bytes_per_block; self.isa == Isa::sm80 && needed > most)
    return error(StatusCode::unsupported, "needs {} bytes of shared memory, this GPU has {}", needed, most);
  return {};
}

/// Microseconds to move the weight, the activations and the result once.
double moved_us(const GpuInfo& gpu, const Problem& p) {
  const gpu_tile::Geometry geo = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k);
  const double activations = p.op == Op::linear ? static_cast<double>(p.m * p.k * bits(p.act)) / 8 : 0.0;
  const std::int64_t outputs = p.op == Op::linear ? p.m * p.n : p.n * p.k;
  const double result = static_cast<double>(outputs * bits(p.epilogue.out)) / 8;
  return 1e-3 * (static_cast<double>(geo.total_bytes()) + activations + result) / gpu.read_gbytes_per_s;
}

constexpr double kLaunchUs = 1.5;  // what remains of a launch in a stream or graph of them

double cost_us(const Kernel& self, const Problem& p) { return linear_cost_us(self.isa, self.tile.m, current_gpu(), p); }

double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.7;  // of the bandwidth: an estimate
  return kLaunchUs + moved_us(current_gpu(), p) / kShare;
}

template <int kTokens>
Status launch_sm90(const LinearTask& task, Stream stream) {
  return launch_linear_sm90(task, kTokens, stream);
}

template <Isa kIsa, int kTokens, Status (*kLaunch)(const LinearTask&, Stream)>
constexpr Kernel tensor_core_row(std::string_view name, std::string_view act, std::string_view summary) {
  return {.name = name,
          .backend = Backend::cuda,
          .isa = kIsa,
          .op = Op::linear,
          .out = "any",
          .act = act,
          .weight = "any",
          .layout = "gpu_n64k128",
          .tile = {kTokens, gpu_tile::kRows, gpu_tile::kChannels},
          .summary = summary,
          .accepts = accepts_tensor_core,
          .cost_us = cost_us,
          .run = run_linear<kLaunch>};
}

constexpr std::string_view kOneSummary = "a token at a time: a ring of bulk copies feeds tensor cores";
constexpr std::string_view kFewSummary =
    "few tokens: a ring of bulk copies feeds tensor cores; clusters share a row tile along K";
constexpr std::string_view kSm80Summary = "few tokens: asynchronous copies feed tensor cores";

constexpr std::array kKernels{
    tensor_core_row<Isa::sm90, 1, launch_sm90<1>>("linear_any_f16_any__cuda_sm90_m1n64k128", "f16", kOneSummary),
    tensor_core_row<Isa::sm90, 1, launch_sm90<1>>("linear_any_bf16_any__cuda_sm90_m1n64k128", "bf16", kOneSummary),
    tensor_core_row<Isa::sm90, 8, launch_sm90<8>>("linear_any_f16_any__cuda_sm90_m8n64k128", "f16", kFewSummary),
    tensor_core_row<Isa::sm90, 8, launch_sm90<8>>("linear_any_bf16_any__cuda_sm90_m8n64k128", "bf16", kFewSummary),
    tensor_core_row<Isa::sm90, 16, launch_sm90<16>>("linear_any_f16_any__cuda_sm90_m16n64k128", "f16", kFewSummary),
    tensor_core_row<Isa::sm90, 16, launch_sm90<16>>("linear_any_bf16_any__cuda_sm90_m16n64k128", "bf16", kFewSummary),
    tensor_core_row<Isa::sm80, 16, launch_linear_sm80>("linear_any_f16_any__cuda_sm80_m16n64k128", "f16", kSm80Summary),
    tensor_core_row<Isa::sm80, 16, launch_linear_sm80>("linear_any_bf16_any__cuda_sm80_m16n64k128", "bf16", kSm80Summary),
    Kernel{.name = "linear_any_any_any__cuda_simt_n64k128",
           .backend = Backend::cuda,
           .isa = Isa::simt,
           .op = Op::linear,
           .out = "any",
           .act = "any",
           .weight = "any",
           .layout = "gpu_n64k128",
           .tile = {0, gpu_tile::kRows, gpu_tile::kChannels},
           .summary = "f32 multiply-adds without tensor cores: any activations, prescaled too",
           .accepts = accepts_simt,
           .cost_us = cost_us,
           .run = run_linear<launch_linear_simt>},
    Kernel{.name = "dequantize_any_none_any__cuda_simt_n64k128",
           .backend = Backend::cuda,
           .isa = Isa::simt,
           .op = Op::dequantize,
           .out = "any",
           .act = "none",
           .weight = "any",
           .layout = "gpu_n64k128",
           .tile = {0, gpu_tile::kRows, gpu_tile::kChannels},
           .summary = "W to f32, f16 or bf16, bit-exact",
           .accepts = accepts_weight,
           .cost_us = dequantize_cost_us,
           .run = run_dequantize},
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

// Reading and computing overlap, so the longer of the two counts, for every launch of up to `tokens` rows. Fitted to measurements on
// an H200 (bench/results/h200/decode-kernels.json), in the units of any GPU: what one SM multiplies in a microsecond, and what a launch costs
// beside that. It only has to order kernels that differ by factors.
double linear_cost_us(Isa isa, int tokens, const GpuInfo& gpu, const Problem& p) {
  const double memory = moved_us(gpu, p);
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k) / std::max(1, gpu.sms);  // of one SM
  if (isa == Isa::simt) {
    constexpr double kDecoded = 2e4, kMultiplied = 1e5;  // per SM and microsecond: weights; weights times tokens
    const double compute = weights * (1 / kDecoded + static_cast<double>(p.m) / kMultiplied);
    return kLaunchUs + std::max(memory / 0.7, compute);
  }
  const bool ring = isa == Isa::sm90;
  const double fixed_us = !ring ? 4.5 : tokens == 1 ? 3.0 : tokens == 8 ? 4.7 : 5.5;
  double multiplied = tokens == 1 ? 8.2e4 : 5.6e4;  // weights per SM and microsecond, with all tokens of a launch
  if (!ring) multiplied = p.m <= 8 ? 3.9e4 : 2.9e4;
  if (ring && tokens == 16 && p.k > 16384) multiplied /= 2.2;  // activations leave room for one stage of weights only
  return std::ceil(static_cast<double>(p.m) / tokens) * (fixed_us + std::max(memory / (ring ? 1.0 : 0.7), weights / multiplied));
}

}  // namespace nibble::cuda
