#include "kernels/cuda/table/wna16.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/dense.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/decode_cost.hpp"
#include "kernels/cuda/table/e4m3_halves.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/tasks/decode_ring.hpp"
#include "kernels/cuda/tasks/decode_sm80.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/gemm_sm80.hpp"

namespace nibble::cuda {
namespace {

LinearTask linear_task(const StepArgs& args) {
  LinearTask task{.weight = device_weight(*args.weight),
                  .m = static_cast<int>(args.a.dim(0)),
                  .a_dtype = args.a.dtype,
                  .x = args.a.data,
                  .x_stride = args.a.stride(0),
                  .scratch = args.scratch.data(),
                  .scratch_end = end_of(args.scratch),
                  .next = next_weight(args.operands.next)};
  if (args.experts != nullptr) task.experts = *args.experts;
  task.epilogue = epilogue::element(*args.epilogue, args.operands, args.d, task.weight.scale2);
  if (args.act_scheme.codes == DType::e4m3) take_e4m3_halves(args, task);
  return task;
}

template <Status (*kLaunch)(const LinearTask&, Stream)>
Status run_linear(const Kernel&, const StepArgs& args) {
  return kLaunch(linear_task(args), args.stream);
}

Status run_decode(const Kernel&, const StepArgs& args) {
  const auto config = [](const StepArgs& of) -> const DecodeConfig& { return *static_cast<const DecodeConfig*>(of.config); };
  if (args.joined == nullptr) return launch_linear_sm90(linear_task(args), config(args), args.stream);
  return launch_decode_joined_sm90(linear_task(args), config(args), linear_task(*args.joined), config(*args.joined), args.stream);
}

/// Records of both have one format; with FP8 codes the kernel has no registers for two products.
bool decode_joins(const Problem& first, const Problem& second) {
  const auto slots = [](const Problem& p) {
    return std::pair(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span, gpu_tile::stored_scale(p.scheme.scale));
  };
  return first.experts != 0 && first.experts == second.experts && first.scheme.codes != DType::e4m3 &&
         first.scheme == second.scheme && first.zero_type == second.zero_type && first.a_dtype == second.a_dtype &&
         slots(first) == slots(second);
}

Result<std::shared_ptr<const void>> configure_decode_row(const Kernel& self, const Problem& p) {
  NIBBLE_ASSIGN_OR_RETURN(const RingRoom room, ring_room());
  const gpu_tile::Geometry weight = gpu_tile::geometry(p.scheme, p.zero_type, mean_expert(p).n, p.k);
  NIBBLE_ASSIGN_OR_RETURN(const DecodeConfig config,
                          configure_decode(weight, 0, room_beside_tiles(room, p), asked_of_decode(p, self.tile.m)));
  return std::shared_ptr<const void>(std::make_shared<const DecodeConfig>(config));
}

/// The CTAs that divide K of a row tile in sm_80's kernel for few tokens.
int decode_sm80_ranks(const Problem& p) {
  const gpu_tile::Geometry weight = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k);
  return cuda::decode_sm80_ranks(weight.tiles(), weight.records(), std::max(1, gpu_of(p).sms));
}

Result<std::shared_ptr<const void>> configure_decode_sm80(const Kernel&, const Problem& p) {
  return std::shared_ptr<const void>(std::make_shared<const DecodeConfig>(DecodeConfig{.split = decode_sm80_ranks(p)}));
}

std::size_t decode_sm80_workspace(const Kernel&, const Problem& p) {
  return decode_sm80_bytes(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).tiles(), decode_sm80_ranks(p));
}

Status run_decode_sm80(const Kernel&, const StepArgs& args) {
  return launch_linear_sm80(linear_task(args), static_cast<const DecodeConfig*>(args.config)->split, args.stream);
}

Status run_dense(const Kernel&, const StepArgs& args) {
  return launch_linear_dense(linear_task(args), *static_cast<const DenseConfig*>(args.config), args.stream);
}

Result<std::shared_ptr<const void>> configure_dense_row(const Kernel&, const Problem& p) { return configure_product(p, false); }

Status run_wgmma(const Kernel& self, const StepArgs& args) {
  const int depth = gemm_groups(self.tile.m) * gpu_tile::kRows / self.tile.n;
  return launch_linear_wgmma(linear_task(args), self.tile.m, depth, self.tile.split, args.stream);
}

