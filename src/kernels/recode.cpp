#include "kernels/recode.hpp"

namespace nibble {
namespace {

constexpr std::int64_t kRowAlignment = 16;    // of rows of A, so that every kernel reads them
constexpr std::int64_t kZeroAlignment = 256;  // of the zero points behind the codes

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

/// Whether the zero points come with the run: those of the weight need no change.
bool has_zeros(const StepArgs& args) {
  const bool of_weight =
      args.operands.a_scale.empty() && args.act_scheme.group == GroupShape::tensor() && args.weight->static_acts;
  return !of_weight;
}

/// Codes as runs: rows of a matrix, pixels of images with their channels side by side, or channels with their pixels side by side.
struct Runs {
  std::int64_t images, rows, length, image, row;
};
Runs runs_of(const ConstTensorView& a, const ConvSpec* conv) {
  if (conv == nullptr) return {1, a.dim(0), a.dim(1), 0, a.stride(0)};
  const std::int64_t pixels = a.dim(2) * a.dim(3);
  if (conv->input == ImageLayout::nchw && pixels > 1) return {a.dim(0), a.dim(1), pixels, a.stride(0), a.stride(1)};
  const std::int64_t pixel = a.dim(3) > 1 ? a.stride(3) : a.dim(2) > 1 ? a.stride(2) : a.stride(0);
  return {1, a.dim(0) * pixels, a.dim(1), 0, pixel};
}

}  // namespace

Problem recoding(const Problem& problem) {
  Problem recoding = problem;
  recoding.op = Op::prepare;
  recoding.form = ActForm::recoded;
  recoding.layout = {};
  recoding.u8_codes = false;
  if (problem.op == Op::conv) {  // dense
    recoding.k = problem.m * problem.geometry.in_channels * problem.geometry.height * problem.geometry.width;
    recoding.m = 1;
  }
  return recoding;
}

std::size_t recoded_bytes(const Kernel&, const Problem& p) {
  const std::int64_t zeros = p.act_scheme.group == GroupShape::tensor() ? 1 : p.m * p.act_scheme.group.cols(p.k);
  return static_cast<std::size_t>(round_up(p.m * round_up(p.k, kRowAlignment), kZeroAlignment) + 4 * zeros);
}

StepArgs recoded(const StepArgs& args) {
  StepArgs after = args;
  const ConstTensorView& a = args.a;
  std::int64_t codes = a.numel();
  if (args.conv == nullptr) {
    const std::int64_t pitch = round_up(a.dim(1), kRowAlignment);
    after.a = ConstTensorView(args.prepared, DType::s8, {a.dim(0), a.dim(1)});
    after.a.strides[0] = pitch;
    codes = a.dim(0) * pitch;
  } else {
    after.a = ConstTensorView(args.prepared, DType::s8, {a.dim(0), a.dim(1), a.dim(2), a.dim(3)});
    if (args.conv->input == ImageLayout::nhwc)
      after.a.strides = {a.dim(1) * a.dim(2) * a.dim(3), 1, a.dim(1) * a.dim(3), a.dim(1)};
  }
  if (has_zeros(args)) {
    const ConstTensorView& zero = args.operands.a_zero;
    const std::byte* const to = args.prepared + round_up(codes, kZeroAlignment);
    after.operands.a_zero = zero.rank == 1 ? ConstTensorView(to, DType::s32, {zero.dim(0)})
                                           : ConstTensorView(to, DType::s32, {zero.dim(0), zero.dim(1)});
  }
  return after;
}

RecodeTask recode_task(const StepArgs& args) {
  const StepArgs after = recoded(args);
  const Runs from = runs_of(args.a, args.conv), to = runs_of(after.a, args.conv);
  RecodeTask task{.from = static_cast<const std::uint8_t*>(args.a.data),
                  .to = reinterpret_cast<std::int8_t*>(args.prepared),
                  .images = from.images,
                  .rows = from.rows,
                  .length = from.length,
                  .from_image = from.image,
                  .from_row = from.row,
                  .to_image = to.image,
                  .to_row = to.row};
  // Runs that follow one another without a gap are one run.
  if (task.from_row == task.length && task.to_row == task.length) task.length *= task.rows, task.rows = 1;
  if (task.rows == 1 && task.from_image == task.length && task.to_image == task.length)
    task.length *= task.images, task.images = 1;
  if (has_zeros(args)) {
    const ConstTensorView& zero = args.operands.a_zero;
    task.zeros = static_cast<const std::int32_t*>(zero.data);
    task.to_zeros = static_cast<std::int32_t*>(const_cast<void*>(after.operands.a_zero.data));
    task.tokens = zero.dim(0);
    task.groups = zero.rank == 1 ? 1 : zero.dim(1);
    task.zero_token = zero.stride(0);
    task.zero_group = zero.rank == 1 ? 0 : zero.stride(1);
  }
  return task;
}

}  // namespace nibble
