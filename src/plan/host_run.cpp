#include "plan/host_run.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.hpp"
#include "nibble/cuda.hpp"

namespace nibble {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every float type
constexpr std::byte kCanary{0xa5};
constexpr std::size_t kCanaries = 256;  // on each side, which keeps the alignment of an allocation

/// From the first element to the last, gaps between rows included.
std::size_t extent_bytes(const ConstTensorView& v) {
  std::int64_t elements = 1;
  for (int i = 0; i < v.rank; ++i) elements += (v.dim(i) - 1) * v.stride(i);
  return static_cast<std::size_t>(storage_bytes(v.dtype, static_cast<std::uint64_t>(elements)));
}

/// A view's elements in device memory, between canaries.
class OnDevice {
 public:
  /// An absent operand stays absent.
  static Result<OnDevice> copy(const ConstTensorView& host) {
    OnDevice copy;
    copy.view_ = host;
    if (host.empty()) return copy;
    copy.bytes_.assign(extent_bytes(host) + 2 * kCanaries, kCanary);
    std::copy_n(static_cast<const std::byte*>(host.data), extent_bytes(host), copy.bytes_.begin() + kCanaries);
    NIBBLE_ASSIGN_OR_RETURN(copy.memory_, DeviceMemory::allocate(copy.bytes_.size()));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(copy.memory_.data(), copy.bytes_.data(), copy.bytes_.size()));
    copy.view_.data = copy.memory_.data() + kCanaries;
    return copy;
  }

  const ConstTensorView& view() const { return view_; }

  /// Brings the elements back to `host` and looks at the canaries.
  Status fetch(void* host) {
    NIBBLE_RETURN_IF_ERROR(copy_from_device(bytes_.data(), memory_.data(), bytes_.size()));
    std::copy(bytes_.begin() + kCanaries, bytes_.end() - kCanaries, static_cast<std::byte*>(host));
    const auto intact = [](auto begin) {
      return std::all_of(begin, begin + kCanaries, [](std::byte b) { return b == kCanary; });
    };
    if (!intact(bytes_.begin())) return error(StatusCode::internal, "the kernel wrote before D");
    if (!intact(bytes_.end() - kCanaries)) return error(StatusCode::internal, "the kernel wrote past D");
    return {};
  }

 private:
  std::vector<std::byte> bytes_;
  DeviceMemory memory_;
  ConstTensorView view_;
};

Status run_on_device(const Plan& plan, const PackedWeight& weight, const ConstTensorView& a, const TensorView& d,
                     const EpilogueArgs& operands) {
  NIBBLE_ASSIGN_OR_RETURN(const OnDevice a_there, OnDevice::copy(a));
  NIBBLE_ASSIGN_OR_RETURN(OnDevice d_there, OnDevice::copy(d));
  EpilogueArgs there = operands;
  std::vector<OnDevice> keep;
  for (ConstTensorView* operand : {&there.row_scale, &there.col_scale, &there.bias, &there.gate, &there.residual}) {
    NIBBLE_ASSIGN_OR_RETURN(OnDevice copy, OnDevice::copy(*operand));
    *operand = copy.view();
    keep.push_back(std::move(copy));
  }
  DeviceMemory workspace;
  if (const std::vector<std::byte> poison(plan.workspace_bytes(), kPoison); !poison.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(workspace, DeviceMemory::allocate(poison.size()));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(workspace.data(), poison.data(), poison.size()));
  }
  TensorView out = d;
  out.data = const_cast<void*>(d_there.view().data);
  const Status launched = plan.run(weight, a_there.view(), out, there, std::span(workspace.data(), workspace.size()), Stream{});
  const Status finished = synchronize();  // whatever came of the launch, before the operands go
  NIBBLE_RETURN_IF_ERROR(launched);
  NIBBLE_RETURN_IF_ERROR(finished);
  return d_there.fetch(d.data);
}

}  // namespace

Status run_on_host(const Plan& plan, const PackedWeight& weight, const ConstTensorView& a, const TensorView& d,
                   const EpilogueArgs& operands, Executor* executor) {
  if (weight.backend() == Backend::cuda) return run_on_device(plan, weight, a, d, operands);
  std::vector<std::byte> workspace(plan.workspace_bytes(), kPoison);
  return plan.run(weight, a, d, operands, workspace, executor);
}

}  // namespace nibble
