#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/cuda/table/conv.hpp"
#include "kernels/cuda/table/families.hpp"
#include "kernels/cuda/table/w8a8.hpp"
#include "kernels/cuda/table/wgmma_rows.hpp"
#include "kernels/cuda/table/wna16.hpp"
#include "kernels/cuda/table/wna8.hpp"
#include "kernels/cuda/tasks/conv_task.hpp"
#include "kernels/cuda/tasks/gemm_schedule.hpp"
#include "kernels/image.hpp"

namespace nibble::cuda {
namespace {

constexpr std::int64_t kMostDimension = std::int64_t{1} << 30;  // sizes are counted in 32 bits inside the kernels

std::int64_t pixels(const ConvGeometry& g) { return g.out_height() * g.out_width(); }

}  // namespace

Status accepts_conv(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_common(self, p));
  const ConvGeometry& g = p.geometry;
  const std::int64_t outputs = p.m * pixels(g), inputs = p.m * g.height * g.width;
  if (std::max({outputs, inputs, p.n, p.k}) > kMostDimension)
    return error(StatusCode::unsupported, "{} pixels in and {} out: more than {}", inputs, outputs, kMostDimension);
  return {};
}

Patches patches_of(const ConvGeometry& g) {
  const auto i = [](std::int64_t x) { return static_cast<int>(x); };
  return {.channels = i(g.group_inputs()),
          .groups = i(g.groups),
          .group_outputs = i(g.group_outputs()),
          .height = i(g.height),
          .width = i(g.width),
          .out_height = i(g.out_height()),
          .out_width = i(g.out_width()),
          .filter_h = i(g.filter.h),
          .filter_w = i(g.filter.w),
          .stride_h = i(g.stride.h),
          .stride_w = i(g.stride.w),
          .top = i(g.padding.top),
          .bottom = i(g.padding.bottom),
          .left = i(g.padding.left),
          .right = i(g.padding.right),
          .dilation_h = i(g.dilation.h),
          .dilation_w = i(g.dilation.w)};
}

Result<ConvTask> images_of(const StepArgs& args) {
  const ConvGeometry& g = args.conv->geometry;
  const std::int64_t batch = args.a.dim(0), tokens = batch * pixels(g);
  NIBBLE_ASSIGN_OR_RETURN(const Image a, image_of("A", args.a, args.conv->input, batch, g.in_channels, g.height, g.width));
  const auto out_image = [&](std::string_view what, const ConstTensorView& view) {
    return image_of(what, view, args.conv->output, batch, g.out_channels, g.out_height(), g.out_width());
  };
  NIBBLE_ASSIGN_OR_RETURN(const Image d, out_image("D", args.d));
  epilogue::Element element = epilogue::element(*args.epilogue, args.operands, d.matrix(0, 0, 0, tokens, g.out_channels),
                                                args.weight->scale2.value_or(1.0f));
  const auto as_images = [](epilogue::Operand& operand, const Image& image) {
    operand.stride = image.pixel, operand.image = image.image, operand.channel = image.channel;
  };
  if (args.epilogue->gate) {
    NIBBLE_ASSIGN_OR_RETURN(const Image gate, out_image("gate", args.operands.gate));
    as_images(element.gate, gate);
  }
  if (args.epilogue->residual) {
    NIBBLE_ASSIGN_OR_RETURN(const Image residual, out_image("residual", args.operands.residual));
    as_images(element.residual, residual);
  }
  return ConvTask{.patches = patches_of(g),
                  .images = static_cast<int>(batch),
                  .a_dtype = args.a.dtype,
                  .x = a.data,
                  .a = {a.image, a.pixel, a.channel},
                  .d = {d.image, d.pixel, d.channel},
                  .prescale = reinterpret_cast<const float*>(args.weight->device.prescale.data()),
                  .scratch = args.scratch.data(),
                  .scratch_end = end_of(args.scratch),
                  .epilogue = element};
}

QuantizedActs acts_per_tensor(const StepArgs& args) {
  const PackedWeightData& w = *args.weight;
  const ConstTensorView &scale = args.operands.a_scale, &zero = args.operands.a_zero;
  QuantizedActs acts;
  if ((is_compute_float(args.a.dtype) || scale.empty()) && w.static_acts) {
    acts.scale = w.static_acts->scale;
    acts.zero = w.static_acts->zero;
  } else {
    acts.scales = static_cast<const float*>(scale.data);  // null: a D of s32 needs none
    if (args.act_scheme.zero != ZeroKind::none) acts.zeros = static_cast<const std::int32_t*>(zero.data);
  }
  return acts;
}

