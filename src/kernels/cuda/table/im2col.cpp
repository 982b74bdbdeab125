// Convolutions as linear layers on patches in memory: what the kernels that gather patches themselves (conv.cpp) do not take, and tensor
// cores do; and all with dense weights. A row here is the row of a linear layer, whose accepts, cost and function it asks for a token per
// output pixel.
//
//   images ──im2col──▶ patches ──prepare──▶ codes ──the linear row──▶ D        some output pixels at a time, whose patches fit into L2
//                                                            └─▶ rows ──col2im──▶ D, where D is NCHW
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "core/error.hpp"
#include "kernels/cuda/launch/im2col.hpp"
#include "kernels/cuda/table/conv.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/image.hpp"

namespace nibble::cuda {
namespace {

std::int64_t round_up(std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; }
std::int64_t bytes_of(DType type) { return bits(type) / 8; }
std::int64_t pixels(const ConvGeometry& g) { return g.out_height() * g.out_width(); }

/// What makes the form of activations that a linear row reads; null: it reads them as they are.
const Kernel* prepare_of(const Kernel& linear, const Problem& p) {
  if (!needs_prepare(linear.form, p)) return nullptr;
  for (const std::span<const Kernel> family :
       {wna8_kernels(), w8a8_kernels(), fixed_point_kernels(), pair_kernels(), e4m3_halves_kernels()})
    for (const Kernel& row : family)
      if (row.op == Op::prepare && row.form == linear.form && row.variant.empty()) return &row;
  return nullptr;
}
Problem preparing(Problem p, ActForm form) {
  p.op = Op::prepare;
  p.form = form;
  p.layout = {};
  return p;
}

/// The linear layer of so many output pixels.
Problem of_tokens(Problem p, std::int64_t tokens) {
  p.op = Op::linear;
  p.m = tokens;
  return p;
}

// ---- the workspace

constexpr std::int64_t kVector = 16;       // bytes that patches are multiples of
constexpr std::int64_t kWholeTiles = 128;  // tokens

/// The room for patches: they are read from L2, where as many pixels as fill the GPU leave it room.
std::int64_t room(const Problem& p) { return p.gpu != nullptr ? p.gpu->l2_bytes : gpu_of(p).l2_bytes; }

/// The output pixels of a piece: as many as have room, in pieces of about the same size.
std::int64_t most_tokens(const Problem& p, std::int64_t room) {
  const std::int64_t pitch = round_up(p.k * bytes_of(p.a_dtype), kVector), all = p.m * pixels(p.geometry);
  return std::min(all, std::max(kWholeTiles, room / pitch / kWholeTiles * kWholeTiles));
}
std::int64_t piece_tokens(const Problem& p, std::int64_t room) {
  const std::int64_t all = p.m * pixels(p.geometry), most = most_tokens(p, room), pieces = (all + most - 1) / most;
  return std::min(most, round_up((all + pieces - 1) / pieces, kWholeTiles));
}

/// patches | of an NCHW output rows of D, gate and residual | what prepare writes | the linear row's scratch.
struct Im2colMap {
  std::int64_t pitch = 0, d_pitch = 0;  // bytes of a patch, elements of a row of outputs
  std::size_t d = 0, gate = 0, residual = 0, prepared = 0, scratch = 0, bytes = 0;
};
Im2colMap map_of(const Kernel& self, const Problem& p, std::int64_t room) {
  constexpr std::int64_t kAlignment = 256;
  const Problem rows = of_tokens(p, most_tokens(p, room));
  Im2colMap map{.pitch = round_up(p.k * bytes_of(p.a_dtype), kVector), .d_pitch = round_up(p.n, kVector)};
  std::size_t end = 0;
  const auto take = [&end](std::int64_t bytes) {
    const std::size_t begin = end;
    end += static_cast<std::size_t>(round_up(bytes, kAlignment));
    return begin;
  };
  take(rows.m * map.pitch);
  if (p.output == ImageLayout::nchw) {
    map.d = take(rows.m * map.d_pitch * bytes_of(p.epilogue.out));
    if (p.epilogue.gate) map.gate = take(rows.m * map.d_pitch * 4);
    if (p.epilogue.residual) map.residual = take(rows.m * map.d_pitch * 4);
  }
  map.prepared = end;
  if (const Kernel* const prepare = prepare_of(*self.linear, rows))
    take(static_cast<std::int64_t>(prepare->workspace(*prepare, preparing(rows, self.linear->form))));
  map.scratch = end;
  if (self.linear->workspace != nullptr) end += self.linear->workspace(*self.linear, rows);
  map.bytes = end;
  return map;
}

std::size_t workspace(const Kernel& self, const Problem& p) { return map_of(self, p, room(p)).bytes; }

/// What a plan finds out once: the room for patches, and what the linear row is configured to, for any number of pixels of a piece.
struct Im2colConfig {
  std::int64_t room;
  std::shared_ptr<const void> linear;
};
Result<std::shared_ptr<const void>> configure(const Kernel& self, const Problem& p) {
  Im2colConfig config{room(p), nullptr};
  if (self.linear->configure != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(config.linear, self.linear->configure(*self.linear, of_tokens(p, most_tokens(p, config.room))));
  }
  return std::shared_ptr<const void>(std::make_shared<const Im2colConfig>(std::move(config)));
}

// ---- conditions

Status accepts(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  if (p.geometry.groups != 1) return error(StatusCode::unsupported, "takes one group, not {}", p.geometry.groups);
  const Problem rows = of_tokens(p, piece_tokens(p, room(p)));
  NIBBLE_RETURN_IF_ERROR(self.linear->accepts(*self.linear, rows));
  const Kernel* const prepare = prepare_of(*self.linear, rows);
  return prepare == nullptr ? Status() : prepare->accepts(*prepare, preparing(rows, self.linear->form));
}

// ---- run

/// The problem of a step, as far as the workspace depends on it.
Problem problem_of(const Kernel& self, const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  return {.op = Op::conv,
          .m = args.a.dim(0),
          .n = w.n,
          .k = w.k,
          .scheme = w.scheme,
          .zero_type = w.zero_type,
          .layout = self.layout,
          .memory = Backend::cuda,
          .a_dtype = args.a.dtype,
          .epilogue = *args.epilogue,
          .act_scheme = args.act_scheme,
          .accumulation = args.accumulation,
          .prescales_k = !w.prescale.empty(),
          .geometry = args.conv->geometry,
          .input = args.conv->input,
          .output = args.conv->output};
}

/// Images of outputs, in the order of D: rows of channels in memory.
struct OutputImage {
  Image image;
  std::byte* rows = nullptr;  // in the workspace, of NCHW images
  std::int64_t pitch = 0;     // of rows, elements

