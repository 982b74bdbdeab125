#include "checkpoint/codecs/part.hpp"

#include <utility>

#include "checkpoint/config/codec_util.hpp"

namespace nibble::codec {
namespace {

struct Range {
  std::int64_t begin = 0, end = 0;
};

/// Where an element is of `unit` channels, the last one of the rest.
Result<Range> whole_runs(const StoredTensor& stored, const Module& module, const LayerPart& part, std::int64_t total,
                         std::int64_t unit, std::string_view what) {
  if (part.begin % unit == 0 && (part.end % unit == 0 || part.end == total))
    return Range{part.begin / unit, (part.end + unit - 1) / unit};
  return error(StatusCode::unsupported,
               "{}.{}: channels [{},{}) of {} end within {} of {}; cut at multiples of that, or read the whole layer",
               module.name, stored.suffix, part.begin, part.end, total, what, unit);
}

Result<Range> range(const StoredTensor& stored, Axis axis, std::int64_t size, const Module& module, const LayerPart& part) {
  const Range all{0, size};
  const bool outputs = axis == Axis::n || axis == Axis::n_pairs || axis == Axis::n_words || axis == Axis::n_groups;
  if (outputs != (part.of == LayerPart::Of::outputs)) return all;
  const std::int64_t total = outputs ? module.n : module.k;
  switch (axis) {
    case Axis::n:
    case Axis::k:
      if (size == total) return Range{part.begin, part.end};
      break;
    case Axis::n_pairs:
      if (2 * size != total) break;
      return whole_runs(stored, module, part, total, 2, "bytes");
    case Axis::n_words:
    case Axis::k_words: {
      constexpr int kWordBits = 32;
      const int width = bits(module.scheme.codes);
      if (kWordBits % width != 0 || size != (total * width + kWordBits - 1) / kWordBits) break;
      return whole_runs(stored, module, part, total, kWordBits / width, "words");
    }
    case Axis::n_groups:
    case Axis::k_groups: {
      const std::int64_t group = outputs ? module.scheme.group.n : module.scheme.group.k;
      if (size == 1 && (group == 0 || group >= total)) return all;
      if (group == 0 || size != (total + group - 1) / group) break;
      return whole_runs(stored, module, part, total, group, "groups");
    }
    default: break;
  }
  return error(StatusCode::unsupported, "{}.{}: {} elements for {} channels have no parts; read the whole layer", module.name,
               stored.suffix, size, total);
}

Status check_natural(const StoredTensor& stored, const ConstTensorView& whole, const Module& module) {
  const GroupIndex::Kind kind = inspect_g_idx(whole, module.scheme.group, module.k).kind;
  if (!module.act_order && kind != GroupIndex::Kind::permutation) return {};
  return error(StatusCode::unsupported, "{}.{}: in act-order the input channels of a group are scattered; read the whole layer",
               module.name, stored.suffix);
}

}  // namespace

Result<Cut> cut(const StoredTensor& stored, const ConstTensorView& whole, const Module& module, const LayerPart& part) {
  const std::int64_t rows = whole.rank < 2 ? 1 : whole.dim(0);
  Cut cut{.rows = rows, .cols = rows == 0 ? 0 : whole.numel() / rows};
  cut.shape.assign(whole.shape.begin(), whole.shape.begin() + whole.rank);
  const std::span<const Axis> axes = stored.axes;
  if (axes.empty() || whole.numel() <= 1) return cut;
  const auto rank = static_cast<std::size_t>(whole.rank);
  if (rank > 2)
    return error(StatusCode::unsupported, "{}.{} has {} dimensions, and no parts; read the whole layer", module.name,
                 stored.suffix, whole.rank);
  const std::int64_t channels = part.end - part.begin;
  if (axes.front() == Axis::sizes) {
    cut.numbers = {part.of == LayerPart::Of::outputs ? channels : module.n,
                   part.of == LayerPart::Of::inputs ? channels : module.k};
    return cut;
  }
  if (axes.front() == Axis::group_of_k) {
    if (part.of == LayerPart::Of::outputs) return cut;
    NIBBLE_RETURN_IF_ERROR(check_natural(stored, whole, module));
    const std::int64_t group = module.scheme.group.k == 0 ? module.k : module.scheme.group.k;
    for (std::int64_t k = 0; k < channels; ++k) cut.numbers.push_back(k / group);
    cut.shape = {channels};
    return cut;
  }
  const std::size_t extra = rank > axes.size() ? rank - axes.size() : 0;  // dimensions of size 1 in front
  for (std::size_t d = extra; d < rank; ++d) {
    NIBBLE_ASSIGN_OR_RETURN(const Range r, range(stored, axes[d - extra], cut.shape[d], module, part));
    cut.shape[d] = r.end - r.begin;
    if (d + 1 == rank)
      cut.col = r.begin, cut.cols = r.end - r.begin;
    else
      cut.row = r.begin, cut.rows = r.end - r.begin;
  }
  return cut;
}

}  // namespace nibble::codec