namespace {

Status accepts_floats(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  if (!is_compute_float(p.a_dtype) || p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies floats, the activations are {}",
                 is_compute_float(p.a_dtype) ? "to be quantized" : "codes");
  if (const std::string reason = gpu_tile::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  return {};
}

Status accepts_codes(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  if (name(p.act_scheme.codes) != self.act || p.act_scheme.group != GroupShape::tensor())
    return error(StatusCode::unsupported, "multiplies {} activations with one scale for all of them, they are {}",
                 self.act == "s8" ? "int8" : "FP8",
                 p.act_scheme.codes == DType::none ? "not to be quantized" : Scheme{p.scheme, p.act_scheme}.name());
  if (const std::string reason = gpu_w8::refusal(p.scheme, p.zero_type, p.k); !reason.empty())
    return error(StatusCode::unsupported, "{}", reason);
  const bool fp8 = p.scheme.codes == DType::e4m3;
  if (fp8 != (p.act_scheme.codes == DType::e4m3))
    return error(StatusCode::unsupported, "multiplies {} activations by weights of that kind, not {}", self.act,
                 name(p.scheme.codes));
  if (fp8 && has_groups(p))
    return error(StatusCode::unsupported, "sums over all of a patch, {} has a scale per block of channels",
                 Scheme{p.scheme, p.act_scheme}.name());
  if (fp8) return {};
  if (!sums_whole_rows(p.scheme, p.act_scheme))
    return error(StatusCode::unsupported, "sums over all of a patch, {} has not one scale per output channel",
                 Scheme{p.scheme, p.act_scheme}.name());
  if (const std::int64_t most = most_whole_channels(p.scheme, p.zero_type, p.act_scheme); p.k > most)
    return error(StatusCode::unsupported, "K={}: sums of more than {} such products do not fit into 32 bits", p.k, most);
  return {};
}

Status accepts_half(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_floats(self, p));
  if (name(p.a_dtype) == self.act) return {};
  return error(StatusCode::unsupported, "multiplies {} activations, they are {}", self.act, name(p.a_dtype));
}

/// The conditions of TMA on a geometry.
Status accepts_walk(const ConvGeometry& g) {
  if (g.groups != 1) return error(StatusCode::unsupported, "takes one group, not {}", g.groups);
  if (g.in_channels % kPatchChannels != 0)
    return error(StatusCode::unsupported, "{} channels are not a multiple of {}", g.in_channels, kPatchChannels);
  constexpr std::int64_t kMostStride = 8, kCorner = 128, kShift = 255;  // of TMA
  const std::int64_t down = (g.filter.h - 1) * g.dilation.h, right = (g.filter.w - 1) * g.dilation.w;
  if (std::max(g.stride.h, g.stride.w) > kMostStride)
    return error(StatusCode::unsupported, "a stride of {}x{} is beyond {}", g.stride.h, g.stride.w, kMostStride);
  if (std::max({down, right}) > kShift || std::max(g.padding.top, g.padding.left) > kCorner ||
      std::max({down - g.padding.bottom, right - g.padding.right}) > kCorner ||
      std::max({g.padding.bottom - down, g.padding.right - right}) >= kCorner)
    return error(StatusCode::unsupported,
                 "the filter reaches {}x{} pixels beyond where it begins, with padding {} {} {} {}: too far", down, right,
                 g.padding.top, g.padding.bottom, g.padding.left, g.padding.right);
  return {};
}

Status accepts_sm90(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_half(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_wgmma_weight(p));
  return accepts_walk(p.geometry);
}

/// The conditions of rows that gather patches, `vector` channels per 16-byte copy, with row tiles within one group.
Status accepts_gather(const ConvGeometry& g, std::int64_t vector) {
  if (g.group_inputs() % vector != 0)
    return error(StatusCode::unsupported, "{} channels of a group are not a multiple of {}", g.group_inputs(), vector);
  if (g.groups > 1 && g.group_outputs() % gpu_tile::kRows != 0)
    return error(StatusCode::unsupported, "{} output channels of each of {} groups are not a multiple of {}", g.group_outputs(),
                 g.groups, gpu_tile::kRows);
  return {};
}

Status accepts_sm80(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_half(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_decoded_codes(p));
  NIBBLE_RETURN_IF_ERROR(accepts_slots(p, 32));
  return accepts_gather(p.geometry, 8);
}

/// The conditions of rows that multiply codes in tensor cores. Padding is read as zeros around an image or, with `framed`, stored in
/// memory.
Status accepts_framed(const Kernel& self, const Problem& p, ConvGeometry& framed) {
  NIBBLE_RETURN_IF_ERROR(accepts_codes(self, p));
  framed = p.geometry;
  framed.height += framed.padding.top + framed.padding.bottom;
  framed.width += framed.padding.left + framed.padding.right;
  framed.padding = {};
  if (const std::int64_t inputs = p.m * framed.height * framed.width; inputs > kMostDimension)
    return error(StatusCode::unsupported, "{} pixels in, with their padding: more than {}", inputs, kMostDimension);
  return {};
}

Status accepts_codes_sm90(const Kernel& self, const Problem& p) {
  ConvGeometry framed;
  NIBBLE_RETURN_IF_ERROR(accepts_framed(self, p, framed));
  if (self.act == "e4m3" && p.accumulation == Accumulation::precise && p.k > kPreciseChannels)
    return error(StatusCode::unsupported, "sums K={} products in tensor cores, precisely would be {} at most", p.k,
                 kPreciseChannels);
  NIBBLE_RETURN_IF_ERROR(accepts_walk(p.geometry));
  return accepts_walk(framed);
}

/// Channels whose products are summed as integers: a whole record only where its channels are of one pixel.
int patch_fold(const ConvGeometry& g, const ActScheme& act, const WeightScheme& weight) {
  return g.group_inputs() % gpu_tile::kChannels == 0 ? online_fold(act, weight) : 32;
}
int patch_fold(const Problem& p) { return patch_fold(p.geometry, p.act_scheme, p.scheme); }

/// The conditions of rows that multiply codes of pixels by weights of groups.
Status accepts_pixel_codes(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  NIBBLE_RETURN_IF_ERROR(accepts_wna8(p));
  NIBBLE_RETURN_IF_ERROR(accepts_whole_steps(p));
  const ActScheme& act = p.act_scheme;
  if (act.zero == ZeroKind::offset)
    return error(StatusCode::unsupported, "takes activations with zero points that are integers, not with float offsets");
  if (act.group == GroupShape::channel() || (act.group.k != 0 && p.geometry.group_inputs() % act.group.k != 0))
    return error(StatusCode::unsupported,
                 "quantizes pixels once: activations have one scale, or one for blocks of a pixel's {} "
                 "channels; {} is neither",
                 p.geometry.group_inputs(), Scheme{p.scheme, act}.name());
  return {};
}

Status accepts_wna8_sm90(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_pixel_codes(self, p));
  return accepts_walk(p.geometry);
}

