// The rows of the convolutions: each runs a linear kernel's tile loops over patches (conv_work.hpp) and refuses for the same reasons.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>

#include "core/error.hpp"
#include "kernels/cpu/conv/conv_work.hpp"
#include "kernels/cpu/families.hpp"
#include "kernels/cpu/table/cost.hpp"
#include "kernels/cpu/tiles/bf16_tile.hpp"
#include "kernels/cpu/tiles/depthwise_tile.hpp"
#include "kernels/cpu/tiles/dot_tile.hpp"
#include "kernels/cpu/tiles/float_tile.hpp"
#include "kernels/cpu/tiles/whole_tile.hpp"
#include "kernels/cpu/transpose.hpp"

namespace nibble::cpu {
namespace {

/// Multiplies prepared tokens by row blocks [begin, end).
using Multiply = void (*)(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin,
                          std::int64_t end);

/// Row blocks that stay in L2 while the tokens of a chunk are multiplied.
constexpr std::int64_t kBlockBytes = 512 << 10;

std::int64_t blocks_at_once(const Decoder& decoder) {
  return std::clamp<std::int64_t>(kBlockBytes / decoder.geometry.row_block_bytes, 1, kMaxTaskBlocks);
}

template <const DotIsa& kIsa>
void multiply_dots(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const DotTask task(self, chunk, decoder);
  const std::int64_t step = blocks_at_once(decoder);
  // A chunk may have more tokens than AMX has room for; the vectors would only add up codes again for each piece.
  const std::int64_t tokens = self.isa == Isa::amx ? kIsa.task_tokens / task.tile * task.tile : task.m;
  for (; begin < end; begin += step)
    for (std::int64_t m = 0; m < task.m; m += tokens)
      kIsa.linear(task, begin, std::min(begin + step, end), m, std::min(m + tokens, task.m));
}

#if defined(__x86_64__)
template <const Bf16Isa& kIsa>
void multiply_bf16(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const DotTask task(self, chunk, decoder);
  for (std::int64_t m = 0; m < task.m; m += kIsa.tokens) kIsa.linear(task, begin, end, m);
}
#endif

template <const FloatIsa& kIsa>
void multiply_floats(const Kernel& self, const StepArgs& chunk, const Decoder& decoder, std::int64_t begin, std::int64_t end) {
  const FloatTask task{.decoder = &decoder,
                       .weight = chunk.weight->bytes.data(),
                       .activations = reinterpret_cast<const float*>(chunk.prepared),
                       .m = chunk.a.dim(0),
                       .outputs = Outputs(self.isa, chunk)};
  for (std::int64_t m = 0; m < task.m; m += kIsa.tokens) kIsa.linear(task, begin, end, m);
}

const FloatIsa& float_isa(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kAvx512Float;
  if (isa == Isa::avx2) return kAvx2Float;
#endif
  (void)isa;
  return kBaselineFloat;
}

/// W of a row block: panel[K][R], K rounded up to octets.
void decode_weights(Isa isa, const Decoder& decoder, const PackedWeightData& weight, std::int64_t block, float* panel) {
  const tile::Geometry& geo = decoder.geometry;
  alignas(64) float chunk[kChunk * 32];
  for (std::int64_t k = 0, count = 0; k < geo.k; k += count) {
    const std::int64_t g = k / geo.group, at = k % geo.group;
    count = std::min({geo.group - at, geo.k - k, std::int64_t{kChunk}});
    float_isa(isa).decode(decoder, weight.bytes.data() + geo.record(block, g), at, static_cast<int>(count), chunk);
    std::copy_n(chunk, count * geo.rows, panel + k * geo.rows);
  }
}

float number(const std::byte* p, DType type) {
  if (!is_compute_float(type)) return code_value(type, static_cast<std::uint8_t>(*p));
  std::uint32_t word = 0;
  std::memcpy(&word, p, static_cast<std::size_t>(bits(type) / 8));
  const auto half = static_cast<std::uint16_t>(word);
  return type == DType::f32 ? std::bit_cast<float>(word) : type == DType::f16 ? to_f32(f16{half}) : to_f32(bf16{half});
}

/// The integers q − z of a row block of one record, panel[K][R], and its scales.
void decode_integers(const Decoder& decoder, const PackedWeightData& weight, std::int64_t block, float* panel, float* scales) {
  const tile::Geometry& geo = decoder.geometry;
  const std::byte* record = weight.bytes.data() + geo.record(block, 0);
  const tile::Planes planes = tile::planes(geo.bits);
  for (int r = 0; r < geo.rows; ++r) {
    scales[r] = number(record + r * bits(decoder.scale_type) / 8, decoder.scale_type);
    float zero = 0;
    if (decoder.zero != ZeroKind::none)
      zero = number(record + geo.scale_bytes + r * bits(decoder.zero_type) / 8, decoder.zero_type);
    for (std::int64_t k = 0; k < geo.k; ++k) {
      const std::byte* plane = record + geo.header_bytes + k / tile::kOctet * geo.octet_bytes;
      unsigned code = 0;
      for (int p = 0; p < planes.count; ++p) {
        const auto [width, shift] = planes.plane[static_cast<std::size_t>(p)];
        const tile::BitPlace from = tile::place(geo.rows, width, r, static_cast<int>(k % tile::kOctet));
        code |= (static_cast<unsigned>(plane[from.byte]) >> from.shift & ((1u << width) - 1)) << shift;
        plane += geo.rows * width;
      }
      panel[k * geo.rows + r] = static_cast<float>(code) - decoder.bias - zero;
    }
  }
}

/// How the outputs are divided into tasks: chunks of rows, and ranges of row blocks where there are too few chunks.
struct Division {
  std::int64_t rows, chunks_down, chunks_across, ranges, groups, batch;

