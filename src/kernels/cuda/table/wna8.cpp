#include "kernels/cuda/table/wna8.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/decode_cost.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/norm.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/cuda/tasks/split_k.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"
#include "kernels/norm.hpp"

namespace nibble::cuda {
namespace {

/// The form of activations that most of these rows read: s8 codes, interleaved by 16 channels (gpu_tile::interleaved), and the terms of
/// folds.
constexpr ActForm kForm = ActForm::s8i16;

constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;  // sizes are counted in 32 bits inside the kernels
/// A token's slice of codes has to fit into a CTA's shared memory: an eighth of K.
constexpr std::int64_t kMostDecodeChannels = 1 << 19;

/// The conditions of all rows on activations.
Status accepts_acts(const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_wna8(p));
  if (!is_compute_float(p.a_dtype) && p.act_scheme.group.k != 0 && p.permutes_k)
    return error(StatusCode::unsupported, "A comes in blocks of {} channels that share a scale, which act-order tears apart",
                 p.act_scheme.group.k);
  if (std::max({p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension is beyond {}", p.m, p.n, p.k, kMostDimension);
  return {};
}

/// A as it is read, and the rule of its codes.
QuantizeTask quantize_task(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  QuantizeTask task = online_rule(args);
  task.a = args.a.data;
  task.a_stride = args.a.stride(0);
  task.m = args.a.dim(0);
  task.k = w.k;
  task.perm = reinterpret_cast<const std::int32_t*>(w.device.perm.data());
  task.prescale = reinterpret_cast<const float*>(w.device.prescale.data());
  if (args.experts != nullptr) task.source = args.experts->source, task.divisor = args.experts->divisor;
  return task;
}

bool has_offsets(const ActScheme& act) { return act.zero == ZeroKind::offset; }
/// Whether a token's scale is left out of its terms.
bool has_token_scales(const ActScheme& act) { return act.group.k == 0 && !has_offsets(act); }

Wna8Map map_of(const ActScheme& act, const WeightScheme& weight, std::int64_t m, std::int64_t k, bool experts) {
  return wna8_map(online_fold(act, weight), act.zero, m, k, experts);
}
/// Of a step.
Wna8Map map_of(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  return map_of(args.act_scheme, w.scheme, args.a.dim(0), w.k, args.experts != nullptr);
}

// ---- prepare

Status accepts_prepare(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_form(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_acts(p));
  return p.normalizes ? accepts_norm_codes(p) : Status();
}

double prepare_cost_us(const Kernel&, const Problem& p) {
  if (p.normalizes) return norm_codes_cost_us(p);
  constexpr double kShare = 0.75;  // of the bandwidth
  const double bytes = static_cast<double>(p.m) * static_cast<double>(p.k) * (bits(p.a_dtype) / 8.0 + 1 + 8.0 / 128);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

std::size_t prepare_workspace(const Kernel&, const Problem& p) {
  return map_of(p.act_scheme, p.scheme, p.m, p.k, p.experts != 0).bytes;
}

Status run_prepare(const Kernel& self, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const Wna8Map map = map_of(args);
  QuantizeTask task = quantize_task(args);
  task.codes = args.prepared;
  task.pitch = map.pitch;
  task.columns = map.pitch;
  task.terms = args.prepared + map.terms;
  task.term_fold = map.term_pitch;
  task.term_pairs = true;
  task.term_offsets = has_offsets(args.act_scheme);
  task.fold = online_fold(args.act_scheme, w.scheme);
  if (has_token_scales(args.act_scheme)) task.token_scales = reinterpret_cast<float*>(args.prepared + map.scales);
  return normalizes(self) ? launch_norm_codes(norm_task(args), task, args.stream) : launch_quantize_acts(task, args.stream);
}

// ---- linear

/// The weights and activations of experts for which there are kernels.
Status accepts_experts(const Problem& p) {
  if (gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).bits != 4)
    return error(StatusCode::unsupported, "multiplies weights of experts of up to 4 bits, not {}", name(p.scheme.codes));
  if (p.act_scheme.zero != ZeroKind::none)
    return error(StatusCode::unsupported, "multiplies rows of experts whose codes have neither zero points nor offsets");
  return accepts_whole_steps(p);
}

Status accepts_linear(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_one_weight(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_acts(p));
  if (self.isa == Isa::sm90) NIBBLE_RETURN_IF_ERROR(accepts_whole_steps(p));
  if (self.quantizes && !is_compute_float(p.a_dtype))
    return error(StatusCode::unsupported, "quantizes f32, f16 and bf16 itself, A comes as {} codes", name(p.a_dtype));
  if (self.quantizes && p.act_scheme.zero != ZeroKind::none)
    return error(StatusCode::unsupported, "makes codes without zero points and offsets");
  if (self.quantizes && p.k > kMostDecodeChannels)
    return error(StatusCode::unsupported, "K={} is beyond {}", p.k, kMostDecodeChannels);
  return p.experts == 0 ? Status() : accepts_experts(p);
}

Wna8Task wna8_task(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const Wna8Map map = map_of(args);
  return {
      .weight = device_weight(w),
      .m = static_cast<int>(args.a.dim(0)),
      .codes = args.prepared,
      .pitch = map.pitch,
      .terms = args.prepared + map.terms,
      .term_pitch = map.term_pitch,
      .fold = online_fold(args.act_scheme, w.scheme),
      .zero = args.act_scheme.zero,
      .token_scales = has_token_scales(args.act_scheme) ? reinterpret_cast<const float*>(args.prepared + map.scales) : nullptr,
      .scratch_end = end_of(args.scratch),
      .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f)),
      .next = next_weight(args.operands.next),
      .experts = args.experts == nullptr ? ExpertTiles{} : *args.experts};
}

Status run_sm80(const Kernel& self, const StepArgs& args) {
  if (args.experts != nullptr) return launch_wna8_sm80_experts(wna8_task(args), self.expert_rows, args.stream);
  return launch_wna8_sm80(wna8_task(args), self.tile.split, args.stream);
}

/// The CTAs that divide K of a tile: as many as the row says, or as there are records.
int sm80_ranks(int split, const Problem& p) {
  return std::min(split, gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).records());
}

std::size_t sm80_workspace(const Kernel& self, const Problem& p) {
  return wna8_sm80_bytes(p.m, p.n, sm80_ranks(self.tile.split, p));
}

Status run_sm90(const Kernel& self, const StepArgs& args) {
  const int depth = gemm_groups(self.tile.m) * gpu_tile::kRows / self.tile.n;
  return launch_wna8_sm90(wna8_task(args), self.tile.m, depth, self.tile.split, args.stream);
}

Result<std::shared_ptr<const void>> configure_decode_row(const Kernel& self, const Problem& p) {
  NIBBLE_ASSIGN_OR_RETURN(const RingRoom room, ring_room());
  const int folds = gpu_tile::kChannels / online_fold(p.act_scheme, p.scheme);
  NIBBLE_ASSIGN_OR_RETURN(const DecodeConfig config, configure_decode(gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k), folds,
                                                                      room, {.tokens = self.tile.m}));
  return std::shared_ptr<const void>(std::make_shared<const DecodeConfig>(config));
}