/// The conditions of sm_80's kernel of such codes.
Status accepts_gathered_pixels(const Problem& p) {
  if (p.prescales_k && p.geometry.groups > 1)
    return error(StatusCode::unsupported, "quantizes the channels of {} groups together, without a prescale for each",
                 p.geometry.groups);
  return accepts_gather(p.geometry, kPatchChannels);
}

Status accepts_wna8_sm80(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_pixel_codes(self, p));
  if (p.act_scheme.zero != ZeroKind::none) return error(StatusCode::unsupported, "takes activations without zero points");
  return accepts_gathered_pixels(p);
}

/// The conditions of f32 activations as fixed point, beside those of the kernels that multiply its bytes.
Status accepts_fixed_point(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_conv(self, p));
  if (p.a_dtype != DType::f32 || p.act_scheme.codes != DType::none)
    return error(StatusCode::unsupported, "multiplies f32 activations as they are, they come as {}{}", name(p.a_dtype),
                 p.act_scheme.codes == DType::none ? "" : " and are to be quantized");
  NIBBLE_RETURN_IF_ERROR(accepts_wna8_weight(p));
  NIBBLE_RETURN_IF_ERROR(accepts_whole_steps(p));
  const ConvGeometry& g = p.geometry;
  if (const std::int64_t inputs = p.m * g.height * g.width; std::max(inputs, p.k) > kMostDimension / kDigitPlanes)
    return error(StatusCode::unsupported, "{} pixels in, or K={}, are more than {}", inputs, p.k, kMostDimension / kDigitPlanes);
  return {};
}

Status accepts_fixed_point_sm90(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_fixed_point(self, p));
  return accepts_walk(p.geometry);
}