Status run_dequantize(const Kernel&, const StepArgs& args) {
  return launch_dequantize(device_weight(*args.weight), args.d.data, args.d.dtype, args.d.stride(0), args.transposed,
                           args.stream);
}

/// Sizes are counted in 32 bits inside the kernels.
constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;
/// A slice of one token's activations has to fit into a CTA's shared memory: an eighth of K on sm_90.
constexpr std::int64_t kMostChannels = std::int64_t{1} << 19;

/// The conditions of all rows on the weight.
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
  if (!is_compute_float(p.a_dtype))
    return error(StatusCode::unsupported, "multiplies floats, the activations come as {} codes", name(p.a_dtype));
  if (p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies floats, the activations are to be quantized to {}",
                 name(p.act_scheme.codes));
  return {};
}

/// The conditions of rows that multiply 16-bit floats without quantizing.
Status accepts_half(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_simt(self, p));
  if (name(p.a_dtype) != self.act)
    return error(StatusCode::unsupported, "multiplies {} activations, they are {}", self.act, name(p.a_dtype));
  return {};
}

Status accepts_dense(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_half(self, p));
  if (p.prescales_k) return error(StatusCode::unsupported, "reads activations in place, without a prescale");
  return p.gpu != nullptr ? Status() : dense_runs_here();  // last, because it loads the library
}

Status accepts_tensor_core(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_half(self, p));
  if (p.k > kMostChannels) return error(StatusCode::unsupported, "K={} is beyond {}", p.k, kMostChannels);
  NIBBLE_RETURN_IF_ERROR(accepts_decoded_codes(p));
  NIBBLE_RETURN_IF_ERROR(accepts_one_weight(self, p));
  const bool gemm = self.variant.starts_with("gemm") || self.variant == kOfExperts;
  NIBBLE_RETURN_IF_ERROR(accepts_slots(p, gemm || p.scheme.codes == DType::e4m3 ? 32 : 16));
  if (self.isa != Isa::sm80) return {};
  const int record = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).record_bytes();
  const int needed = gemm ? gemm_sm80_least_shared(p.experts == 0 ? 0 : self.expert_rows, record) : sm80_least_shared(record);
  if (const std::int64_t most = gpu_of(p).shared_bytes_per_block; needed > most)
    return error(StatusCode::unsupported, "needs {} bytes of shared memory, this GPU has {}", needed, most);
  return {};
}

/// The kernel for rows of experts keeps those of a tile in shared memory, over all of K, and counts tiles times row tiles in an int.
Status accepts_decode_experts(const Kernel& self, const Problem& p) {
  constexpr int kLeastStages = 2;
  const gpu_tile::Geometry weight = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k);
  if (p.k % 8 != 0) return error(StatusCode::unsupported, "copies rows 16 bytes at a time, which K={} is no multiple of", p.k);
  if (p.m * weight.tiles() > std::numeric_limits<int>::max())
    return error(StatusCode::unsupported, "takes up to {} rows of experts of N={}, not {}",
                 std::numeric_limits<int>::max() / weight.tiles(), p.n, p.m);
  const int bytes = static_cast<int>(gpu_of(p).shared_bytes_per_block) - kFewTilesBytes;
  if (stages_beside(weight, 0, self.tile.m, 1, bytes) >= kLeastStages) return {};
  return error(StatusCode::unsupported,
               "K={}: {} rows of activations and {} stages of weights do not fit in {} bytes of shared memory", p.k, self.tile.m,
               kLeastStages, bytes);
}

Status accepts_decode(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_tensor_core(self, p));
  if (self.isa == Isa::sm90 && self.tile.m > 8 && gpu_tile::are_floats(gpu_tile::stored_codes(p.scheme.codes)))
    return error(StatusCode::unsupported, "multiplies integers by {} tokens, the weight's codes are {}", self.tile.m,
                 name(p.scheme.codes));
  return p.experts == 0 ? Status() : accepts_decode_experts(self, p);
}