Status run_decode(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const Wna8DecodeTask task{.weight = device_weight(w),
                            .acts = quantize_task(args),
                            .fold = online_fold(args.act_scheme, w.scheme),
                            .epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f)),
                            .next = next_weight(args.operands.next)};
  return launch_wna8_decode_sm90(task, *static_cast<const DecodeConfig*>(args.config), args.stream);
}

double sm80_cost_us(const Kernel& self, const Problem& p) {
  if (p.experts != 0) return wna8_sm80_cost_us(gpu_of(p), p, self.expert_rows);
  return wna8_sm80_cost_us(gpu_of(p), p, wna8_sm80_tokens(p.m), sm80_ranks(self.tile.split, p));
}

double sm90_cost_us(const Kernel& self, const Problem& p) {
  return wna8_sm90_cost_us(self.tile, gpu_of(p), p, wna8_family(p)) + (p.experts == 0 ? 0 : kDistributeUs);
}

double decode_row_cost_us(const Kernel& self, const Problem& p) { return wna8_decode_cost_us(self.tile.m, gpu_of(p), p); }

std::size_t sm90_workspace(const Kernel& self, const Problem& p) { return with_parts(0, self, gemm_groups(self.tile.m), p); }

// ---- rows

constexpr Kernel linear_row(Isa isa) {
  return {.backend = Backend::cuda,
          .isa = isa,
          .op = Op::linear,
          .out = "any",
          .act = name(kForm),
          .weight = "any",
          .layout = "gpu_n64k128",
          .form = kForm,
          .sums = Sums::integer_folds,
          .accepts = accepts_linear};
}