Status accepts_fixed_point_sm80(const Kernel& self, const Problem& p) {
  NIBBLE_RETURN_IF_ERROR(accepts_fixed_point(self, p));
  return accepts_gathered_pixels(p);
}

Status accepts_codes_sm80(const Kernel& self, const Problem& p) {
  ConvGeometry framed;
  NIBBLE_RETURN_IF_ERROR(accepts_framed(self, p, framed));
  return accepts_gather(p.geometry, 16);
}

Status run_direct(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  task.weight = device_weight(*args.weight);
  return launch_conv_direct(task, args.stream);
}

/// Also the weight for codes, and the rule of the activations.
Result<ConvTask> codes_of(const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  const PackedWeightData& w = *args.weight;
  task.scaled = {w.bytes.data(), gpu_w8::geometry(w.scheme, w.n, w.k)};
  task.acts = acts_per_tensor(args);
  return task;
}

Status run_codes(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const ConvTask task, codes_of(args));
  return launch_conv_direct_s8(task, args.stream);
}

Status run_codes_sm90(const Kernel& self, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const ConvTask task, codes_of(args));
  return launch_conv_w8a8_sm90(task, self.tile.m, self.tile.n / gpu_w8::kRows, self.tile.split, args.stream);
}

Status run_codes_sm80(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const ConvTask task, codes_of(args));
  return launch_conv_w8a8_sm80(task, args.stream);
}

/// Whether 16-byte copies can read the pixels of channels-last images in place; others, and those that are prescaled, are copied first.
bool reads_pixels(const StepArgs& args) {
  if (!args.weight->prescale.empty()) return true;
  const ConvGeometry& g = args.conv->geometry;
  const auto a = image_of("A", args.a, args.conv->input, args.a.dim(0), g.in_channels, g.height, g.width);
  return a.ok() && (a->channel != 1 || (reinterpret_cast<std::uintptr_t>(a->data) % 16 == 0 && a->pixel * 2 % 16 == 0));
}

Status run_sm90(const Kernel& self, const StepArgs& args) {
  const int depth = gemm_groups(self.tile.m) * gpu_tile::kRows / self.tile.n;
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  task.weight = device_weight(*args.weight);
  return launch_conv_sm90(task, self.tile.m, depth, self.tile.split, args.stream);
}

/// Also the weight for codes of pixels, and their rule: activations that are not to be quantized become fixed point.
Result<ConvTask> pixel_codes_of(const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  task.weight = device_weight(*args.weight);
  task.fixed_point = args.act_scheme.codes == DType::none;
  if (!task.fixed_point) task.online = online_rule(args);
  task.fold = patch_fold(args.conv->geometry, args.act_scheme, args.weight->scheme);
  return task;
}

Status run_wna8_sm90(const Kernel& self, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const ConvTask task, pixel_codes_of(args));
  return launch_conv_wna8_sm90(task, self.tile.m, self.tile.split, args.stream);
}

Status run_wna8_sm80(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(const ConvTask task, pixel_codes_of(args));
  return launch_conv_wna8_sm80(task, args.stream);
}

Status run_sm80(const Kernel&, const StepArgs& args) {
  NIBBLE_ASSIGN_OR_RETURN(ConvTask task, images_of(args));
  task.weight = device_weight(*args.weight);
  return launch_conv_sm80(task, args.stream);
}

std::size_t half_workspace(const Kernel&, const Problem& p) {
  const ConvGeometry& g = p.geometry;
  return p.input == ImageLayout::nhwc && !p.prescales_k ? 0
                                                        : 2 * static_cast<std::size_t>(p.m * g.height * g.width * g.in_channels);
}

std::size_t sm90_workspace(const Kernel& self, const Problem& p) {
  return with_parts(half_workspace(self, p), self, gemm_groups(self.tile.m), p);
}

std::size_t codes_workspace(const Kernel&, const Problem& p) {
  return codes_map(patches_of(p.geometry), p.m, p.scheme.zero != ZeroKind::none).bytes;
}
std::size_t codes_sm90_workspace(const Kernel& self, const Problem& p) {
  return with_parts(codes_workspace(self, p), self, w8a8_groups(self.tile.m), p);
}