/// The weights of experts for which there are kernels: those that checkpoints have.
Status accepts_wgmma_experts(const Problem& p) {
  const int span = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span;
  const bool whole = span == gpu_tile::kChannels, integers = has_usual_constants(p);
  const auto takes = [&] {
    switch (gpu_tile::stored_codes(p.scheme.codes)) {
      case gpu_tile::Codes::u4: return integers && (whole || span == 32 || span == 64);
      case gpu_tile::Codes::u8: return integers && whole && p.scheme.zero == ZeroKind::none;
      case gpu_tile::Codes::e4m3: return whole;
      case gpu_tile::Codes::e2m1: return span == 16 || (!whole && gpu_tile::stored_scale(p.scheme.scale) == DType::bf16);
      default: return false;
    }
  };
  if (takes()) return {};
  return error(StatusCode::unsupported, "has no kernel for experts of {} with scales of {} and {} activations", p.scheme.name(),
               name(p.scheme.scale), name(p.a_dtype));
}

Status accepts_wgmma(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_half(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_wgmma_weight(p));
  return p.experts == 0 ? Status() : accepts_wgmma_experts(p);
}

double simt_row_cost_us(const Kernel&, const Problem& p) { return simt_cost_us(gpu_of(p), p); }

double decode_row_cost_us(const Kernel& self, const Problem& p) {
  return self.isa == Isa::sm80 ? decode_sm80_cost_us(gpu_of(p), p) : decode_sm90_cost_us(self.tile.m, gpu_of(p), p);
}

double wgmma_cost_us(const Kernel& self, const Problem& p) { return gemm_sm90_cost_us(self.tile, gpu_of(p), p); }

double gemm_sm80_row_cost_us(const Kernel& self, const Problem& p) { return gemm_sm80_cost_us(self.tile.split, gpu_of(p), p); }

/// The CTAs that divide K of a tile: as many as the row says, or as there are records.
int gemm_sm80_ranks(int split, const Problem& p) {
  return std::min(split, gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).records());
}

std::size_t gemm_sm80_workspace(const Kernel& self, const Problem& p) {
  return gemm_sm80_bytes(p.m, p.n, gemm_sm80_ranks(self.tile.split, p));
}

Status run_gemm_sm80(const Kernel& self, const StepArgs& args) {
  if (args.experts != nullptr) return launch_gemm_sm80_experts(linear_task(args), self.expert_rows, args.stream);
  return launch_gemm_sm80(linear_task(args), self.tile.split, args.stream);
}

double few_of_experts_cost_us(const Kernel& self, const Problem& p) { return gemm_sm80_few_cost_us(self.tile, gpu_of(p), p); }

std::size_t wgmma_workspace(const Kernel& self, const Problem& p) {
  const auto rows = static_cast<std::size_t>(gathered_rows(p.m, p.k, p.permutes_k || p.prescales_k));
  return with_parts(2 * rows * static_cast<std::size_t>(gathered_pitch(p.k)), self, gemm_groups(self.tile.m), p);
}

double dense_row_cost_us(const Kernel&, const Problem& p) { return dense_cost_us(gpu_of(p), p); }

std::size_t dense_workspace(const Kernel&, const Problem& p) {
  return dense_scratch(p.m, p.n, p.k, dense_writes_d(p.epilogue, p.a_dtype)).bytes;
}

double dequantize_cost_us(const Kernel&, const Problem& p) {
  constexpr double kShare = 0.7;  // of the bandwidth: an estimate
  const double bytes = static_cast<double>(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).total_bytes()) +
                       static_cast<double>(p.n * p.k) * bits(p.epilogue.out) / 8;
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

// ---- rows

/// What all rows of linear layers have in common.
constexpr Kernel linear_row(Isa isa, std::string_view act) {
  return {
      .backend = Backend::cuda, .isa = isa, .op = Op::linear, .out = "any", .act = act, .weight = "any", .layout = "gpu_n64k128"};
}

