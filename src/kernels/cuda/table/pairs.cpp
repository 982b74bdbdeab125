// f32 activations × weights that 16-bit floats hold exactly but for their scales, on sm_90's tensor cores: an activation is the sum of two f16.
//
//   prepare   A [M,K] ──pair_acts──▶ pairs of f16, a scale of each token
//   linear    pairs ──gemm_pairs──▶ D
#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/pairs.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/pair_task.hpp"

namespace nibble::cuda {
namespace {

constexpr ActForm kForm = ActForm::f16x2_rows;
constexpr std::int64_t kMostDimension = std::int64_t{1} << 29;  // two numbers for each, counted in 32 bits inside the kernels

/// Whether a row has one scale in a record: groups of a multiple of 128 channels, or of all of K.
bool has_one_scale_per_record(const Problem& p) {
  return gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span == gpu_tile::kChannels;
}

Status accepts_layer(const Problem& p) {
  if (p.a_dtype != DType::f32 || p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies f32 activations as they are, they come as {}{}", name(p.a_dtype),
                 p.act_scheme.codes == DType::none ? "" : " and are to be quantized");
  if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  NIBBLE_RETURN_IF_ERROR(accepts_decoded_codes(p));
  if (p.scheme.zero == ZeroKind::offset || p.scheme.zero == ZeroKind::real)
    return error(StatusCode::unsupported, "subtracts zero points that are integers");
  NIBBLE_RETURN_IF_ERROR(accepts_slots(p, gpu_tile::stored_bits(p.scheme.codes) == 4 ? 16 : 32));
  const bool whole = has_one_scale_per_record(p);
  if (p.scheme.codes == DType::e4m3 ? !whole : p.scheme.codes == DType::e2m1 && whole)
    return error(StatusCode::unsupported,
                 "multiplies e4m3 in groups of a multiple of 128 channels and e2m1 in others, not {} in groups of {} where K={}",
                 name(p.scheme.codes), p.scheme.group.k, p.k);
  if (std::max({p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension is beyond {}", p.m, p.n, p.k, kMostDimension);
  return {};
}

// ---- prepare

Status accepts_prepare(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  return accepts_layer(p);
}

double prepare_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.75;  // of the bandwidth
  const double bytes = 8.0 * static_cast<double>(p.m) * static_cast<double>(p.k);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

std::size_t prepare_workspace(const Kernel&, const Problem& p) { return pair_map(p.m, p.k).bytes; }

Status run_prepare(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const PairMap map = pair_map(args.a.dim(0), w.k);
  return launch_pair_acts({.a = args.a.data,
                           .type = DType::f32,
                           .a_stride = args.a.stride(0),
                           .m = args.a.dim(0),
                           .k = w.k,
                           .perm = reinterpret_cast<const std::int32_t*>(w.device.perm.data()),
                           .prescale = reinterpret_cast<const float*>(w.device.prescale.data()),
                           .codes = args.prepared,
                           .pitch = 2 * map.pitch,
                           .columns = map.pitch / 2,
                           .token_scales = reinterpret_cast<float*>(args.prepared + map.scales)},
                          args.stream);
}

// ---- linear

Status accepts_linear(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_one_weight(self, p));
  return accepts_layer(p);
}

Status run_linear(const Kernel& self, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const PairMap map = pair_map(args.a.dim(0), w.k);
  const int depth = pair_groups(self.tile.m) * gpu_tile::kRows / self.tile.n;
  return launch_pairs_sm90({.weight = device_weight(w),
                            .m = static_cast<int>(args.a.dim(0)),
                            .x = args.prepared,
                            .pitch = map.pitch,
                            .scales = reinterpret_cast<const float*>(args.prepared + map.scales),
                            .scratch_end = end_of(args.scratch),
                            .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f)),
                            .next = next_weight(args.operands.next)},
                           self.tile.m, depth, self.tile.split, args.stream);
}

double linear_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  return wgmma_cost_us(pairs_sm90_features(self.tile, gpu, p), gpu);
}

std::size_t linear_workspace(const Kernel& self, const Problem& p) { return with_parts(0, self, pair_groups(self.tile.m), p); }

// ---- rows

constexpr Kernel kFamily{.backend = Backend::cuda,
                         .isa = Isa::sm90,
                         .op = Op::linear,
                         .out = "any",
                         .act = name(kForm),
                         .weight = "any",
                         .layout = "gpu_n64k128",
                         .form = kForm,
                         .sums = Sums::tensor_core_pairs,
                         .accepts = accepts_linear,
                         .cost_us = linear_cost_us,
                         .workspace = linear_workspace,
                         .run = run_linear};

constexpr Tile kTiles[] = {
    {.m = 16, .n = 256},
    {.m = 16, .n = 128, .split = 2},
    {.m = 16, .n = 64, .split = 2},
    {.m = 32, .n = 256},
    {.m = 32, .n = 128, .split = 2},
    {.m = 64, .n = 192},
    {.m = 64, .n = 192, .split = 2},
    {.m = 128, .n = 128},
    {.m = 128, .n = 128, .split = 2},
    {.m = 64, .n = 192, .split = kStreamK},
    {.m = 128, .n = 128, .split = kStreamK},
};
constexpr Summaries kSummaries{
    .whole = "f32 activations as pairs of f16: wgmma on both, weights decoded in registers, sums scaled in f32",
    .split = "f32 activations as pairs of f16: wgmma on both, sums scaled in f32; the CTAs of a cluster split K",
    .stream_k =
        "f32 activations as pairs of f16: wgmma on both, sums scaled in f32; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel kPrepareRow{.backend = Backend::cuda,
                             .isa = Isa::simt,
                             .op = Op::prepare,
                             .out = name(kForm),
                             .act = "f32",
                             .weight = "none",
                             .layout = "",
                             .tile = {},
                             .summary = "f32 activations as pairs of f16 under a power of two per token",
                             .form = kForm,
                             .accepts = accepts_prepare,
                             .cost_us = prepare_cost_us,
                             .workspace = prepare_workspace,
                             .run = run_prepare};

}  // namespace

WgmmaFeatures pairs_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& p) {
  const int blocks = tile.n / gpu_tile::kRows;
  const PassShape shape{.blocks = blocks, .depth = pair_groups(tile.m) / blocks};
  const WgmmaFamily family = has_one_scale_per_record(p) ? WgmmaFamily::pairs : WgmmaFamily::pair_folds;
  return wgmma_features(family, tile, shape, gpu, p, tile_bytes(p), bits(DType::f32));
}

std::span<const Kernel> pair_kernels() {
  static const std::vector<Kernel> kRows = [] {
    std::vector<Kernel> rows;
    append(rows, kFamily, kTiles, kSummaries);
    rows.push_back(kPrepareRow);
    return rows;
  }();
  return kRows;
}

}  // namespace nibble::cuda