/// Of codes of pixels: of floats that are not to be quantized, their bytes.
std::size_t pixel_codes_workspace(const Kernel&, const Problem& p) {
  const int planes = p.act_scheme.codes == DType::none ? kDigitPlanes : 1;
  const ConvGeometry& g = p.geometry;
  const std::int64_t in = p.m * g.height * g.width,
                     bytes = p.input == ImageLayout::nhwc ? 0 : in * g.in_channels * bits(p.a_dtype) / 8;
  return wna8_image_map(patch_fold(p), planes * in, g.in_channels, bytes).bytes;
}
std::size_t wna8_workspace(const Kernel& self, const Problem& p) {
  return with_parts(pixel_codes_workspace(self, p), self, gemm_groups(self.tile.m), p);
}

/// The same layer as a linear one, with a token per output pixel.
Problem of_pixels(const Problem& p) {
  Problem pixel_rows = p;
  pixel_rows.op = Op::linear;
  pixel_rows.m = p.m * pixels(p.geometry);
  return pixel_rows;
}

/// The time of a kernel that moves so many bytes once, at that share of the bandwidth.
double copy_us(const GpuInfo& gpu, double bytes, double share = 0.7) {
  return kLaunchUs + 1e-3 * bytes / (share * gpu.read_gbytes_per_s);
}

/// The time to copy images of 16-bit floats into the other order, or to prescale them.
double reorder_us(const Kernel& self, const GpuInfo& gpu, const Problem& p) {
  const auto bytes = static_cast<double>(half_workspace(self, p));
  return bytes == 0 ? 0.0 : copy_us(gpu, 2 * bytes);
}

/// Whether sm_90's kernels read images as they lie in NCHW (conv_gemm_sm90), if their rows begin where TMA can read.
bool reads_planar(const Problem& p) {
  const Patches patches = patches_of(p.geometry);
  const bool planar = p.input == ImageLayout::nchw && p.output == ImageLayout::nchw && is_pointwise(patches) &&
                      patches.pixels() % 8 == 0 && fill_boxes(patches.pixels()) && !p.prescales_k;
  return planar && has_usual_constants(p) && !gpu_tile::are_floats(gpu_tile::stored_codes(p.scheme.codes)) &&
         gpu_tile::span(p.scheme.group.k) >= 32;
}

double direct_cost_us(const Kernel&, const Problem& p) {
  constexpr double kProducts = 4e4;  // of an SM in a microsecond: an estimate
  const GpuInfo gpu = gpu_of(p);
  const auto tokens = static_cast<double>(p.m * pixels(p.geometry));
  return kLaunchUs + 2.0 + tokens * static_cast<double>(p.n) * static_cast<double>(p.k) / (kProducts * std::max(1, gpu.sms));
}

/// A CTA's rows × tokens, and its time for a record: the kernels' own cycles (conv.cu, conv_w8a8.cu) at 1.6 GHz.
struct Sm80Shape {
  double rows, tokens, record_us;
};
constexpr std::array kHalfShapes{Sm80Shape{128, 64, 0.64}, Sm80Shape{64, 64, 0.46}, Sm80Shape{64, 32, 0.25}};
constexpr std::array kCodeShapes{Sm80Shape{128, 128, 0.78}, Sm80Shape{64, 64, 0.28}, Sm80Shape{32, 16, 0.19}};

/// An estimate, for p with pixels as rows: the best of all shapes, where a shape takes waves of CTAs × (microseconds of its records, each
/// `times` as long, plus prologue and epilogue).
double conv_sm80_cost_us(std::span<const Sm80Shape> shapes, const GpuInfo& gpu, const Problem& p, double times) {
  double best = std::numeric_limits<double>::infinity();
  for (const Sm80Shape& shape : shapes) {
    const double ctas = std::ceil(static_cast<double>(p.n) / shape.rows) * std::ceil(static_cast<double>(p.m) / shape.tokens);
    const double rounds = std::ceil(ctas / std::max(1, gpu.sms));
    const double records = std::ceil(static_cast<double>(p.k) / gpu_tile::kChannels);
    best = std::min(best, rounds * (1.5 + records * shape.record_us * times));
  }
  return 6.0 + best;  // as linear's
}

double sm90_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  return gemm_sm90_cost_us(self.tile, gpu, p) + (reads_planar(p) ? 0 : reorder_us(self, gpu, p));
}

double sm80_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const double times = gpu_tile::span(p.scheme.group.k) == gpu_tile::kChannels ? 1 : 2;  // slots within a record
  return conv_sm80_cost_us(kHalfShapes, gpu, of_pixels(p), times) + reorder_us(self, gpu, p);
}

}  // namespace