  TensorView from(std::int64_t first, std::int64_t tokens, std::int64_t channels) const {
    TensorView view =
        rows == nullptr ? image.matrix(0, first, 0, tokens, channels) : TensorView(rows, image.dtype, {tokens, channels});
    if (rows != nullptr) view.strides[0] = pitch;
    return view;
  }
};

/// An NCHW image's pixels from `first` on, as rows: patches of a single pixel.
Status launch_rows_of(const OutputImage& image, const ConvGeometry& g, std::int64_t channels, int first, int tokens,
                      Stream stream) {
  if (image.rows == nullptr) return {};
  const auto count = static_cast<int>(pixels(g));
  const std::int64_t width = bytes_of(image.image.dtype);
  return launch_im2col({.x = image.image.data,
                        .a = {image.image.image, image.image.pixel, image.image.channel},
                        .element = static_cast<int>(width),
                        .patches = {.channels = static_cast<int>(channels), .width = count, .out_width = count},
                        .first = first,
                        .tokens = tokens,
                        .rows = image.rows,
                        .pitch = image.pitch * width},
                       stream);
}

Status run(const Kernel& self, const StepArgs& args) {
  const Kernel& linear = *self.linear;
  const ConvGeometry& g = args.conv->geometry;
  const Problem p = problem_of(self, args);
  const auto& config = *static_cast<const Im2colConfig*>(args.config);
  const std::int64_t room = config.room, batch = p.m;
  const Im2colMap map = map_of(self, p, room);
  const Kernel* const prepare = prepare_of(linear, p);

  NIBBLE_ASSIGN_OR_RETURN(const Image a, image_of("A", args.a, p.input, batch, g.in_channels, g.height, g.width));
  std::byte* const memory = args.scratch.data();
  Im2colTask patches{.x = a.data,
                     .a = {a.image, a.pixel, a.channel},
                     .element = static_cast<int>(bytes_of(a.dtype)),
                     .patches = patches_of(g),
                     .rows = memory,
                     .pitch = map.pitch};
  if (a.dtype == DType::s8) {
    const QuantizedActs acts = acts_per_tensor(args);
    patches.pad = acts.zero, patches.pads = acts.zeros;
  }
  const auto output = [&](std::string_view what, bool used, const ConstTensorView& view,
                          std::size_t rows) -> Result<OutputImage> {
    if (!used) return OutputImage{};
    NIBBLE_ASSIGN_OR_RETURN(const Image image, image_of(what, view, p.output, batch, p.n, g.out_height(), g.out_width()));
    return OutputImage{image, p.output == ImageLayout::nchw ? memory + rows : nullptr, map.d_pitch};
  };
  NIBBLE_ASSIGN_OR_RETURN(const OutputImage d, output("D", true, args.d, map.d));
  NIBBLE_ASSIGN_OR_RETURN(const OutputImage gate, output("gate", p.epilogue.gate, args.operands.gate, map.gate));
  NIBBLE_ASSIGN_OR_RETURN(const OutputImage residual,
                          output("residual", p.epilogue.residual, args.operands.residual, map.residual));

  StepArgs rows = args;
  rows.conv = nullptr;
  rows.config = config.linear.get();
  rows.prepared = memory + map.prepared;
  rows.scratch = args.scratch.subspan(map.scratch);
  rows.operands.next = nullptr;
  const std::int64_t all = batch * pixels(g), each = piece_tokens(p, room);
  for (std::int64_t first = 0; first < all; first += each) {
    const std::int64_t tokens = std::min(each, all - first);
    const auto at = static_cast<int>(first), count = static_cast<int>(tokens);
    patches.first = at, patches.tokens = count;
    NIBBLE_RETURN_IF_ERROR(launch_im2col(patches, args.stream));
    NIBBLE_RETURN_IF_ERROR(launch_rows_of(gate, g, p.n, at, count, args.stream));
    NIBBLE_RETURN_IF_ERROR(launch_rows_of(residual, g, p.n, at, count, args.stream));
    TensorView x(memory, a.dtype, {tokens, p.k});
    x.strides[0] = map.pitch / bytes_of(a.dtype);
    rows.a = x;
    rows.d = d.from(first, tokens, p.n);
    if (p.epilogue.gate) rows.operands.gate = gate.from(first, tokens, p.n);
    if (p.epilogue.residual) rows.operands.residual = residual.from(first, tokens, p.n);
    if (first + tokens == all) rows.operands.next = args.operands.next;
    if (prepare == nullptr)
      rows.prepared = memory;  // only read
    else
      NIBBLE_RETURN_IF_ERROR(prepare->run(*prepare, rows));
    NIBBLE_RETURN_IF_ERROR(linear.run(linear, rows));
    if (d.rows == nullptr) continue;
    NIBBLE_RETURN_IF_ERROR(launch_col2im({.rows = d.rows,
                                          .pitch = d.pitch,
                                          .element = static_cast<int>(bytes_of(d.image.dtype)),
                                          .channels = static_cast<int>(p.n),
                                          .pixels = static_cast<int>(pixels(g)),
                                          .first = at,
                                          .tokens = count,
                                          .d = {d.image.image, d.image.pixel, d.image.channel},
                                          .images = d.image.data},
                                         args.stream));
  }
  return {};
}

// ---- costs

/// The steps beside the linear layer, for so many tokens. A thread's pieces take about 25 instructions each, an estimate.
double steps_us(const GpuInfo& gpu, const Problem& p, double tokens) {
  constexpr double kShare = 0.7, kPieces = 8e3;  // of the bandwidth; pieces of an SM in a microsecond
  const auto moved_us = [&](double bytes, double piece) {
    return kLaunchUs +
           std::max(1e-3 * 2 * bytes / (kShare * gpu.read_gbytes_per_s), bytes / piece / (kPieces * std::max(1, gpu.sms)));
  };
  const std::int64_t width = bytes_of(p.a_dtype), pixel = p.geometry.in_channels * width;
  const auto piece = static_cast<double>(p.input == ImageLayout::nchw ? width : std::min(kVector, pixel & -pixel));
  double us = moved_us(tokens * static_cast<double>(p.k * width), piece);
  if (p.output == ImageLayout::nhwc) return us;
  const double outputs = tokens * static_cast<double>(p.n), out = static_cast<double>(bytes_of(p.epilogue.out));
  us += moved_us(outputs * out, out);
  if (p.epilogue.gate) us += moved_us(outputs * 4, 4);
  if (p.epilogue.residual) us += moved_us(outputs * 4, 4);
  return us;
}

double cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const auto piece_us = [&](std::int64_t tokens) {
    if (tokens == 0) return 0.0;
    const Problem rows = of_tokens(p, tokens);
    const Kernel* const prepare = prepare_of(*self.linear, rows);
    return steps_us(gpu, p, static_cast<double>(tokens)) + self.linear->cost_us(*self.linear, rows) +
           (prepare == nullptr ? 0.0 : prepare->cost_us(*prepare, preparing(rows, self.linear->form)));
  };
  const std::int64_t all = p.m * pixels(p.geometry), each = piece_tokens(p, room(p)), whole = all / each;
  return static_cast<double>(whole) * piece_us(each) + piece_us(all % each);
}

// ---- rows

constexpr std::string_view kVariant = "im2col";

/// A convolution by a linear row, which stays where it is.
Kernel row_of(const Kernel& linear) {
  Kernel row = linear;
  row.op = Op::conv;
  row.variant = linear.tile.split > 1 ? "im2col4" : kVariant;
  row.summary =
      linear.isa == Isa::sm90
          ? linear.tile.split > 1
                ? "patches in the workspace, some output pixels at a time, multiplied as a linear layer: wgmma; the CTAs "
                  "of a cluster split K"
                : "patches in the workspace, some output pixels at a time, multiplied as a linear layer: wgmma"
      : linear.layout != "gpu_rows"
          ? "patches in the workspace, some output pixels at a time, multiplied as a linear layer: mma.sync"
      : linear.variant == "dense"
          ? "dense weights: patches in the workspace, some output pixels at a time, multiplied by cuBLASLt; the bits depend on M"
          : "dense weights: patches in the workspace, some output pixels at a time, f32 multiply-adds without tensor cores";
  if (linear.isa != Isa::sm90) row.tile = {};
  row.least_m = 1;
  row.expert_rows = 0;
  row.linear = &linear;
  row.accepts = accepts;
  row.cost_us = cost_us;
  row.workspace = workspace;
  row.configure = configure;
  row.reads = nullptr;
  row.run = run;
  return row;
}

/// The linear rows that are asked: those of dense weights, of sm_90's the tiles for many tokens and, for few, those whose clusters split K.
bool is_asked(const Kernel& row) {
  if (row.op != Op::linear) return false;
  if (row.layout == "gpu_rows") return true;
  if (row.isa == Isa::sm80) return row.tile.m == 0 && (row.variant == "gemm" || row.variant.empty());
  if (row.isa != Isa::sm90) return false;
  const Tile& t = row.tile;
  if (row.variant == "wgmma4") return t.m == 64;
  if (row.form == ActForm::f16x2_rows) return row.variant == "wgmma" && (t.m == 64 || t.m == 128);
  const bool integers = row.layout == "gpu_w8n64k128";
  return row.variant == "wgmma" &&
         ((t.m == 64 && t.n == 256) || (t.m == 128 && t.n == (integers ? 128 : 192)) || (t.m == 256 && t.n == 128));
}

}  // namespace

std::span<const Kernel> im2col_kernels() {
  static const std::vector<Kernel> kRows = [] {
    std::vector<Kernel> rows;
    for (const std::span<const Kernel> family : {wna16_kernels(), wna8_kernels(), w8a8_kernels(), fixed_point_kernels(),
                                                 pair_kernels(), e4m3_halves_kernels(), dense_kernels()})
      for (const Kernel& row : family)
        if (is_asked(row)) rows.push_back(row_of(row));
    return rows;
  }();
  return kRows;
}

}  // namespace nibble::cuda
