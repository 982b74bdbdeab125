#include "checkpoint/stacks.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "checkpoint/config/names.hpp"
#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble {
namespace {

using Group = Checkpoint::Impl::Group;

constexpr std::string_view kGateUp = "gate_up_proj", kDown = "down_proj";
constexpr std::int64_t kMostExperts = 4096;  // a limit for damaged files: a module is made for each

/// What follows the name of a matrix in those of its tensors, and what codecs call these.
struct Part {
  std::string_view rest, suffix;
};
constexpr Part kParts[] = {{"", "weight"},
                           {"_scale_inv", "weight_scale_inv"},
                           {"_scale", "weight_scale"},
                           {"_activation_scale", "activation_scale"},
                           {"_blocks", "blocks"},
                           {"_scales", "scales"},
                           {"_packed", "weight_packed"},
                           {"_zero_point", "weight_zero_point"},
                           {"_shape", "weight_shape"},
                           {"_bias", "bias"}};

/// compressed-tensors' weight_shape of all experts, whose elements are E, N and K.
bool is_sizes(const TensorInfo& tensor) {
  return tensor.name.ends_with("_shape") && tensor.shape == std::vector<std::int64_t>{3} &&
         (tensor.dtype == DType::s64 || tensor.dtype == DType::s32);
}
/// The tensors of one matrix of all experts.
struct Matrix {
  std::string_view name;
  std::vector<std::size_t> tensors;
  const TensorInfo *weight = nullptr, *blocks = nullptr, *packed = nullptr, *scale = nullptr, *sizes = nullptr;

  /// What has its codes; null: nothing that could be those of experts.
  const TensorInfo* codes() const {
    if (weight != nullptr) return weight->shape.size() == 3 ? weight : nullptr;
    if (packed != nullptr) return packed->shape.size() == 3 && scale != nullptr ? packed : nullptr;
    return blocks != nullptr && blocks->shape.size() == 4 ? blocks : nullptr;
  }
};

/// The tensors of the group that are called like those of the matrix.
Matrix find(std::string_view name, const Group& group, const storage::Shards& shards) {
  Matrix matrix{name, {}};
  const std::string whole = group.name.empty() ? std::string(name) : group.name + "." + std::string(name);
  for (const std::size_t i : group.tensors) {
    const TensorInfo& tensor = shards.tensors[i];
    if (!tensor.name.starts_with(whole)) continue;
    const auto part = std::ranges::find(kParts, std::string_view(tensor.name).substr(whole.size()), &Part::rest);
    if (part == std::end(kParts)) continue;
    if (part->suffix == "weight")
      matrix.weight = &tensor;
    else if (part->suffix == "blocks")
      matrix.blocks = &tensor;
    else if (part->suffix == "weight_packed")
      matrix.packed = &tensor;
    else if (part->suffix.starts_with("weight_scale"))
      matrix.scale = &tensor;
    else if (is_sizes(tensor))
      matrix.sizes = &tensor;
    matrix.tensors.push_back(i);
  }
  return matrix;
}

std::string described(const TensorInfo& tensor) {
  return fmt::format("{} {} [{}]", storage::printable(tensor.name), name(tensor.dtype), fmt::join(tensor.shape, ","));
}

/// Whether the matrices are stored as [K,N]; nullopt where they do not belong to each other.
std::optional<bool> transposed(const std::vector<std::int64_t>& up, const std::vector<std::int64_t>& down) {
  if (up[2] == down[1] && up[1] == 2 * down[2]) return false;
  if (up[1] == down[2] && up[2] == 2 * down[1]) return true;
  return std::nullopt;
}

/// Weights [E,N,K] or [E,K,N]: floats, or FP8 with scales that are floats.
bool is_readable(const Matrix& matrix) {
  if (is_compute_float(matrix.weight->dtype)) return matrix.scale == nullptr;
  return matrix.weight->dtype == DType::e4m3 && matrix.scale != nullptr && is_compute_float(matrix.scale->dtype);
}

/// Its element i.
std::int64_t size_at(std::size_t i, const TensorInfo& tensor, const std::byte* data) {
  std::int64_t wide = 0;
  std::int32_t narrow = 0;
  if (tensor.dtype == DType::s64)
    std::memcpy(&wide, data + i * sizeof wide, sizeof wide);
  else
    std::memcpy(&narrow, data + i * sizeof narrow, sizeof narrow);
  return tensor.dtype == DType::s64 ? wide : narrow;
}

/// The input channels of rows whose codes share bytes; nullopt: no tensor says.
std::optional<std::int64_t> inputs(const Matrix& matrix, const storage::Shards& shards) {
  constexpr std::int64_t kBlock = 32;  // of MXFP4
  if (matrix.blocks != nullptr) return matrix.blocks->shape[2] * kBlock;
  if (matrix.sizes == nullptr) return std::nullopt;
  return size_at(2, *matrix.sizes, shards.data[static_cast<std::size_t>(matrix.sizes - shards.tensors.data())]);
}

/// Why the tensors are no experts; empty where they are. Sets `columns` where weights are [K,N].
std::string objection(const Matrix& up, const Matrix& down, const storage::Shards& shards, bool& columns) {
  const TensorInfo &first = *up.codes(), &second = *down.codes();
  const bool whole = up.weight != nullptr;  // a code a byte or more
  const auto mixed = [](const Matrix& m) { return (m.weight != nullptr) + (m.blocks != nullptr) + (m.packed != nullptr) > 1; };
  if (whole != (down.weight != nullptr) || (up.packed != nullptr) != (down.packed != nullptr) || mixed(up) || mixed(down) ||
      (whole && (!is_readable(up) || !is_readable(down))))
    return fmt::format("{} and {} are experts in a form that nibble cannot read", described(first), described(second));
  if (whole) {
    const auto order = transposed(first.shape, second.shape);
    if (!order)
      return fmt::format("{} and {} do not belong to each other: gate_up has twice as many outputs as down has inputs",
                         described(first), described(second));
    columns = *order;
  } else {
    const auto up_k = inputs(up, shards), down_k = inputs(down, shards);
    if ((down_k && first.shape[1] != 2 * *down_k) || (up_k && second.shape[1] != *up_k))
      return fmt::format(
          "{} and {} do not belong to each other: gate_up has twice as many outputs as down has inputs, and its inputs are "
          "down's "
          "outputs",
          described(first), described(second));
  }
  const std::int64_t experts = first.shape.front();
  if (experts < 1 || experts > kMostExperts) return fmt::format("{}: of 1…{} experts", described(first), kMostExperts);
  for (const Matrix* matrix : {&up, &down})
    for (const std::size_t i : matrix->tensors) {
      const TensorInfo& tensor = shards.tensors[i];
      if (is_sizes(tensor) ? size_at(0, tensor, shards.data[i]) != experts
                           : tensor.shape.empty() || tensor.shape.front() != experts)
        return fmt::format("{} is not of {} experts, as {} is", described(tensor), experts, described(first));
    }
  return {};
}

}  // namespace

