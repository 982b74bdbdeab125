// f32 activations × integer codes, or e2m1 ones, which are halves of integers, on tensor cores: 24-bit fixed point, of which each of the three bytes is multiplied by the kernels of
// codes (wna8.cpp) as a token of its own.
//
//   prepare   A [M,K] ──fixed_point_acts──▶ codes and terms of 3·M rows
//   linear    codes ──wna8──▶ f32 sums [3·M, N] ──epilogue_rows──▶ D        as many tokens at a time as the scratch memory has sums of
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.hpp"
#include "epilogue/element.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

namespace nibble::cuda {
namespace {

constexpr ActForm kForm = ActForm::s8x3_rows;
constexpr int kDigits = 3;                                      // rows of codes of a token
constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;  // sizes are counted in 32 bits inside the kernels

/// Channels that share a power of two.
int fold_of(const WeightScheme& scheme) { return online_fold({}, scheme); }

Status accepts_layer(const Problem& p) {
  if (p.a_dtype != DType::f32 || p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies f32 activations as they are, they come as {}{}", name(p.a_dtype),
                 p.act_scheme.codes == DType::none ? "" : " and are to be quantized");
  if (p.scheme.codes == DType::e2m1) {
    if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
      return error(StatusCode::unsupported, "{}", reason);
    NIBBLE_RETURN_IF_ERROR(accepts_slots(p, gpu_tile::kFragmentChannels));
  } else {
    NIBBLE_RETURN_IF_ERROR(accepts_wna8_weight(p));
  }
  if (std::max({kDigits * p.m, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "M={} N={} K={}: a dimension, or three times M, is beyond {}", p.m, p.n, p.k,
                 kMostDimension);
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
  const double terms = 8.0 * kDigits / fold_of(p.scheme);
  const double bytes = static_cast<double>(p.m) * static_cast<double>(p.k) * (4 + kDigits + terms);
  return kLaunchUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
}

/// The places of codes and terms of `m` tokens.
Wna8Map map_of(const WeightScheme& scheme, std::int64_t m, std::int64_t k) {
  return wna8_map(fold_of(scheme), ZeroKind::none, kDigits * m, k);
}

std::size_t prepare_workspace(const Kernel&, const Problem& p) { return map_of(p.scheme, p.m, p.k).bytes; }

Status run_prepare(const Kernel&, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const Wna8Map map = map_of(w.scheme, args.a.dim(0), w.k);
  return launch_fixed_point_acts({.a = args.a.data,
                                  .type = DType::f32,
                                  .a_stride = args.a.stride(0),
                                  .m = args.a.dim(0),
                                  .k = w.k,
                                  .perm = reinterpret_cast<const std::int32_t*>(w.device.perm.data()),
                                  .prescale = reinterpret_cast<const float*>(w.device.prescale.data()),
                                  .codes = args.prepared,
                                  .pitch = map.pitch,
                                  .columns = map.pitch,
                                  .terms = args.prepared + map.terms,
                                  .term_fold = map.term_pitch,
                                  .term_pairs = true,
                                  .fold = fold_of(w.scheme)},
                                 args.stream);
}

// ---- linear

Status accepts_linear(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_layer(p));
  if (self.isa != Isa::sm90) return {};
  if (p.scheme.codes == DType::e2m1)
    return error(StatusCode::unsupported, "makes bytes of integer codes, the weight's are {}", name(p.scheme.codes));
  return accepts_whole_steps(p);
}

/// The sums of a slice of tokens, in scratch memory. A slice that is not the last has whole tiles of any kernel, so that its first rows of
/// codes and terms are as aligned as those of the first. Its rows are fewer than two bands (gemm_schedule.hpp), in which
/// f32 sums have not been tested on a GPU.
struct Slices {
  std::int64_t tokens = 0, stride = 0;  // of a slice; floats between rows of sums
  std::size_t bytes = 0;
};
Slices slices_of(std::int64_t m, std::int64_t n) {
  constexpr std::int64_t kBytes = 64 << 20, kStep = 128, kMost = 2 * kBandTokens / kDigits / kStep * kStep;
  Slices slices{.stride = (n + 7) / 8 * 8};
  const std::int64_t token = 4 * kDigits * slices.stride;
  slices.tokens = std::min({m, kMost, std::max(kStep, kBytes / token / kStep * kStep)});
  slices.bytes = static_cast<std::size_t>(slices.tokens * token);
  return slices;
}

/// launch(task): the product of a slice.
template <class Launch>
Status run_slices(const StepArgs& args, Launch launch) {
  const PackedWeightData& w = *args.weight;
  const std::int64_t tokens = args.a.dim(0);
  const Wna8Map map = map_of(w.scheme, tokens, w.k);
  const Slices slices = slices_of(tokens, w.n);
  auto* const sums = reinterpret_cast<float*>(args.scratch.data());
  const epilogue::Element epilogue = epilogue::element(*args.epilogue, args.operands, args.d, w.scale2.value_or(1.0f));
  Wna8Task task{.weight = device_weight(w), .pitch = map.pitch, .term_pitch = map.term_pitch, .fold = fold_of(w.scheme)};
  task.epilogue.d = sums;
  task.epilogue.d_stride = slices.stride;
  for (std::int64_t first = 0; first < tokens; first += slices.tokens) {
    const std::int64_t m = std::min(slices.tokens, tokens - first), row = kDigits * first;
    task.m = static_cast<int>(kDigits * m);
    if (first + m == tokens) task.next = next_weight(args.operands.next);
    task.codes = args.prepared + row * map.pitch;
    task.terms = args.prepared + map.terms + row * 8;  // a pair of rows is 16 bytes
    NIBBLE_RETURN_IF_ERROR(launch(task));
    NIBBLE_RETURN_IF_ERROR(launch_epilogue_rows(epilogue.from_row(first),
                                                {.data = sums, .stride = slices.stride, .each = kDigits}, m,
                                                static_cast<int>(w.n), args.stream));
  }
  return {};
}

Status run_sm80(const Kernel&, const StepArgs& args) {
  return run_slices(args, [&](const Wna8Task& task) { return launch_wna8_sm80(task, 1, args.stream); });
}

Status run_sm90(const Kernel& self, const StepArgs& args) {
  const int depth = gemm_groups(self.tile.m) * gpu_tile::kRows / self.tile.n;
  return run_slices(
      args, [&](const Wna8Task& task) { return launch_wna8_sm90(task, self.tile.m, depth, self.tile.split, args.stream); });
}

/// The product of all slices, by product_us(the problem of one slice), and the step that adds the three sums. The sums are counted as if
/// they went through memory, though most stay in the L2 cache.
template <class ProductUs>
double slices_us(const Problem& p, ProductUs product_us) {
  constexpr double kShare = 0.7;   // of the bandwidth
  constexpr double kSumsUs = 4.5;  // the least time of the step that adds the sums, on an H200
  const std::int64_t tokens = slices_of(p.m, p.n).tokens;
  const auto slice_us = [&](std::int64_t m) {
    if (m == 0) return 0.0;
    Problem codes = p;
    codes.m = kDigits * m;
    codes.act_scheme = {.codes = DType::s8, .group = {1, gpu_tile::kChannels}};
    codes.epilogue = {};  // f32 sums
    const double bytes = static_cast<double>(m) * static_cast<double>(p.n) * (4 * kDigits + bits(p.epilogue.out) / 8.0);
    return product_us(codes) + kSumsUs + 1e-3 * bytes / (kShare * gpu_of(p).read_gbytes_per_s);
  };
  const std::int64_t whole = p.m / tokens;
  return static_cast<double>(whole) * slice_us(tokens) + slice_us(p.m % tokens);
}

double sm80_cost_us(const Kernel&, const Problem& p) {
  return slices_us(p, [&](const Problem& codes) { return wna8_sm80_cost_us(gpu_of(p), codes); });
}

double sm90_cost_us(const Kernel& self, const Problem& p) {
  return slices_us(p, [&](const Problem& codes) { return wna8_sm90_cost_us(self.tile, gpu_of(p), codes, wna8_family(codes)); });
}

std::size_t linear_workspace(const Kernel&, const Problem& p) { return slices_of(p.m, p.n).bytes; }

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
          .sums = Sums::fixed_point_folds,
          .accepts = accepts_linear,
          .workspace = linear_workspace};
}

constexpr Tile kTiles[] = {
    {.m = 16, .n = 256},              //
    {.m = 16, .n = 128, .split = 2},  //
    {.m = 16, .n = 64, .split = 2},   //
    {.m = 32, .n = 256},              //
    {.m = 32, .n = 128, .split = 2},  //
    {.m = 64, .n = 256},              //
    {.m = 128, .n = 192},
};
constexpr Summaries kSm90Summaries{
    .whole = "f32 activations as 24-bit fixed point: wgmma on three bytes each, weights as int8 in registers",
    .split = "f32 activations as 24-bit fixed point: wgmma on three bytes each; the CTAs of a cluster split K",
    .stream_k = {}};

constexpr Kernel sm90_family() {
  Kernel row = linear_row(Isa::sm90);
  row.cost_us = sm90_cost_us;
  row.run = run_sm90;
  return row;
}

constexpr Kernel sm80_row() {
  Kernel row = linear_row(Isa::sm80);
  row.tile = {0, gpu_tile::kRows, gpu_tile::kChannels};
  row.summary = "f32 activations as 24-bit fixed point: mma.sync on three bytes each, loads by cp.async";
  row.cost_us = sm80_cost_us;
  row.run = run_sm80;
  return row;
}

constexpr Kernel kPrepareRow{.backend = Backend::cuda,
                             .isa = Isa::simt,
                             .op = Op::prepare,
                             .out = name(kForm),
                             .act = "f32",
                             .weight = "none",
                             .layout = "",
                             .tile = {},
                             .summary =
                                 "f32 activations as 24-bit fixed point: three rows of bytes in the channel order of "
                                 "gpu_n64k128, with sums",
                             .form = kForm,
                             .accepts = accepts_prepare,
                             .cost_us = prepare_cost_us,
                             .workspace = prepare_workspace,
                             .run = run_prepare};

}  // namespace

std::span<const Kernel> fixed_point_kernels() {
  static const std::vector<Kernel> kRows = [] {
    std::vector<Kernel> rows;
    append(rows, sm90_family(), kTiles, kSm90Summaries);
    for (Kernel& row : rows) row.least_m = (row.least_m + kDigits - 1) / kDigits;  // a tile's rows are digits
    rows.insert(rows.end(), {sm80_row(), kPrepareRow});
    return rows;
  }();
  return kRows;
}

}  // namespace nibble::cuda