  std::int64_t tasks() const { return batch * chunks_down * chunks_across * groups * ranges; }

  Division(const ConvWork& work, std::int64_t images, std::int64_t row_blocks, std::int64_t threads)
      : rows(work.rows()), groups(work.parts()), batch(images) {
    chunks_across = (work.out_width() + work.columns() - 1) / work.columns();
    // The height with the shortest time of the busiest thread; the fixed cost of a chunk counts as half a row.
    double best = std::numeric_limits<double>::infinity();
    for (std::int64_t height = work.rows(); height >= std::max<std::int64_t>(1, work.rows() / 3); --height) {
      const std::int64_t down = (work.out_height() + height - 1) / height, count = images * down * chunks_across * groups;
      const std::int64_t rounds = (count + threads - 1) / threads;  // of the busiest thread
      const double time = static_cast<double>(rounds) * (static_cast<double>(height) + 0.5);
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

/// How a row multiplies: depthwise pixels where it has those, else pixels as patches where the work has them, else prepared tokens.
struct Products {
  Multiply tokens;
  const PatchIsa* patches;
  const DepthwiseIsa* pixels;
};

Status convolve(const Kernel& self, const StepArgs& args, const Products& products) {
  const ConvWork work(self, args);
  const ConvGeometry& geometry = work.geometry();
  const PackedWeightData& weight = *args.weight;
  const Decoder decoder(weight, self.tile.n);
  const PrepareIsa& prepare = prepare_isa(self.isa);
  const std::int64_t batch = args.a.dim(0), out_height = work.out_height(), out_width = work.out_width();
  const std::int64_t rows = self.tile.n;
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
  StaticActs codes{1.0f, 0};  // their scale and zero point, where all share one
  if (work.quantizes_pixels() || args.operands.a_scale.empty()) {
    codes = weight.static_acts.value_or(codes);
  } else if (args.a.dtype == DType::s8) {
    codes.scale = *static_cast<const float*>(args.operands.a_scale.data);
    if (args.act_scheme.zero != ZeroKind::none) codes.zero = *static_cast<const std::int32_t*>(args.operands.a_zero.data);
  }

  const std::int64_t slots = std::clamp<std::int64_t>(static_cast<std::int64_t>(args.scratch.size() / work.scratch().total), 1,
                                                      args.executor->threads());
  const Division division(work, batch, products.pixels != nullptr ? 1 : (geometry.group_outputs() + rows - 1) / rows, slots);
  const auto run_task = [&](std::int64_t task, std::byte* scratch) {
    const std::int64_t range = task % division.ranges;
    const Part whole = work.part(task / division.ranges % division.groups);
    const Chunk chunk = division.chunk(work, task / division.ranges / division.groups);
    const std::int64_t tokens = chunk.tokens(), first = chunk.row * out_width + chunk.column;
    std::byte* pixels = scratch + work.scratch().pixels;
    work.gather(prepare, a, chunk, whole, codes, weight.act_limit.value_or(std::numeric_limits<float>::infinity()), scratch);

    // Row blocks that hold channels of the group; the first and last may hold channels of others too.
    const std::int64_t blocks_begin = whole.n_begin / rows, blocks_end = (whole.n_end + rows - 1) / rows;
    const std::int64_t step = (blocks_end - blocks_begin + division.ranges - 1) / division.ranges;
    const std::int64_t begin = blocks_begin + range * step, end = std::min(begin + step, blocks_end);
    if (begin >= end) return;
    StepArgs part = args;
    part.n_begin = std::max(whole.n_begin, begin * rows);
    part.n_end = std::min(whole.n_end, end * rows);
    const std::int64_t n = part.n_begin, channels = part.n_end - part.n_begin;
    // Rows of A are patches in any place: only the type and the shape matter.
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

    const Patches patches = work.patches(scratch, chunk);
    if (patches.scales != nullptr)
      part.operands.a_scale = ConstTensorView(patches.row_scales, DType::f32, {1, geometry.k() / patches.block});
    if (products.pixels != nullptr) {
      DepthwiseTask pixel_task = work.depthwise_task(patches, chunk, whole);
      auto* panel = reinterpret_cast<float*>(scratch + work.scratch().panel);
      const bool integers = args.act_scheme.codes != DType::none;
      pixel_task.type = part.a.dtype;
      pixel_task.zero = integers ? static_cast<float>(codes.zero) : 0.0f;
      pixel_task.panel = panel + rows;
      if (integers) {
        decode_integers(decoder, weight, begin, panel + rows, panel);
        pixel_task.scale = panel;
        pixel_task.token_scale = codes.scale;
        pixel_task.scale2 = weight.scale2.value_or(1.0f);
      } else {
        decode_weights(self.isa, decoder, weight, begin, panel + rows);
      }
      pixel_task.floats = reinterpret_cast<float*>(scratch + work.scratch().prepared);
      pixel_task.sums = reinterpret_cast<float*>(scratch + work.scratch().sums);
      products.pixels->multiply(pixel_task);
      Outputs(self.isa, part).store(pixel_task.sums, begin, 0, tokens);
    } else if (products.patches != nullptr && work.multiplies_pixels()) {
      const Outputs outputs(self.isa, part);
      PatchTask patch_task = work.patch_task(patches, chunk, scratch + work.scratch().sums);
      patch_task.decoder = &decoder;
      patch_task.weight = weight.bytes.data();
      patch_task.channel_sums = weight.channel_sums.data();
      patch_task.sum_bias = args.epilogue->sum_bias ? static_cast<const std::int32_t*>(args.operands.sum_bias.data) : nullptr;
      patch_task.zero = codes.zero;
      patch_task.scale = codes.scale;
      patch_task.bias = code_bias(weight.scheme.codes);
      patch_task.tile = even_tile(patches.columns, self.tile.m);
      patch_task.outputs = &outputs;
      products.patches->sum_pixels(patch_task);
      for (std::int64_t block = begin, many = blocks_at_once(decoder); block < end; block += many)
        products.patches->multiply(patch_task, block, std::min(block + many, end), std::min(block + 2 * many, end));
    } else {
      PrepareTask prepared = prepare_task(self.form, part, self.tile.m);
      prepared.patches = &patches;
      for (std::int64_t m = 0; m < tokens; m += prepared.tile) prepare.of(self.form)(prepared, m);
      products.tokens(self, part, decoder, begin, end);
    }
    if (!d.channels_last())
      transpose(static_cast<int>(d.width()), out, channels * d.width(), tokens, channels, d.at(chunk.image, first, n),
                d.channel * d.width());
  };
  std::atomic<std::int64_t> next{0};
  args.executor->parallel_for(std::min(slots, division.tasks()), [&](std::int64_t slot) {
    std::byte* scratch = args.scratch.data() + static_cast<std::size_t>(slot) * work.scratch().total;
    for (std::int64_t task = next.fetch_add(1); task < division.tasks(); task = next.fetch_add(1)) run_task(task, scratch);
  });
  return {};
}

template <Multiply kMultiply, const PatchIsa* kPatches, const DepthwiseIsa* kPixels>
Status run(const Kernel& self, const StepArgs& args) {
  return convolve(self, args, {kMultiply, kPatches, kPixels});
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
  return self.linear->accepts(*self.linear, of_patches(p));
}

/// Nanoseconds per activation of a patch, for one thread: for codes in rows, which are only copied, and for everything else.
constexpr double kCopyNanoseconds = 0.25, kPrepareNanoseconds = 0.7;

double cost_us(const Kernel& self, const Problem& p) {
  const Problem patches = of_patches(p);
  const double groups = static_cast<double>(p.geometry.groups);
  const ConvWork work(self, p);
  const bool codes = p.a_dtype == DType::s8 || work.quantizes_pixels();
  const double nanoseconds = work.multiplies_pixels()               ? 0
                             : codes && self.form == ActForm::s8k64 ? kCopyNanoseconds
                                                                    : kPrepareNanoseconds;
  const double prepare = 1e-3 * nanoseconds * static_cast<double>(patches.m) * static_cast<double>(patches.k) / p.machine.threads;
  return groups * (self.linear->cost_us(*self.linear, patches) + prepare);
}

/// A scratch for every thread the plan expects; with more threads some of them stay idle.
std::size_t workspace(const Kernel& self, const Problem& p) {
  return static_cast<std::size_t>(p.machine.threads) * ConvWork(self, p).scratch().total;
}

template <Multiply kMultiply, const PatchIsa* kPatches = nullptr>
constexpr Kernel row(Isa isa, ActForm form, std::string_view layout, Tile tile, std::string_view variant = {}) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::conv,
          .out = "any",
          .act = name(form),
          .weight = "any",
          .layout = layout,
          .variant = variant,
          .tile = tile,
          .summary = form == ActForm::s8x3   ? "exact: integer dot products, patches as 24-bit fixed point"
                     : bf16_terms(form) != 0 ? "exact: bf16 dot products with patches of bf16, or of floats as sums of bf16"
                     : form == ActForm::f32
                         ? "f32 multiply-adds with patches, weights decoded to an f32 panel; FP8 activations as floats"
                     : variant == "whole" ? "W8A8: integer dot products over whole patches, exact up to the scales"
                                          : "int8 patches: integer dot products, scaled once per segment of K",
          .form = form,
          .sums = form == ActForm::s8x3                           ? Sums::fixed_point
                  : form == ActForm::s8 || form == ActForm::s8k64 ? Sums::integers
                                                                  : Sums::f32,
          .accepts = accepts,
          .cost_us = cost_us,
          .workspace = workspace,
          .run = run<kMultiply, kPatches, nullptr>};
}

Status accepts_depthwise(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  if (p.geometry.group_inputs() != 1 || p.geometry.groups == 1)
    return error(StatusCode::unsupported, "multiplies pixel by pixel, the {} groups have {} input channels each",
                 p.geometry.groups, p.geometry.group_inputs());
  if (p.prescales_k) return error(StatusCode::unsupported, "multiplies pixels as they are, without a prescale");
  if (p.act_scheme.codes == DType::none) return {};
  if (!sums_whole_rows(p.scheme, p.act_scheme) || p.act_scheme.group != GroupShape::tensor())
    return error(StatusCode::unsupported, "multiplies int8 of one scale per tensor by integers of one per output channel, not {}",
                 Scheme{p.scheme, p.act_scheme}.name());
  if (const std::int64_t most = kExactSums / largest_product(p.scheme, p.zero_type, p.act_scheme); p.k > most)
    return error(StatusCode::unsupported, "adds integers as floats, exactly up to {} of them, the filter has {}", most, p.k);
  return {};
}

double depthwise_cost_us(const Kernel& self, const Problem& p) {
  constexpr double kSlotsPerTap = 2.5, kSlotsPerPixel = 12;  // an estimate: loads, the expansion and the epilogue
  const int lanes = self.tile.n == 32 ? 16 : self.isa == Isa::avx2 ? 8 : 4;
  const double outputs = static_cast<double>(p.m * p.geometry.out_height() * p.geometry.out_width() * p.n);
  const double slots = outputs / lanes * (kSlotsPerTap * static_cast<double>(p.k) + kSlotsPerPixel);
  return kLoopUs + 1e-3 * slots * slot_ns(p.machine, lanes) / p.machine.threads;
}

template <const DepthwiseIsa* kPixels>
constexpr Kernel depthwise_row(Isa isa, std::string_view layout, Tile tile) {
  return {.backend = Backend::cpu,
          .isa = isa,
          .op = Op::conv,
          .out = "any",
          .act = "f32",
          .weight = "any",
          .layout = layout,
          .variant = kDepthwise,
          .tile = tile,
          .summary = "depthwise: a multiply-add of a vector of channels per filter tap, in f32; W8A8 exactly",
          .form = ActForm::f32,
          .accepts = accepts_depthwise,
          .cost_us = depthwise_cost_us,
          .workspace = workspace,
          .run = run<nullptr, nullptr, kPixels>};
}

constexpr std::array kKernels {
#if defined(__x86_64__)
  depthwise_row<&kAvx512Depthwise>(Isa::avx512, "cpu_n32", {0, 32, 0}),
      depthwise_row<&kAvx2Depthwise>(Isa::avx2, "cpu_n16", {0, 16, 0}),
      row<multiply_bf16<kAmxBf16>>(Isa::amx, ActForm::bf16k32, "cpu_n32", {32, 32, 0}),
      row<multiply_bf16<kAmxBf16>>(Isa::amx, ActForm::bf16x2k32, "cpu_n32", {32, 32, 0}),
      row<multiply_bf16<kAmxBf16>>(Isa::amx, ActForm::bf16x3k32, "cpu_n32", {32, 32, 0}),
      row<multiply_bf16<kAvx512Bf16>>(Isa::avx512bf16, ActForm::bf16, "cpu_n32", {8, 32, 0}),
      row<multiply_dots<kAvx512VnniFixed>>(Isa::avx512vnni, ActForm::s8x3, "cpu_n32", {3, 32, 0}),
      row<multiply_dots<kAvx512Fixed>>(Isa::avx512, ActForm::s8x3, "cpu_n32", {3, 32, 0}),
      row<multiply_dots<kAvx2VnniFixed>>(Isa::avx2vnni, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kAvx2Fixed>>(Isa::avx2, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kAmxInt8>>(Isa::amx, ActForm::s8k64, "cpu_n32", {32, 32, 0}),
      row<multiply_dots<kAmxWhole>, &kAmxPatches>(Isa::amx, ActForm::s8k64, "cpu_n32", {32, 32, 0}, "whole"),
      row<multiply_dots<kAvx512VnniInt8>>(Isa::avx512vnni, ActForm::s8, "cpu_n32", {6, 32, 0}),
      row<multiply_dots<kAvx512Int8>>(Isa::avx512, ActForm::s8, "cpu_n32", {6, 32, 0}),
      row<multiply_dots<kAvx2VnniInt8>>(Isa::avx2vnni, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kAvx2Int8>>(Isa::avx2, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kAvx512VnniWhole>, &kAvx512VnniPatches>(Isa::avx512vnni, ActForm::s8, "cpu_n32", {12, 32, 0}, "whole"),
      row<multiply_dots<kAvx512Whole>, &kAvx512Patches>(Isa::avx512, ActForm::s8, "cpu_n32", {12, 32, 0}, "whole"),
      row<multiply_dots<kAvx2VnniWhole>, &kAvx2VnniPatches>(Isa::avx2vnni, ActForm::s8, "cpu_n16", {6, 16, 0}, "whole"),
      row<multiply_dots<kAvx2Whole>, &kAvx2Patches>(Isa::avx2, ActForm::s8, "cpu_n16", {4, 16, 0}, "whole"),
      row<multiply_floats<kAvx512Float>>(Isa::avx512, ActForm::f32, "cpu_n32", {8, 32, 0}),
      row<multiply_floats<kAvx2Float>>(Isa::avx2, ActForm::f32, "cpu_n16", {6, 16, 0}),
#elif defined(__aarch64__)
  row<multiply_dots<kI8mmFixed>>(Isa::i8mm, ActForm::s8x3, "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kDotprodFixed>>(Isa::dotprod, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kI8mmInt8>>(Isa::i8mm, ActForm::s8, "cpu_n16", {12, 16, 0}),
      row<multiply_dots<kDotprodInt8>>(Isa::dotprod, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kI8mmWhole>, &kI8mmPatches>(Isa::i8mm, ActForm::s8, "cpu_n16", {12, 16, 0}, "whole"),
      row<multiply_dots<kDotprodWhole>, &kDotprodPatches>(Isa::dotprod, ActForm::s8, "cpu_n16", {4, 16, 0}, "whole"),
#endif
      depthwise_row<&kBaselineDepthwise>(Isa::baseline, "cpu_n16", {0, 16, 0}),
      row<multiply_dots<kBaselineFixed>>(Isa::baseline, ActForm::s8x3, "cpu_n16", {1, 16, 0}),
      row<multiply_dots<kBaselineInt8>>(Isa::baseline, ActForm::s8, "cpu_n16", {4, 16, 0}),
      row<multiply_dots<kBaselineWhole>, &kBaselinePatches>(Isa::baseline, ActForm::s8, "cpu_n16", {4, 16, 0}, "whole"),
#if defined(__aarch64__)
      row<multiply_floats<kBaselineFloat>>(Isa::baseline, ActForm::f32, "cpu_n16", {6, 16, 0}),
#else
      row<multiply_floats<kBaselineFloat>>(Isa::baseline, ActForm::f32, "cpu_n16", {2, 16, 0}),
#endif
};

}  // namespace

std::span<const Kernel> conv_kernels() { return kKernels; }

}  // namespace nibble::cpu