constexpr Kernel decode_row(Isa isa, int tokens, std::string_view act) {
  Kernel row = linear_row(isa, act);
  row.tile = {tokens, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary =
      isa == Isa::sm80
          ? "16-bit activations, few tokens: mma.sync, cp.async streams weights through a ring; few row tiles: CTAs split K"
      : tokens == 1 ? "16-bit activations, one token per launch: mma.sync, bulk copies stream weights through a ring"
                    : "16-bit activations, few tokens: mma.sync, bulk copies stream weights through a ring; clusters split K";
  row.rounds_prescaled = true;
  row.sums = Sums::tensor_core_codes;
  row.accepts = accepts_decode;
  row.cost_us = decode_row_cost_us;
  if (isa == Isa::sm80) {
    row.workspace = decode_sm80_workspace;
    row.configure = configure_decode_sm80;
    row.run = run_decode_sm80;
  } else {
    row.configure = configure_decode_row;
    row.run = run_decode;
    if (tokens == kDecodeExpertRows) {
      row.expert_rows = tokens;
      row.fetches_rows = true;
      row.joins = decode_joins;
    }
  }
  return row;
}

constexpr Tile kTiles[] = {
    {.m = 16, .n = 256},
    {.m = 16, .n = 128},
    {.m = 16, .n = 64},
    {.m = 16, .n = 128, .split = 2},
    {.m = 16, .n = 64, .split = 2},
    {.m = 32, .n = 256},
    {.m = 32, .n = 128},
    {.m = 32, .n = 128, .split = 2},
    {.m = 32, .n = 64, .split = 2},
    {.m = 64, .n = 256},
    {.m = 64, .n = 256, .split = 4},
    {.m = 128, .n = 192},
    {.m = 128, .n = 192, .split = 2},
    {.m = 128, .n = 192, .split = 4},
    {.m = 256, .n = 128},
    {.m = 256, .n = 128, .split = 2},
    {.m = 16, .n = 256, .split = kStreamK},
    {.m = 32, .n = 256, .split = kStreamK},
    {.m = 64, .n = 256, .split = kStreamK},
    {.m = 128, .n = 192, .split = kStreamK},
    {.m = 256, .n = 128, .split = kStreamK},
};
constexpr Summaries kWgmmaSummaries{
    .whole = "16-bit activations: wgmma, weights decoded in registers, activations loaded by TMA",
    .split = "16-bit activations: wgmma, weights decoded in registers; the CTAs of a cluster split K",
    .stream_k = "16-bit activations: wgmma, weights decoded in registers; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel wgmma_family(std::string_view act) {
  Kernel row = linear_row(Isa::sm90, act);
  row.rounds_weights = row.rounds_scales = row.rounds_prescaled = true;
  row.sums = Sums::tensor_cores;
  row.accepts = accepts_wgmma;
  row.cost_us = wgmma_cost_us;
  row.workspace = wgmma_workspace;
  row.run = run_wgmma;
  return row;
}

constexpr Kernel gemm_sm80_row(std::string_view act) {
  Kernel row = linear_row(Isa::sm80, act);
  row.variant = "gemm";
  row.summary = "16-bit activations, many tokens: mma.sync, weights decoded in registers, loads by cp.async";
  row.rounds_weights = row.rounds_scales = row.rounds_prescaled = true;
  row.sums = Sums::tensor_cores;
  row.accepts = accepts_tensor_core;
  row.expert_rows = kSm80ExpertRows.many;
  row.cost_us = gemm_sm80_row_cost_us;
  row.run = run_gemm_sm80;
  return row;
}

/// So many CTAs divide K of each tile.
constexpr Kernel gemm_sm80_split_row(std::string_view act, int split) {
  Kernel row = gemm_sm80_row(act);
  row.variant = split == 2 ? "gemm2" : split == 4 ? "gemm4" : "gemm8";
  row.tile.split = split;
  row.summary = "16-bit activations, few tiles: mma.sync, weights decoded in registers, loads by cp.async; several CTAs split K";
  row.expert_rows = 0;
  row.workspace = gemm_sm80_workspace;
  return row;
}

constexpr Kernel gemm_sm80_few_row(std::string_view act) {
  Kernel row = gemm_sm80_row(act);
  row.tile = {kSm80ExpertRows.few, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary = "16-bit activations, few rows of each expert: mma.sync, weights decoded in registers, loads by cp.async";
  row.variant = kOfExperts;
  row.expert_rows = kSm80ExpertRows.few;
  row.cost_us = few_of_experts_cost_us;
  return row;
}

/// The algorithm of cuBLASLt depends on M, so the row is not batch_invariant. bf16 products begin with compute capability 8.0.
constexpr Kernel dense_row(std::string_view act) {
  Kernel row = linear_row(act == "f16" ? Isa::simt : Isa::sm80, act);
  row.variant = "dense";
  row.summary = "dequantizes W into the workspace and calls cuBLASLt; the bits of a row depend on M";
  row.batch_invariant = false;
  row.rounds_weights = true;
  row.sums = Sums::tensor_cores;
  row.accepts = accepts_dense;
  row.cost_us = dense_row_cost_us;
  row.workspace = dense_workspace;
  row.configure = configure_dense_row;
  row.run = run_dense;
  return row;
}

constexpr Kernel simt_row() {
  Kernel row = linear_row(Isa::simt, "any");
  row.tile = {0, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary = "f32 multiply-adds without tensor cores: every GPU and float type";
  row.expert_rows = kSimtExpertRows;
  row.accepts = accepts_simt;
  row.cost_us = simt_row_cost_us;
  row.run = run_linear<launch_linear_simt>;
  return row;
}

constexpr Kernel dequantize_row() {
  Kernel row = linear_row(Isa::simt, "none");
  row.op = Op::dequantize;
  row.tile = {0, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary = "writes W as f32, f16 or bf16, bit-exact";
  row.accepts = accepts_weight;
  row.cost_us = dequantize_cost_us;
  row.run = run_dequantize;
  return row;
}

}  // namespace

std::span<const Kernel> wna16_kernels() {
  static const std::vector<Kernel> kRows = [] {
    constexpr std::string_view kActs[] = {"f16", "bf16"};
    std::vector<Kernel> rows;
    for (const int tokens : {1, 8, 16})
      for (const std::string_view act : kActs) rows.push_back(decode_row(Isa::sm90, tokens, act));
    for (const std::string_view act : kActs) rows.push_back(decode_row(Isa::sm80, 16, act));
    for (const std::string_view act : kActs) append(rows, wgmma_family(act), kTiles, kWgmmaSummaries);
    for (Kernel& row : rows)
      if (row.variant == "wgmma" && row.tile.m <= 128) row.expert_rows = row.tile.m;
    for (const std::string_view act : kActs) {
      rows.insert(rows.end(), {gemm_sm80_few_row(act), gemm_sm80_row(act)});
      for (const int split : kSm80Splits) rows.push_back(gemm_sm80_split_row(act, split));
    }
    for (const std::string_view act : kActs) rows.push_back(dense_row(act));
    rows.insert(rows.end(), {simt_row(), dequantize_row()});
    return rows;
  }();
  return kRows;
}

namespace {

bool has_float_codes(const Problem& p) { return gpu_tile::are_floats(gpu_tile::stored_codes(p.scheme.codes)); }

/// Whether a record has one scale and one zero a row, of those kinds; floats have no zeros, and scales of any type.
bool has_whole_records(const Problem& p) {
  return gpu_tile::span(p.scheme.group.k) == gpu_tile::kChannels && (has_float_codes(p) || has_usual_constants(p));
}

}  // namespace

bool has_usual_constants(const Problem& p) {
  const DType scale = gpu_tile::stored_scale(p.scheme.scale);
  return scale != DType::f32 && p.scheme.zero <= ZeroKind::integer && (p.a_dtype != DType::f16 || scale == DType::f16);
}

Status accepts_one_weight(const Kernel& self, const Problem& p) {
  if (self.variant != kOfExperts || p.experts != 0) return {};
  return error(StatusCode::unsupported, "multiplies rows of experts, not by one weight");
}

Status accepts_slots(const Problem& p, int shortest) {
  if (gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).span >= shortest) return {};
  return error(StatusCode::unsupported, "decodes weights in groups of a multiple of {} channels, not of {}", shortest,
               p.scheme.group.k);
}

Status accepts_decoded_codes(const Problem& p) {
  if (p.scheme.codes != DType::e5m2) return {};
  return error(StatusCode::unsupported, "decodes integers, e2m1 and e4m3 in registers, not {}", name(p.scheme.codes));
}

Status accepts_wgmma_weight(const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_decoded_codes(p));
  const bool offsets = p.op == Op::linear && p.scheme.zero == ZeroKind::offset && gpu_tile::stored_bits(p.scheme.codes) == 4 &&
                       gpu_tile::stored_scale(p.scheme.scale) == p.a_dtype && p.zero_type == p.a_dtype;
  const bool usual = has_usual_constants(p) && p.scheme.codes != DType::e4m3;
  if (usual && p.op == Op::linear && !has_float_codes(p)) return {};
  return accepts_slots(p, offsets || usual ? 16 : 32);
}

GpuInfo gpu_of(const Problem& problem) {
  if (problem.gpu != nullptr) return *problem.gpu;
  Result<GpuInfo> gpu = this_gpu();
  return gpu.ok() ? *std::move(gpu) : GpuInfo{.sms = 1, .read_gbytes_per_s = 1};
}

// Reading and computing overlap, so the longer of the two counts. The speeds are of one SM.
double simt_cost_us(const GpuInfo& gpu, const Problem& p) {
  constexpr double kDecoded = 2.4e4, kMultiplied = 5.5e4;  // a microsecond: weights; weights times tokens
  const double sms = std::max(1, gpu.sms), tiles = std::ceil(static_cast<double>(p.n) / gpu_tile::kRows);
  const double busy = std::min(1.0, 3.3 * tiles / sms);  // of few rows, about three SMs a tile
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k) / sms;
  const double compute = weights / busy * (1 / kDecoded + static_cast<double>(p.m) / kMultiplied);
  return kLaunchUs + std::max(tile_moved_us(gpu, p, bits(p.a_dtype)) / 0.7, compute);
}