double code_images_us(const GpuInfo& gpu, const Problem& p) {
  double us = 0;
  const bool as_they_are = bits(p.a_dtype) == 8 && p.input == ImageLayout::nhwc &&
                           (p.act_scheme.zero == ZeroKind::none || p.geometry.padding == Padding{});
  if (!as_they_are) {
    constexpr double kShare = 1;  // measured on an H100: a part of the codes stays in L2
    const Patches patches = patches_of(p.geometry);
    const auto elements = static_cast<double>(p.m * p.geometry.height * p.geometry.width * p.geometry.in_channels);
    us += copy_us(gpu, elements * bits(p.a_dtype) / 8 + static_cast<double>(codes_map(patches, p.m, false).bytes), kShare);
  }
  if (p.scheme.zero != ZeroKind::none)  // sums: each patch's codes once more, from L2
    us += copy_us(gpu, static_cast<double>(p.m * pixels(p.geometry) * p.geometry.groups) * static_cast<double>(p.k));
  return us;
}

namespace {

/// The time to make codes of pixels and, from NCHW, to reorder them.
double pixel_codes_us(const GpuInfo& gpu, const Problem& p) {
  const double elements = static_cast<double>(p.m * p.geometry.height * p.geometry.width * p.geometry.in_channels);
  const double bytes = bits(p.a_dtype) / 8.0, reordered = p.input == ImageLayout::nhwc ? 0.0 : copy_us(gpu, 2 * elements * bytes);
  const int planes = p.act_scheme.codes == DType::none ? kDigitPlanes : 1;
  return reordered + copy_us(gpu, elements * (bytes + planes));
}
/// The problem that its products are: activations of fixed point are three bytes each, of which K has as many.
Problem of_codes(const Problem& p) {
  Problem codes = p;
  if (p.act_scheme.codes == DType::none) codes.k *= kDigitPlanes;
  return codes;
}

double wna8_sm90_conv_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const auto family = patch_fold(p) == gpu_tile::kChannels ? WgmmaFamily::online : WgmmaFamily::online_folds;
  return wna8_sm90_cost_us(self.tile, gpu, of_codes(p), family) + pixel_codes_us(gpu, p);
}

double wna8_sm80_conv_cost_us(const Kernel&, const Problem& p) {
  constexpr double kGather = 1.25;  // an estimate: finding pixels is a quarter of a record's instructions
  const GpuInfo gpu = gpu_of(p);
  return kGather * wna8_sm80_cost_us(gpu, of_codes(of_pixels(p))) + pixel_codes_us(gpu, p);
}

double codes_sm90_cost_us(const Kernel& self, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  return w8a8_sm90_cost_us(self.tile, p.act_scheme.codes, gpu, p) + code_images_us(gpu, p);
}

double codes_sm80_cost_us(const Kernel&, const Problem& p) {
  const GpuInfo gpu = gpu_of(p);
  const double times = p.act_scheme.codes == DType::e4m3 ? 7 : 1;  // as linear's: e4m3 is unpacked to f16
  return conv_sm80_cost_us(kCodeShapes, gpu, of_pixels(p), times) + code_images_us(gpu, p);
}

// ---- rows; a tile is m pixels × n channels

constexpr Kernel conv_row(Isa isa, std::string_view act, std::string_view layout, std::string_view variant, Sums sums) {
  return {.backend = Backend::cuda,
          .isa = isa,
          .op = Op::conv,
          .out = "any",
          .act = act,
          .weight = "any",
          .layout = layout,
          .variant = variant,
          .sums = sums};
}

constexpr Kernel float_row(Isa isa, std::string_view act) {
  Kernel row = conv_row(isa, act, "gpu_n64k128", "gemm", Sums::tensor_cores);
  row.rounds_weights = row.rounds_scales = row.rounds_prescaled = true;
  return row;
}

constexpr Tile kTiles[] = {
    {.m = 64, .n = 256},
    {.m = 64, .n = 256, .split = 4},
    {.m = 128, .n = 192},
    {.m = 128, .n = 192, .split = 2},
    {.m = 128, .n = 192, .split = 4},
    {.m = 256, .n = 128},
    {.m = 256, .n = 128, .split = 2},
    {.m = 64, .n = 256, .split = kStreamK},
    {.m = 128, .n = 192, .split = kStreamK},
    {.m = 256, .n = 128, .split = kStreamK},
};
constexpr Summaries kSummaries{
    .whole = "implicit GEMM: TMA loads patches, wgmma, weights decoded in registers",
    .split = "implicit GEMM: TMA loads patches, wgmma, weights decoded in registers; the CTAs of a cluster split K",
    .stream_k =
        "implicit GEMM: TMA loads patches, wgmma, weights decoded in registers; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel sm90_family(std::string_view act) {
  Kernel row = float_row(Isa::sm90, act);
  row.accepts = accepts_sm90;
  row.cost_us = sm90_cost_us;
  row.workspace = sm90_workspace;
  row.reads = reads_pixels;
  row.run = run_sm90;
  return row;
}

