// The rows of the convolutions: each is a linear kernel's, with its tile loops and its reasons, over patches (conv_work.hpp).
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>

#include "core/error.hpp"
#include "kernels/cpu/bf16_tile.hpp"
#include "kernels/cpu/conv_work.hpp"
#include "kernels/cpu/cost.hpp"
#include "kernels/cpu/cpu.hpp"
#include "kernels/cpu/dot_tile.hpp"
#include "kernels/cpu/float_tile.hpp"
#include "kernels/cpu/transpose.hpp"
#include "kernels/cpu/whole_tile.hpp"

namespace nibble::cpu {
namespace {

/// Multiplies prepared tokens by row blocks [begin, end).
using Multiply = void (*)(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin,
                          std::int64_t end);

/// Row blocks that stay in L2 while the tokens of a chunk go by.
constexpr std::int64_t kBlockBytes = 512 << 10;

std::int64_t blocks_at_once(const Decoder& decoder) {
  return std::clamp<std::int64_t>(kBlockBytes / decoder.geometry.row_block_bytes, 1, kMaxTaskBlocks);
}

template <const DotIsa& kIsa>
void multiply_dots(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const DotTask task(self, chunk, decoder);
  const std::int64_t step = blocks_at_once(decoder);
  for (; begin < end; begin += step) kIsa.linear(task, begin, std::min(begin + step, end), 0, task.m);
}

#if defined(__x86_64__)
template <const Bf16Isa& kIsa>
void multiply_bf16(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const DotTask task(self, chunk, decoder);
  for (std::int64_t m = 0; m < task.m; m += kIsa.tokens)
    for (std::int64_t block = begin; block < end; ++block) kIsa.linear(task, block, m);
}
#endif

template <const FloatIsa& kIsa>
void multiply_floats(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const FloatTask task{.decoder = &decoder,
                       .weight = chunk.weight->bytes.data(),
                       .activations = reinterpret_cast<const float*>(chunk.prepared),
                       .m = chunk.a.dim(0),
                       .outputs = Outputs(self.isa, chunk)};
  for (std::int64_t m = 0; m < task.m; m += kIsa.tokens)
    for (std::int64_t block = begin; block < end; ++block) kIsa.linear(task, block, m);
}

/// How the outputs are dealt out: chunks of rows, and each chunk's row blocks in ranges where there are too few chunks.
struct Deal {
  std::int64_t rows, chunks_down, chunks_across, ranges, groups, batch;

  std::int64_t tasks() const { return batch * chunks_down * chunks_across * groups * ranges; }

  Deal(const ConvWork& work, std::int64_t images, std::int64_t row_blocks, std::int64_t threads)
      : rows(work.rows()), groups(work.geometry().groups), batch(images) {
    chunks_across = (work.out_width() + work.columns() - 1) / work.columns();
    // The height with the shortest time of the busiest thread; what a chunk costs besides its rows counts as half a row.
    double best = std::numeric_limits<double>::infinity();
    for (std::int64_t height = work.rows(); height >= std::max<std::int64_t>(1, work.rows() / 3); --height) {
      const std::int64_t down = (work.out_height() + height - 1) / height, count = images * down * chunks_across * groups;
      const double time = static_cast<double>((count + threads - 1) / threads) * (static_cast<double>(height) + 0.5);
      if (time >= best) continue;
      best = time;
      rows = height;
    }
    chunks_down = (work.out_height() + rows - 1) / rows;
    const std::int64_t chunks = images * chunks_down * chunks_across * groups;
    ranges = chunks >= threads ? 1 : std::min(row_blocks, (threads + chunks - 1) / chunks);
  }