namespace {

constexpr double kSm80StartUs = 2.6;  // of a launch of sm_80's kernels that memory bounds

}  // namespace

int counted_ranks(int ranks, const GpuInfo& gpu) {
  const bool has_own = (gpu.isas >> static_cast<int>(Isa::sm90) & 1) != 0;
  return has_own ? 1 : ranks;
}

double decode_sm80_cost_us(const GpuInfo& gpu, const Problem& p) {
  const gpu_tile::Geometry weight = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k);
  const int sms = std::max(1, gpu.sms), ranks = counted_ranks(decode_sm80_ranks(weight.tiles(), weight.records(), sms), gpu);
  const int tokens = static_cast<int>(std::min<std::int64_t>(p.m, kDecodeTokens));
  return short_slots(p) * std::ceil(static_cast<double>(p.m) / kDecodeTokens) *
         std::max(kSm80StartUs + tile_moved_us(gpu, p, bits(p.a_dtype)) / 0.7,
                  decode_sm80_us(weight.tiles(), weight.records(), ranks, tokens, sms));
}

double decode_sm90_cost_us(int tokens, const GpuInfo& gpu, const Problem& p) {
  return decode_cost_us(wna16_decode_family(p), tokens, gpu, p);
}

WgmmaFamily wna16_family(const Problem& p) {
  if (!has_whole_records(p)) return WgmmaFamily::float_folds;
  if (p.op == Op::conv) return WgmmaFamily::float_patches;
  if (gpu_tile::stored_codes(p.scheme.codes) != gpu_tile::Codes::u8) return WgmmaFamily::floats;
  return p.a_dtype == DType::bf16 ? WgmmaFamily::bytes_bf16 : WgmmaFamily::bytes;
}