/// Quantizes `tokens` tokens at a time by itself.
constexpr Kernel decode_row(int tokens) {
  Kernel row = linear_row(Isa::sm90);
  row.act = "any";
  row.variant = "online";
  row.tile = {tokens, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary =
      tokens == 1
          ? "quantizes one token to int8 and multiplies it in the same launch; bulk copies stream weights through a ring"
          : "quantizes few tokens to int8 and multiplies them in the same launch; bulk copies stream weights through a ring";
  row.form = ActForm::as_given;
  row.quantizes = true;
  row.cost_us = decode_row_cost_us;
  row.configure = configure_decode_row;
  row.run = run_decode;
  return row;
}

constexpr Tile kTiles[] = {
    {.m = 16, .n = 256},
    {.m = 16, .n = 128},
    {.m = 16, .n = 128, .split = 2},
    {.m = 16, .n = 64, .split = 2},
    {.m = 32, .n = 256},
    {.m = 32, .n = 128},
    {.m = 32, .n = 64},
    {.m = 32, .n = 128, .split = 2},
    {.m = 32, .n = 64, .split = 2},
    {.m = 64, .n = 256},
    {.m = 64, .n = 256, .split = 2},
    {.m = 64, .n = 256, .split = 4},
    {.m = 128, .n = 192},
    {.m = 16, .n = 256, .split = kStreamK},
    {.m = 32, .n = 256, .split = kStreamK},
    {.m = 64, .n = 256, .split = kStreamK},
    {.m = 128, .n = 192, .split = kStreamK},
};
constexpr Summaries kSm90Summaries{
    .whole = "int8 activations per token or block: wgmma, weights as int8 in registers",
    .split = "int8 activations per token or block: wgmma, weights as int8 in registers; the CTAs of a cluster split K",
    .stream_k =
        "int8 activations per token or block: wgmma, weights as int8 in registers; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel sm90_family() {
  Kernel row = linear_row(Isa::sm90);
  row.cost_us = sm90_cost_us;
  row.workspace = sm90_workspace;
  row.run = run_sm90;
  return row;
}

constexpr Kernel sm80_row() {
  Kernel row = linear_row(Isa::sm80);
  row.tile = {0, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary = "int8 activations per token or block: mma.sync, loads by cp.async";
  row.expert_rows = kSm80ExpertRows.many;
  row.cost_us = sm80_cost_us;
  row.run = run_sm80;
  return row;
}

/// So many CTAs divide K of each tile.
constexpr Kernel sm80_split_row(int split) {
  Kernel row = sm80_row();
  row.variant = split_variant(split);
  row.tile.split = split;
  row.summary = "int8 activations per token or block, few tiles: mma.sync, loads by cp.async; several CTAs split K";
  row.expert_rows = 0;
  row.workspace = sm80_workspace;
  return row;
}

constexpr Kernel sm80_few_row() {
  Kernel row = sm80_row();
  row.tile.m = row.expert_rows = kSm80ExpertRows.few;
  row.summary = "int8 activations per token or block, few rows of each expert: mma.sync, loads by cp.async";
  row.variant = kOfExperts;
  return row;
}

constexpr Kernel kPrepareRow{
    .backend = Backend::cuda,
    .isa = Isa::simt,
    .op = Op::prepare,
    .out = name(kForm),
    .act = "any",
    .weight = "none",
    .layout = "",
    .tile = {},
    .summary = "puts int8 activations, quantized here or given as codes, in the channel order of gpu_n64k128, with sums",
    .form = kForm,
    .fetches_rows = true,
    .accepts = accepts_prepare,
    .cost_us = prepare_cost_us,
    .workspace = prepare_workspace,
    .run = run_prepare};

Kernel norm_row() {
  Kernel row = kPrepareRow;
  row.variant = "norm";
  row.fetches_rows = false;
  row.summary =
      "RMSNorm or LayerNorm of the activations, which are quantized to int8 in the channel order of gpu_n64k128, with sums";
  return row;
}

}  // namespace

std::span<const Kernel> wna8_kernels() {
  static const std::vector<Kernel> kRows = [] {
    std::vector<Kernel> rows{decode_row(1), decode_row(8)};
    append(rows, sm90_family(), kTiles, kSm90Summaries);
    for (Kernel& row : rows)
      if (row.variant == "wgmma" && row.tile.m != 32) row.expert_rows = row.tile.m;
    rows.insert(rows.end(), {sm80_few_row(), sm80_row()});
    for (const int split : kSm80Splits) rows.push_back(sm80_split_row(split));
    rows.insert(rows.end(), {kPrepareRow, norm_row()});
    return rows;
  }();
  return kRows;
}

WgmmaFeatures wna8_sm90_features(const Tile& tile, const GpuInfo& gpu, const Problem& p, WgmmaFamily family) {
  const int blocks = tile.n / gpu_tile::kRows;
  const PassShape shape{
      .blocks = blocks, .depth = gemm_groups(tile.m) / blocks, .part = p.experts == 0 ? 0 : gemm_part(tile.m, true)};
  return wgmma_features(family, tile, shape, gpu, p, tile_bytes(p), 8);
}

double wna8_sm90_cost_us(const Tile& tile, const GpuInfo& gpu, const Problem& p, WgmmaFamily family) {
  return wgmma_cost_us(wna8_sm90_features(tile, gpu, p, family), gpu);
}

/// A CTA multiplies 64 rows × 16 or 64 tokens over all of K. The time of a record, for a CTA alone on an SM and for CTAs that share one,
/// was measured on an H200; that of folds of 16 channels is twice what those of 32 add to a whole record's, estimated.
double wna8_sm80_cost_us(const GpuInfo& gpu, const Problem& p) { return wna8_sm80_cost_us(gpu, p, wna8_sm80_tokens(p.m)); }
double wna8_sm80_cost_us(const GpuInfo& gpu, const Problem& p, int tokens, int split) {
  struct Record {
    double alone_us, shared_us;
  };
  struct Records {
    Record whole, steps, halves;  // by the folds' length
  };
  constexpr Records kFewTokens{{0.75, 0.24}, {2.2, 0.68}, {3.7, 1.12}}, kManyTokens{{1.35, 0.72}, {3.0, 1.15}, {4.7, 1.58}};
  const Records& all = tokens == 16 ? kFewTokens : kManyTokens;
  const int fold = online_fold(p.act_scheme, p.scheme);
  const Record record = fold == gpu_tile::kChannels ? all.whole : fold == gpu_tile::kFragmentChannels ? all.halves : all.steps;
  const int ranks = counted_ranks(split, gpu), records = gpu_tile::geometry(p.scheme, p.zero_type, p.n, p.k).records();
  const double tiles = std::ceil(static_cast<double>(p.n) / gpu_tile::kRows) * std::ceil(static_cast<double>(p.m) / tokens);
  const double each = std::max(1.0, tiles * ranks / std::max(1, gpu.sms));  // CTAs of an SM
  const double launches = std::ceil(static_cast<double>(p.m) / split_k_tokens(p.n, ranks));
  const double compute = records_of(ranks - 1, ranks, records).count * std::max(record.alone_us, record.shared_us * each) +
                         add_ranks_us(ranks, static_cast<std::int64_t>(std::ceil(each)), gpu_tile::kRows, tokens);
  return kLaunchUs * launches + 4.5 + std::max(tile_moved_us(gpu, p, 8) / 0.7, compute);
}

WgmmaFamily wna8_family(const Problem& p) {
  if (online_fold(p.act_scheme, p.scheme) != gpu_tile::kChannels) return WgmmaFamily::online_folds;
  return p.act_scheme.group.k == 0 && p.act_scheme.zero == ZeroKind::none ? WgmmaFamily::online_tokens : WgmmaFamily::online;
}

namespace {

/// Channels of a product of bytes, and of half of one: what a fold has at least.
constexpr int kStepFold = 32, kShortestFold = kStepFold / 2;

}  // namespace

int online_fold(const ActScheme& act, const WeightScheme& weight) {
  const int span = std::min(gpu_tile::span(act.group.k), gpu_tile::span(weight.group.k));
  const bool centred = code_bias(weight.codes) == 1 << (gpu_tile::stored_bits(weight.codes) - 1);
  const bool common =
      weight.scale != DType::f32 && (weight.zero == ZeroKind::integer || (weight.zero == ZeroKind::none && centred));
  if (span < kStepFold) return kShortestFold;
  return common && span == gpu_tile::kChannels ? gpu_tile::kChannels : kStepFold;
}

QuantizeTask online_rule(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const bool floats = is_compute_float(args.a.dtype);
  QuantizeTask task{.type = args.a.dtype,
                    .zero_points = args.act_scheme.zero == ZeroKind::integer,
                    .known = floats && args.act_scheme.group == GroupShape::tensor(),
                    .group = args.act_scheme.group.k};
  if (!floats) task.given = given_acts(args);
  if (task.known) task.scale = w.static_acts->scale, task.zero = w.static_acts->zero;
  if (w.act_limit) task.limit = *w.act_limit;
  return task;
}

Status accepts_wna8_weight(const Problem& p) {
  if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  if (gpu_tile::are_floats(gpu_tile::stored_codes(p.scheme.codes)))
    return error(StatusCode::unsupported, "multiplies integers, the weight's codes are {}", name(p.scheme.codes));
  return accepts_slots(p, kShortestFold);
}

Status accepts_wna8(const Problem& p) {
  const ActScheme& act = p.act_scheme;
  if (act.codes != DType::s8)
    return error(StatusCode::unsupported, "quantizes activations to int8, they are {}{}",
                 act.codes == DType::none ? "not to be quantized" : "to be quantized to ",
                 act.codes == DType::none ? "" : name(act.codes));
  if (const std::int64_t k = act.group.k; k != 0 && k != 16 && k != 32 && k != 64 && k != 128 && k != 256)
    return error(StatusCode::unsupported, "takes a scale per token, tensor, or 16, 32, 64, 128 or 256 channels, not per {}", k);
  NIBBLE_RETURN_IF_ERROR(accepts_wna8_weight(p));
  if (sums_whole_rows(p.scheme, act))
    return error(StatusCode::unsupported, "sums by groups of channels, {} has one scale per token and output channel",
                 Scheme{p.scheme, act}.name());
  return {};
}

Status accepts_whole_steps(const Problem& p) {
  if (const int fold = online_fold(p.act_scheme, p.scheme); fold < kStepFold)
    return error(StatusCode::unsupported, "sums {} channels or more as integers, the scales of {} change every {}", kStepFold,
                 Scheme{p.scheme, p.act_scheme}.name(), fold);
  return {};
}

WgmmaFamily wna8_decode_family(const Problem& p) {
  if (online_fold(p.act_scheme, p.scheme) != gpu_tile::kChannels) return WgmmaFamily::online_folds;
  return p.act_scheme.group == GroupShape::channel() ? WgmmaFamily::online_tokens : WgmmaFamily::online;
}

double wna8_decode_cost_us(int tokens, const GpuInfo& gpu, const Problem& p) {
  return decode_cost_us(wna8_decode_family(p), tokens, gpu, p);
}

}  // namespace nibble::cuda
