// What plans of experts check and share: indices from callers, and the parts of a workspace.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/buffer.hpp"
#include "core/error.hpp"
#include "nibble/experts.hpp"
#include "nibble/tensor.hpp"

namespace nibble::experts {

constexpr std::size_t kAlignment = Buffer::kAlignment;
/// Rounded up to where the next part of a workspace begins.
constexpr std::size_t padded(std::size_t bytes, std::size_t to = kAlignment) { return (bytes + to - 1) / to * to; }

/// The parts of a workspace, one after the other.
class Arena {
 public:
  /// Errors: invalid_argument where it has fewer than `needed` bytes, alignment included.
  static Result<Arena> of(std::span<std::byte> workspace, std::size_t needed, std::size_t alignment = kAlignment) {
    if (workspace.size() < needed)
      return error(StatusCode::invalid_argument, "the workspace has {} bytes, this plan needs {}; see workspace_bytes()",
                   workspace.size(), needed);
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
    return Arena(workspace.subspan(padded(address, alignment) - address), alignment);
  }
  template <class T>
  std::span<T> take(std::size_t count) {
    const std::span<T> part(reinterpret_cast<T*>(rest_.data()), count);
    rest_ = rest_.subspan(padded(count * sizeof(T), alignment_));
    return part;
  }
  std::span<std::byte> rest() const { return rest_; }

 private:
  Arena(std::span<std::byte> rest, std::size_t alignment) : rest_(rest), alignment_(alignment) {}
  std::span<std::byte> rest_;
  std::size_t alignment_;
};

/// The threads that a plan prepares for.
int threads_of(const PlanOptions& options);

/// "f32 [3,4]", for messages; "nothing" of an absent one.
std::string described(const ConstTensorView& v);
/// Ok when v is s32 of that shape.
Status check_indices(std::string_view what, const ConstTensorView& v, std::initializer_list<std::int64_t> shape);
/// Element i of such a vector, or [i, j] of a matrix.
inline std::int64_t index_at(const ConstTensorView& v, std::int64_t i) {
  return static_cast<const std::int32_t*>(v.data)[i * v.stride(0)];
}
inline std::int64_t index_at(const ConstTensorView& v, std::int64_t i, std::int64_t j) {
  return static_cast<const std::int32_t*>(v.data)[i * v.stride(0) + j * v.stride(1)];
}

/// Ok when the experts are as many and as large as those of the plan.
Status check_experts(const PackedExperts& experts, std::int64_t count, std::int64_t n, std::int64_t k);

/// The first `rows` rows of matrix i of [E,R,C].
template <class View>
View matrix_of(const View& view, std::int64_t i, std::int64_t rows) {
  using Byte = std::conditional_t<std::is_same_v<View, TensorView>, std::byte, const std::byte>;
  View matrix = view;
  matrix.data = static_cast<Byte*>(view.data) + i * view.stride(0) * bits(view.dtype) / 8;
  matrix.rank = 2;
  matrix.shape = {rows, view.dim(2)};
  matrix.strides = {view.stride(1), view.stride(2)};
  return matrix;
}

}  // namespace nibble::experts