constexpr Kernel sm80_row(std::string_view act) {
  Kernel row = float_row(Isa::sm80, act);
  row.summary = "implicit GEMM: cp.async gathers patches, mma.sync, weights decoded in registers; any stride and dilation";
  row.accepts = accepts_sm80;
  row.cost_us = sm80_cost_us;
  row.workspace = half_workspace;
  row.reads = reads_pixels;
  row.run = run_sm80;
  return row;
}

constexpr Tile kCodesTiles[] = {
    {.m = 64, .n = 64},
    {.m = 64, .n = 128},
    {.m = 64, .n = 256},
    {.m = 64, .n = 64, .split = 2},
    {.m = 64, .n = 64, .split = 4},
    {.m = 128, .n = 64},
    {.m = 128, .n = 128},
    {.m = 128, .n = 192},
    {.m = 128, .n = 64, .split = 2},
    {.m = 128, .n = 128, .split = 2},
    {.m = 256, .n = 64},
    {.m = 256, .n = 128},
    {.m = 256, .n = 64, .split = 2},
    {.m = 64, .n = 256, .split = kStreamK},
    {.m = 128, .n = 192, .split = kStreamK},
    {.m = 256, .n = 128, .split = kStreamK},
};
constexpr Summaries kCodesSummaries{
    .whole = "W8A8, one scale for all activations: TMA loads patches, wgmma, both operands in shared memory",
    .split = "W8A8, one scale for all activations: TMA loads patches, wgmma; the CTAs of a cluster split K",
    .stream_k = "W8A8, one scale for all activations: TMA loads patches, wgmma; stream-K: CTAs get equal shares of all tiles"};

/// Those of e4m3, of which none has been measured yet: one of each kind.
constexpr Tile kFp8Tiles[] = {
    {.m = 64, .n = 64},
    {.m = 64, .n = 256},
    {.m = 64, .n = 64, .split = 4},
    {.m = 128, .n = 128},
    {.m = 128, .n = 192},
    {.m = 128, .n = 128, .split = 2},
    {.m = 256, .n = 128},
    {.m = 128, .n = 192, .split = kStreamK},
};
constexpr Summaries kFp8Summaries{
    .whole = "FP8, one scale for all activations: TMA loads patches, wgmma, both operands in shared memory",
    .split = "FP8, one scale for all activations: TMA loads patches, wgmma; the CTAs of a cluster split K",
    .stream_k = "FP8, one scale for all activations: TMA loads patches, wgmma; stream-K: CTAs get equal shares of all tiles"};

constexpr Kernel codes_family(std::string_view act) {
  Kernel row = conv_row(Isa::sm90, act, "gpu_w8n64k128", "", act == "s8" ? Sums::integers : Sums::tensor_core_fp8);
  row.accepts = accepts_codes_sm90;
  row.cost_us = codes_sm90_cost_us;
  row.workspace = codes_sm90_workspace;
  row.run = run_codes_sm90;
  return row;
}

constexpr Kernel codes_sm80_row(std::string_view act) {
  const bool integers = act == "s8";  // e4m3 is unpacked to f16
  Kernel row = conv_row(Isa::sm80, act, "gpu_w8n64k128", "gemm", integers ? Sums::integers : Sums::tensor_cores);
  row.summary = integers
                    ? "W8A8, one scale for all activations: cp.async gathers patches, mma.sync; any stride and dilation"
                    : "FP8, one scale for all activations: cp.async gathers patches, mma.sync of f16; any stride and dilation";
  row.accepts = accepts_codes_sm80;
  row.cost_us = codes_sm80_cost_us;
  row.workspace = codes_workspace;
  row.run = run_codes_sm80;
  return row;
}

