#include "checkpoint/stacks.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"

namespace nibble {
namespace {

using Group = Checkpoint::Impl::Group;

constexpr std::string_view kGateUp = "gate_up_proj", kDown = "down_proj";
constexpr std::int64_t kMostExperts = 4096;  // a limit for damaged files: a module is made for each

/// The tensors of one matrix of all experts.
struct Matrix {
  std::string_view name;
  std::vector<std::size_t> tensors;
  const TensorInfo *weight = nullptr, *blocks = nullptr;

  /// What has its codes; null: nothing that could be those of experts.
  const TensorInfo* codes() const {
    if (weight != nullptr) return weight->shape.size() == 3 ? weight : nullptr;
    return blocks != nullptr && blocks->shape.size() == 4 ? blocks : nullptr;
  }
};

/// The tensors of the group that are called like those of the matrix.
Matrix find(std::string_view name, const Group& group, const storage::Shards& shards) {
  Matrix matrix{name, {}};
  const std::string whole = group.name.empty() ? std::string(name) : group.name + "." + std::string(name);
  for (const std::size_t i : group.tensors) {
    const TensorInfo& tensor = shards.tensors[i];
    if (tensor.name == whole)
      matrix.weight = &tensor;
    else if (tensor.name == whole + "_blocks")
      matrix.blocks = &tensor;
    else if (tensor.name != whole + "_scales" && tensor.name != whole + "_bias")
      continue;
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

/// Why the tensors are no experts; empty where they are. Sets `columns` where weights are [K,N].
std::string objection(const Matrix& up, const Matrix& down, const storage::Shards& shards, bool& columns) {
  const TensorInfo &first = *up.codes(), &second = *down.codes();
  const bool floats = up.weight != nullptr;
  if (floats != (down.weight != nullptr) || (floats && (up.blocks != nullptr || down.blocks != nullptr)) ||
      (floats && (!is_compute_float(first.dtype) || !is_compute_float(second.dtype))))
    return fmt::format("{} and {} are experts in a form that nibble cannot read", described(first), described(second));
  if (floats) {
    const auto order = transposed(first.shape, second.shape);
    if (!order)
      return fmt::format("{} and {} do not belong to each other: gate_up has twice as many outputs as down has inputs",
                         described(first), described(second));
    columns = *order;
  }
  const std::int64_t experts = first.shape.front();
  if (experts < 1 || experts > kMostExperts) return fmt::format("{}: of 1…{} experts", described(first), kMostExperts);
  for (const Matrix* matrix : {&up, &down})
    for (const std::size_t i : matrix->tensors)
      if (const TensorInfo& tensor = shards.tensors[i]; tensor.shape.empty() || tensor.shape.front() != experts)
        return fmt::format("{} is not of {} experts, as {} is", described(tensor), experts, described(first));
  return {};
}

}  // namespace

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