// bf16 activations become f16 (sm90/decode/decode_range.cuh), so that a record takes as long.
WgmmaFamily wna16_decode_family(const Problem& p) {
  const WgmmaFamily family = wna16_family(p);
  return family == WgmmaFamily::bytes_bf16 ? WgmmaFamily::bytes : family;
}

namespace {
constexpr double kCopyShare = 0.85;  // of the bandwidth
}

Result<std::shared_ptr<const void>> configure_product(const Problem& p, bool in_place) {
  NIBBLE_ASSIGN_OR_RETURN(const std::shared_ptr<const DenseConfig> config,
                          configure_dense({.m = p.m,
                                           .n = p.n,
                                           .k = p.k,
                                           .a_dtype = p.a_dtype,
                                           .out = p.epilogue.out,
                                           .writes_d = dense_writes_d(p.epilogue, p.a_dtype),
                                           .in_place = in_place}));
  return std::shared_ptr<const void>(config);
}

// Estimates from what cuBLAS reaches for large M on an H200, 700 TFLOP/s in f16, and an A100, 250, and for f32 from an SM's 128 multiply-adds
// a clock: a tile of 128 output channels × up to 128 tokens keeps one SM busy, and with fewer tiles than SMs some are idle.
double product_cost_us(const GpuInfo& gpu, const Problem& p) {
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const double bytes_a_us = 1e3 * gpu.read_gbytes_per_s;
  const double width = bits(p.a_dtype) / 8.0, result = m * n * bits(p.epilogue.out) / 8;
  const bool writes_d = dense_writes_d(p.epilogue, p.a_dtype);
  const bool hopper = gpu.compute_capability >= 90 && gpu.compute_capability < 120;
  const double flops_a_us = p.a_dtype == DType::f32 ? 3e5 : hopper ? 5.3e6 : 2.3e6;  // of an SM
  const double tile_m = std::min(128.0, 16 * std::ceil(m / 16));
  const double tiles = std::ceil(m / 128) * std::ceil(n / 128);
  const double multiply_us = std::max(1.0, tiles / std::max(1, gpu.sms)) * 2 * 128 * tile_m * k / flops_a_us;
  const double read_us = (width * (n * k + m * k) + (writes_d ? result : 4 * m * n)) / bytes_a_us;
  const double epilogue_us = writes_d ? 0 : kLaunchUs + (4 * m * n + result) / (kCopyShare * bytes_a_us);
  constexpr double kGemmUs = 3.0;  // before the first and after the last product, and a sum over parts of K
  return kGemmUs + std::max(multiply_us, read_us) + epilogue_us;
}