constexpr Tile kOnlineTiles[] = {
    {.m = 64, .n = 256},
    {.m = 64, .n = 256, .split = 2},
    {.m = 64, .n = 256, .split = 4},
    {.m = 64, .n = 256, .split = kStreamK},
};
constexpr Summaries kOnlineSummaries{
    .whole = "int8 activations per tensor or block of a pixel: TMA loads patches, wgmma, weights as int8 in registers",
    .split = "int8 activations per tensor or block of a pixel: TMA loads patches, wgmma; the CTAs of a cluster split K",
    .stream_k =
        "int8 activations per tensor or block of a pixel: TMA loads patches, wgmma; stream-K: CTAs get equal shares of all "
        "tiles"};

constexpr Kernel online_family() {
  Kernel row = conv_row(Isa::sm90, "s8i16", "gpu_n64k128", "", Sums::integer_folds);
  row.accepts = accepts_wna8_sm90;
  row.cost_us = wna8_sm90_conv_cost_us;
  row.workspace = wna8_workspace;
  row.run = run_wna8_sm90;
  return row;
}

constexpr Tile kFixedPointTiles[] = {
    {.m = 64, .n = 256},
    {.m = 64, .n = 256, .split = 4},
};
constexpr Summaries kFixedPointSummaries{
    .whole = "f32 activations as 24-bit fixed point: TMA loads patches, wgmma on three bytes each, weights as int8 in registers",
    .split = "f32 activations as 24-bit fixed point: TMA loads patches, wgmma on three bytes each; the CTAs of a cluster split K",
    .stream_k = {}};

constexpr Kernel fixed_point_family() {
  Kernel row = conv_row(Isa::sm90, name(ActForm::s8x3_rows), "gpu_n64k128", "", Sums::fixed_point_folds);
  row.accepts = accepts_fixed_point_sm90;
  row.cost_us = wna8_sm90_conv_cost_us;
  row.workspace = wna8_workspace;
  row.run = run_wna8_sm90;
  return row;
}

/// act: int8 codes, or f32 activations as three of them.
constexpr Kernel wna8_sm80_row(std::string_view act) {
  const bool f32 = act == name(ActForm::s8x3_rows);
  Kernel row = conv_row(Isa::sm80, act, "gpu_n64k128", "gemm", f32 ? Sums::fixed_point_folds : Sums::integer_folds);
  row.summary =
      f32 ? "f32 activations as 24-bit fixed point: cp.async gathers patches, mma.sync on three bytes each; any stride and "
            "dilation"
          : "int8 activations per tensor or block of a pixel: cp.async gathers patches, mma.sync; any stride and dilation";
  row.accepts = f32 ? accepts_fixed_point_sm80 : accepts_wna8_sm80;
  row.cost_us = wna8_sm80_conv_cost_us;
  row.workspace = pixel_codes_workspace;
  row.run = run_wna8_sm80;
  return row;
}

constexpr Kernel direct_row() {
  Kernel row = conv_row(Isa::simt, "any", "gpu_n64k128", "direct", Sums::f32);
  row.summary = "f32 multiply-adds, one thread per output pixel: every image, type and GPU";
  row.accepts = accepts_floats;
  row.cost_us = direct_cost_us;
  row.run = run_direct;
  return row;
}

constexpr Kernel direct_codes_row() {
  Kernel row = conv_row(Isa::simt, "s8", "gpu_w8n64k128", "direct", Sums::integers);
  row.summary = "W8A8, one scale for all activations: integer multiply-adds, one thread per output pixel";
  row.accepts = accepts_codes;
  row.cost_us = direct_cost_us;
  row.run = run_codes;
  return row;
}

}  // namespace

std::span<const Kernel> conv_kernels() {
  static const std::vector<Kernel> kRows = [] {
    std::vector<Kernel> rows;
    for (const std::string_view act : {"f16", "bf16"}) append(rows, sm90_family(act), kTiles, kSummaries);
    append(rows, codes_family("s8"), kCodesTiles, kCodesSummaries);
    append(rows, codes_family("e4m3"), kFp8Tiles, kFp8Summaries);
    append(rows, online_family(), kOnlineTiles, kOnlineSummaries);
    append(rows, fixed_point_family(), kFixedPointTiles, kFixedPointSummaries);
    rows.insert(rows.end(),
                {sm80_row("f16"), sm80_row("bf16"), codes_sm80_row("s8"), codes_sm80_row("e4m3"),
                 wna8_sm80_row(name(ActForm::s8i16)), wna8_sm80_row(name(ActForm::s8x3_rows)), direct_row(), direct_codes_row()});
    return rows;
  }();
  return kRows;
}

}  // namespace nibble::cuda