  Chunk chunk(const ConvWork& work, std::int64_t task) const {
    const std::int64_t across = task % chunks_across, down = task / chunks_across % chunks_down;
    const std::int64_t column = across * work.columns(), row = down * rows;
    return {.image = task / chunks_across / chunks_down,
            .row = row,
            .column = column,
            .rows = std::min(rows, work.out_height() - row),
            .columns = std::min(work.columns(), work.out_width() - column)};
  }
};

/// Rows of `tokens` × `channels` elements of D, gate or residual in scratch, channels last.
ConstTensorView staged(const Image& image, std::int64_t b, std::int64_t p, std::int64_t n, std::int64_t tokens,
                       std::int64_t channels, std::byte* scratch) {
  if (image.channels_last()) return image.matrix(b, p, n, tokens, channels);
  transpose(static_cast<int>(image.width()), image.at(b, p, n), image.channel * image.width(), channels, tokens, scratch,
            channels * image.width());
  return {scratch, image.dtype, {tokens, channels}};
}

/// A view of columns [n, n + …) as one of columns from 0 on, for code that counts from 0.
template <class View>
View from_column_0(View view, std::int64_t n) {
  view.data = static_cast<decltype(view.data)>(reinterpret_cast<std::byte*>(
      reinterpret_cast<std::uintptr_t>(view.data) - static_cast<std::uintptr_t>(n * bits(view.dtype) / 8)));
  return view;
}

template <Multiply kMultiply, const PatchIsa* kPatches>
Status run(const Kernel& self, const StepArgs& args) {
  const ConvWork work(self, args);
  const ConvGeometry& geometry = work.geometry();
  const PackedWeightData& weight = *args.weight;
  const Decoder decoder(weight, self.tile.n);
  const PrepareIsa& prepare = prepare_isa(self.isa);
  const std::int64_t batch = args.a.dim(0), out_height = work.out_height(), out_width = work.out_width();
  const std::int64_t per_group = geometry.group_outputs(), rows = self.tile.n;
  NIBBLE_ASSIGN_OR_RETURN(const Image a,
                          image_of("A", args.a, args.conv->input, batch, geometry.in_channels, geometry.height, geometry.width));
  const auto out_image = [&](std::string_view what, const ConstTensorView& view) {
    return image_of(what, view, args.conv->output, batch, geometry.out_channels, out_height, out_width);
  };
  NIBBLE_ASSIGN_OR_RETURN(const Image d, out_image("D", args.d));
  Image gate, residual;
  if (args.epilogue->gate) {
    NIBBLE_ASSIGN_OR_RETURN(gate, out_image("gate", args.operands.gate));
  }
  if (args.epilogue->residual) {
    NIBBLE_ASSIGN_OR_RETURN(residual, out_image("residual", args.operands.residual));
  }
  StaticActs codes{1.0f, 0};  // what they stand for, where one scale is for all of them
  if (work.quantizes_pixels() || args.operands.a_scale.empty()) {
    codes = weight.static_acts.value_or(codes);
  } else if (args.a.dtype == DType::s8) {
    codes.scale = *static_cast<const float*>(args.operands.a_scale.data);
    if (args.quantize.zero != ZeroKind::none) codes.zero = *static_cast<const std::int32_t*>(args.operands.a_zero.data);
  }

  const std::int64_t slots = std::clamp<std::int64_t>(static_cast<std::int64_t>(args.scratch.size() / work.scratch().total), 1,
                                                      args.executor->threads());
  const Deal deal(work, batch, (per_group + rows - 1) / rows, slots);
  const auto run_task = [&](std::int64_t task, std::byte* scratch) {
    const std::int64_t range = task % deal.ranges, group = task / deal.ranges % deal.groups;
    const Chunk chunk = deal.chunk(work, task / deal.ranges / deal.groups);
    const std::int64_t tokens = chunk.tokens(), first = chunk.row * out_width + chunk.column;
    std::byte* pixels = scratch + work.scratch().pixels;
    work.gather(prepare, a, chunk, group, codes, pixels, scratch + work.scratch().floats);

    // Row blocks that hold channels of the group; those at its ends may hold others' too.
    const std::int64_t blocks_begin = group * per_group / rows, blocks_end = ((group + 1) * per_group + rows - 1) / rows;
    const std::int64_t step = (blocks_end - blocks_begin + deal.ranges - 1) / deal.ranges;
    const std::int64_t begin = blocks_begin + range * step, end = std::min(begin + step, blocks_end);
    if (begin >= end) return;
    StepArgs part = args;
    part.n_begin = std::max(group * per_group, begin * rows);
    part.n_end = std::min((group + 1) * per_group, end * rows);
    const std::int64_t n = part.n_begin, channels = part.n_end - part.n_begin;
    // Rows of A are patches, wherever they are: only its type and shape are asked for.
    part.a = ConstTensorView(pixels, work.quantizes_pixels() ? DType::s8 : a.dtype, {tokens, geometry.k()});
    part.prepared = scratch + work.scratch().prepared;
    if (args.epilogue->gate)
      part.operands.gate = from_column_0(staged(gate, chunk.image, first, n, tokens, channels, scratch + work.scratch().gate), n);
    if (args.epilogue->residual)
      part.operands.residual =
          from_column_0(staged(residual, chunk.image, first, n, tokens, channels, scratch + work.scratch().residual), n);
    std::byte* out = scratch + work.scratch().out;
    part.d = from_column_0(
        d.channels_last() ? d.matrix(chunk.image, first, n, tokens, channels) : TensorView(out, d.dtype, {tokens, channels}), n);

    std::byte* patch = scratch + work.scratch().patch;
    const Patches patches = work.patches(pixels, patch, chunk);
    if (kPatches != nullptr && work.multiplies_pixels()) {
      const Outputs outputs(self.isa, part);
      PatchTask patch_task = work.patch_task(patches, chunk, scratch + work.scratch().sums);
      patch_task.decoder = &decoder;
      patch_task.weight = weight.bytes.data();
      patch_task.ones = patch;
      patch_task.zero = codes.zero;
      patch_task.scale = codes.scale;
      patch_task.bias = code_bias(weight.scheme.codes);
      patch_task.tile = even_tile(patches.columns, self.tile.m);
      patch_task.outputs = &outputs;
      std::memset(patch, 1, static_cast<std::size_t>(geometry.k()));
      kPatches->sum_pixels(patch_task);
      for (std::int64_t block = begin, many = blocks_at_once(decoder); block < end; block += many)
        kPatches->multiply(patch_task, block, std::min(block + many, end));
    } else {
      PrepareTask prepared = prepare_task(self.act, part, self.tile.m);
      prepared.patches = &patches;
      for (std::int64_t m = 0; m < tokens; m += prepared.tile) prepare.of(self.act)(prepared, m);
      if (prepared.form.zeros && self.act == "s8") prepare_ones(prepared);
      kMultiply(self, part, decoder, begin, end);
    }
    if (!d.channels_last())
      transpose(static_cast<int>(d.width()), out, channels * d.width(), tokens, channels, d.at(chunk.image, first, n),
                d.channel * d.width());
  };
  std::atomic<std::int64_t> next{0};
  args.executor->parallel_for(std::min(slots, deal.tasks()), [&](std::int64_t slot) {
    std::byte* scratch = args.scratch.data() + static_cast<std::size_t>(slot) * work.scratch().total;
    for (std::int64_t task = next.fetch_add(1); task < deal.tasks(); task = next.fetch_add(1)) run_task(task, scratch);
  });
  return {};
}

/// The linear kernel whose tile loops a row runs.
const Kernel& linear_kernel(const Kernel& self) {
  return *find_kernel("linear" + std::string(self.name.substr(self.name.find('_'))));
}

/// The linear layer on the patches of one group.
Problem of_patches(const Problem& p) {
  Problem linear = p;
  linear.op = Op::linear;
  linear.m = p.m * p.geometry.out_height() * p.geometry.out_width();
  linear.n = p.geometry.group_outputs();
  return linear;
}

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  const Kernel& linear = linear_kernel(self);
  return linear.accepts(linear, of_patches(p));
}

/// Nanoseconds per activation of a patch of one thread.
constexpr double kPrepareNanoseconds = 0.7;

double cost_us(const Kernel& self, const Problem& p) {
  const Kernel& linear = linear_kernel(self);
  const Problem patches = of_patches(p);
  const double groups = static_cast<double>(p.geometry.groups);
  const double prepare =
      1e-3 * kPrepareNanoseconds * static_cast<double>(patches.m) * static_cast<double>(patches.k) / p.machine.threads;
  return groups * (linear.cost_us(linear, patches) + prepare);
}

/// A scratch for every thread the plan expects; with more threads some of them stay idle.
std::size_t workspace(const Kernel& self, const Problem& p) {
  return static_cast<std::size_t>(p.machine.threads) * ConvWork(self, p).scratch().total;
}

template <Multiply kMultiply, const PatchIsa* kPatches = nullptr>
constexpr Kernel row(std::string_view name, Isa isa, std::string_view form, std::string_view layout, Tile tile,
                     std::string_view variant = {}) {
  return {.name = name,
          .backend = Backend::cpu,
          .isa = isa,
          .op = Op::conv,
          .out = "any",
          .act = form,
          .weight = "any",
          .layout = layout,
          .variant = variant,
          .tile = tile,
          .summary = form == "s8x3"       ? "exact: patches in 24-bit fixed point, integer dot products"
                     : form == "bf16"     ? "exact: patches of bf16, bf16 dot products"
                     : form == "f32"      ? "patches of floats times decoded panels; FP8 activations too"
                     : variant == "whole" ? "W8A8: patches of int8, integer dot products over all of them; exact up to the scales"
                                          : "int8 patches: integer dot products by segments that share scales",
          .accepts = accepts,
          .cost_us = cost_us,
          .workspace = workspace,
          .run = run<kMultiply, kPatches>};
}

constexpr std::array kKernels {
#if defined(__x86_64__)
  row<multiply_bf16<kAvx512Bf16>>("conv_any_bf16_any__cpu_avx512bf16_m8n32", Isa::avx512bf16, "bf16", "cpu_n32", {8, 32, 0}),
      row<multiply_dots<kAvx512VnniFixed>>("conv_any_s8x3_any__cpu_avx512vnni_m3n32", Isa::avx512vnni, "s8x3", "cpu_n32",
                                           {3, 32, 0}),
      row<multiply_dots<kAvx512Fixed>>("conv_any_s8x3_any__cpu_avx512_m3n32", Isa::avx512, "s8x3", "cpu_n32", {3, 32, 0}),
      row<multiply_dots<kAvx2VnniFixed>>("conv_any_s8x3_any__cpu_avx2vnni_m1n16", Isa::avx2vnni, "s8x3", "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kAvx2Fixed>>("conv_any_s8x3_any__cpu_avx2_m1n16", Isa::avx2, "s8x3", "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kAvx512VnniInt8>>("conv_any_s8_any__cpu_avx512vnni_m6n32", Isa::avx512vnni, "s8", "cpu_n32", {6, 32, 0}),
      row<multiply_dots<kAvx512Int8>>("conv_any_s8_any__cpu_avx512_m6n32", Isa::avx512, "s8", "cpu_n32", {6, 32, 0}),
      row<multiply_dots<kAvx2VnniInt8>>("conv_any_s8_any__cpu_avx2vnni_m4n16", Isa::avx2vnni, "s8", "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kAvx2Int8>>("conv_any_s8_any__cpu_avx2_m4n16", Isa::avx2, "s8", "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kAvx512VnniWhole>, &kAvx512VnniPatches>("conv_any_s8_any__cpu_avx512vnni_whole_m12n32", Isa::avx512vnni, "s8", "cpu_n32",
                                           {12, 32, 0}, "whole"),
      row<multiply_dots<kAvx512Whole>, &kAvx512Patches>("conv_any_s8_any__cpu_avx512_whole_m12n32", Isa::avx512, "s8", "cpu_n32", {12, 32, 0},
                                       "whole"),
      row<multiply_dots<kAvx2VnniWhole>, &kAvx2VnniPatches>("conv_any_s8_any__cpu_avx2vnni_whole_m6n16", Isa::avx2vnni, "s8", "cpu_n16", {6, 16, 0},
                                         "whole"),
      row<multiply_dots<kAvx2Whole>, &kAvx2Patches>("conv_any_s8_any__cpu_avx2_whole_m4n16", Isa::avx2, "s8", "cpu_n16", {4, 16, 0}, "whole"),
      row<multiply_floats<kAvx512Float>>("conv_any_f32_any__cpu_avx512_m8n32", Isa::avx512, "f32", "cpu_n32", {8, 32, 0}),
      row<multiply_floats<kAvx2Float>>("conv_any_f32_any__cpu_avx2_m6n16", Isa::avx2, "f32", "cpu_n16", {6, 16, 0}),
#elif defined(__aarch64__)
  row<multiply_dots<kI8mmFixed>>("conv_any_s8x3_any__cpu_i8mm_m1n16", Isa::i8mm, "s8x3", "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kDotprodFixed>>("conv_any_s8x3_any__cpu_dotprod_m1n16", Isa::dotprod, "s8x3", "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kI8mmInt8>>("conv_any_s8_any__cpu_i8mm_m4n16", Isa::i8mm, "s8", "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kDotprodInt8>>("conv_any_s8_any__cpu_dotprod_m4n16", Isa::dotprod, "s8", "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kI8mmWhole>, &kI8mmPatches>("conv_any_s8_any__cpu_i8mm_whole_m4n16", Isa::i8mm, "s8", "cpu_n16", {4, 16, 0}, "whole"),
      row<multiply_dots<kDotprodWhole>, &kDotprodPatches>("conv_any_s8_any__cpu_dotprod_whole_m4n16", Isa::dotprod, "s8", "cpu_n16", {4, 16, 0},
                                        "whole"),
#endif
      row<multiply_dots<kBaselineFixed>>("conv_any_s8x3_any__cpu_baseline_m1n16", Isa::baseline, "s8x3", "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kBaselineInt8>>("conv_any_s8_any__cpu_baseline_m4n16", Isa::baseline, "s8", "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kBaselineWhole>, &kBaselinePatches>("conv_any_s8_any__cpu_baseline_whole_m4n16", Isa::baseline, "s8", "cpu_n16", {4, 16, 0},
                                         "whole"),
#if defined(__aarch64__)
      row<multiply_floats<kBaselineFloat>>("conv_any_f32_any__cpu_baseline_m6n16", Isa::baseline, "f32", "cpu_n16", {6, 16, 0}),
#else
      row<multiply_floats<kBaselineFloat>>("conv_any_f32_any__cpu_baseline_m2n16", Isa::baseline, "f32", "cpu_n16", {2, 16, 0}),
#endif
};

}  // namespace

std::span<const Kernel> conv_kernels() { return kKernels; }

}  // namespace nibble::cpu