// Steps follow each other, so their times add up.
double dense_cost_us(const GpuInfo& gpu, const Problem& p) {
  const auto packed = static_cast<double>(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).total_bytes());
  const double dequantized = 2 * static_cast<double>(p.n) * static_cast<double>(p.k);
  return kLaunchUs + (packed + dequantized) / (kCopyShare * 1e3 * gpu.read_gbytes_per_s) + product_cost_us(gpu, p);
}

WgmmaFeatures gemm_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& p) {
  const int blocks = tile.n / gpu_tile::kRows;
  const PassShape shape{
      .blocks = blocks, .depth = gemm_groups(tile.m) / blocks, .part = p.experts == 0 ? 0 : gemm_part(tile.m, false)};
  return wgmma_features(wna16_family(p), tile, shape, gpu, p, tile_bytes(p), bits(p.a_dtype));
}

double gemm_sm90_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& p) {
  return wgmma_cost_us(gemm_sm90_features(tile, gpu, p), gpu) + (p.experts == 0 ? 0 : kDistributeUs);
}

// Launches of equal tokens, but the last. Records of several groups take as many times longer as was measured for 256 × 64.
double gemm_sm80_cost_us(int split, const GpuInfo& gpu, const Problem& p) {
  const int ranks = counted_ranks(gemm_sm80_ranks(split, p), gpu), sms = std::max(1, gpu.sms);
  const int records = records_of(ranks - 1, ranks, gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).records()).count;
  std::span<const GemmSm80Shape> shapes = kGemmSm80Shapes;
  if (p.experts != 0) shapes = shapes.subspan(1, 1);  // sm80/gemm_experts.cu
  const auto launch_us = [&](std::int64_t tokens) {
    double least = std::numeric_limits<double>::infinity();
    for (const GemmSm80Shape& shape : shapes)
      least = std::min(least, gemm_sm80_us(shape, gemm_sm80_tiles(shape, tokens, p.n) * ranks, records, ranks, sms));
    return least;
  };
  const std::int64_t most = split_k_tokens(p.n, ranks), whole = p.m / most, rest = p.m % most;
  const double longer = has_whole_records(p) ? 1 : 2.4;
  const double compute = static_cast<double>(whole) * launch_us(most) + (rest == 0 ? 0 : launch_us(rest));
  return std::max(kSm80StartUs + tile_moved_us(gpu, p, bits(p.a_dtype)) / 0.7, kGemmSm80LaunchUs + compute * longer);
}

/// Of tiles of 64 rows × 16 tokens, of which an SM runs several at a time. Not measured: as the matrix instructions and loads of
/// sm80/gemm_experts.cu compare with those of 256 × 64.
double gemm_sm80_few_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& p) {
  const double tiles = std::ceil(static_cast<double>(p.m) / tile.m) * std::ceil(static_cast<double>(p.n) / tile.n);
  const double record_us = has_whole_records(p) ? 0.17 : 0.4, records = std::ceil(static_cast<double>(p.k) / tile.k);
  const double compute = std::max(1.0, tiles / std::max(1, gpu.sms)) * records * record_us;
  return 6.0 + std::max(tile_moved_us(gpu, p, bits(p.a_dtype)) / 0.7, compute);
}

}  // namespace nibble::cuda