std::string_view stacked_suffix(const Group::Stack& stack, std::string_view tensor) {
  const std::string_view rest = tensor.substr(stack.matrix_length);
  const std::string_view suffix = std::ranges::find(kParts, rest, &Part::rest)->suffix;
  return suffix == "weight" && stack.transposed ? "weight.transposed" : suffix;
}

StackedElement stacked_element(const Group::Stack& stack, const TensorInfo& tensor) {
  if (is_sizes(tensor)) return {tensor.bytes / 3, tensor.bytes / 3 * 2, {2}};
  const std::vector<std::int64_t>& shape = tensor.shape;
  const bool row = stack.transposed && shape.size() == 3 && shape[1] == 1;
  const std::uint64_t bytes = tensor.bytes / static_cast<std::uint64_t>(shape.front());
  return {static_cast<std::uint64_t>(stack.expert) * bytes, bytes, {shape.begin() + (row ? 2 : 1), shape.end()}};
}

Result<bool> takes_turns(const Checkpoint::Impl& in, std::string_view stack) {
  const std::string& model = in.config.model_type;
  if (model == "gpt_oss") return true;
  if (model == "openai_privacy_filter") return false;
  const auto has = [&](std::string_view rest) {
    return in.tensor_index.contains(storage::join_name(std::string(stack), fmt::format("{}{}", kGateUp, rest)));
  };
  if (!has("_bias") && !has("_blocks")) return false;
  if (model.empty()) return true;
  return error(
      StatusCode::unsupported,
      "{}: experts {} are gpt_oss's, in which rows of gate and up take turns, or openai_privacy_filter's, in which they do "
      "not; of model_type {} that is not known: let the program that made it store each expert's gate_proj and up_proj",
      stack, has("_blocks") ? "of MXFP4" : "with biases", storage::printable(model));
}

Result<QuantTensor> deinterleaved(QuantTensor q) {
  if (q.n % 2 != 0 || (q.scheme.group.n != 1 && q.scheme.group != GroupShape::tensor()))
    return error(StatusCode::unsupported, "rows of gate and up take turns, and {} rows {} cannot be told apart", q.n,
                 q.n % 2 != 0 ? "of which one is left over" : fmt::format("with scales of {} rows each", q.scheme.group.n));
  const auto reorder = [&](auto& bytes) {
    const std::size_t rows = static_cast<std::size_t>(q.n), width = bytes.size() / rows;
    const auto stored = bytes;
    for (std::size_t row = 0; row < rows; ++row)
      std::copy_n(stored.begin() + static_cast<std::ptrdiff_t>(row * width), width,
                  bytes.begin() + static_cast<std::ptrdiff_t>((row / 2 + row % 2 * (rows / 2)) * width));
  };
  reorder(q.codes);
  for (Tensor* each : {&q.scales, &q.zeros, &q.bias})
    if (!each->empty() && each->shape.front() == q.n) reorder(each->bytes);
  return q;
}

std::vector<Group> stacked_experts(const Group& group, const storage::Shards& shards, std::vector<Note>& notes) {
  const std::array matrices{find(kGateUp, group, shards), find(kDown, group, shards)};
  if (matrices[0].codes() == nullptr || matrices[1].codes() == nullptr) return {};
  bool columns = false;
  if (const std::string why = objection(matrices[0], matrices[1], shards, columns); !why.empty()) {
    notes.push_back({Note::Severity::warning, why});
    return {};
  }
  const std::int64_t experts = matrices[0].codes()->shape.front();
  std::vector<Group> groups;
  for (std::int64_t e = 0; e < experts; ++e)
    for (const Matrix& matrix : matrices) {
      const std::string prefix = group.name.empty() ? "" : group.name + ".";
      groups.push_back(
          {.name = fmt::format("{}{}.{}", prefix, e, matrix.name),
           .tensors = matrix.tensors,
           .stack = Group::Stack{
               .name = group.name, .expert = e, .matrix_length = prefix.size() + matrix.name.size(), .transposed = columns}});
    }
  return groups;
}

}  // namespace nibble
