#include "plan/host_run.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "nibble/cuda.hpp"

namespace nibble {
namespace {

constexpr std::byte kPoison{0xff};  // NaN in every float type
constexpr std::byte kCanary{0xa5};
constexpr std::size_t kCanaries = 256;  // on each side, which keeps the alignment of an allocation
/// Canaries before a workspace: they use up the slack that workspace_bytes() includes for alignment (on the GPU all but a byte), so that
/// it does not hide a write past the end.
constexpr std::size_t kBeforeWorkspace = kCanaries + 1;

/// `size` bytes of poison behind `before` canaries, and kCanaries past them.
std::vector<std::byte> poisoned(std::size_t size, std::size_t before) {
  std::vector<std::byte> bytes(before + size + kCanaries, kCanary);
  std::fill_n(bytes.data() + before, size, kPoison);
  return bytes;
}

/// Ok, or an error that names the side of `what` where canaries were overwritten.
Status intact(std::span<const std::byte> before, std::span<const std::byte> past, std::string_view what) {
  const auto gone = [](std::byte b) { return b != kCanary; };
  if (std::ranges::any_of(before, gone)) return error(StatusCode::internal, "the kernel wrote before {}", what);
  if (std::ranges::any_of(past, gone)) return error(StatusCode::internal, "the kernel wrote past {}", what);
  return {};
}

/// From the first element to the last, gaps between rows included.
std::size_t extent_bytes(const ConstTensorView& v) {
  std::int64_t elements = 1;
  for (int i = 0; i < v.rank; ++i) elements += (v.dim(i) - 1) * v.stride(i);
  return static_cast<std::size_t>(storage_bytes(v.dtype, static_cast<std::uint64_t>(elements)));
}

/// Device memory between canaries.
class OnDevice {
 public:
  /// `fenced`: `before` canaries, the contents, kCanaries.
  static Result<OnDevice> copy(std::span<const std::byte> fenced, std::size_t before) {
    OnDevice made;
    made.before_ = before;
    NIBBLE_ASSIGN_OR_RETURN(made.memory_, DeviceMemory::allocate(fenced.size()));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(made.memory_.data(), fenced.data(), fenced.size()));
    return made;
  }
  /// A view's elements.
  static Result<OnDevice> copy(const ConstTensorView& host) {
    std::vector<std::byte> fenced = poisoned(extent_bytes(host), kCanaries);
    std::copy_n(static_cast<const std::byte*>(host.data), extent_bytes(host), fenced.data() + kCanaries);
    return copy(fenced, kCanaries);
  }

  /// Between the canaries.
  std::span<std::byte> span() const { return {memory_.data() + before_, memory_.size() - before_ - kCanaries}; }

  Status fetch(void* to) const { return copy_from_device(to, span().data(), span().size()); }

  Status intact(std::string_view what) const {
    std::vector<std::byte> before(before_), past(kCanaries);
    NIBBLE_RETURN_IF_ERROR(copy_from_device(before.data(), memory_.data(), before.size()));
    NIBBLE_RETURN_IF_ERROR(copy_from_device(past.data(), span().data() + span().size(), past.size()));
    return nibble::intact(before, past, what);
  }

 private:
  DeviceMemory memory_;
  std::size_t before_ = 0;
};

Status run_on_device(const Plan& plan, const PackedWeight& weight, const ConstTensorView& a, const TensorView& d,
                     const Operands& operands) {
  NIBBLE_ASSIGN_OR_RETURN(const OnDevice d_there, OnDevice::copy(d));
  std::vector<OnDevice> keep;
  ConstTensorView a_there = a;
  Operands there = operands;
  for (ConstTensorView* operand :
       {&a_there, &there.a_scale, &there.a_zero, &there.row_scale, &there.col_scale, &there.bias, &there.gate, &there.residual,
        &there.sum_bias, &there.out_scale, &there.out_zero, &there.norm_weight, &there.norm_bias, &there.norm_add}) {
    if (operand->empty()) continue;  // an absent operand stays absent
    NIBBLE_ASSIGN_OR_RETURN(OnDevice copy, OnDevice::copy(*operand));
    operand->data = copy.span().data();
    keep.push_back(std::move(copy));
  }
  NIBBLE_ASSIGN_OR_RETURN(const OnDevice workspace,
                          OnDevice::copy(poisoned(plan.workspace_bytes(), kBeforeWorkspace), kBeforeWorkspace));
  TensorView out = d;
  out.data = d_there.span().data();
  std::optional<OnDevice> sum;
  if (!there.norm_sum.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(sum, OnDevice::copy(operands.norm_sum));
    there.norm_sum.data = sum->span().data();
  }
  const Status launched = plan.run(weight, a_there, out, there, workspace.span(), Stream{});
  const Status finished = synchronize();  // even after a failed launch, before the operands are freed
  NIBBLE_RETURN_IF_ERROR(launched);
  NIBBLE_RETURN_IF_ERROR(finished);
  NIBBLE_RETURN_IF_ERROR(workspace.intact("its workspace"));
  NIBBLE_RETURN_IF_ERROR(d_there.intact("D"));
  if (sum) {
    NIBBLE_RETURN_IF_ERROR(sum->intact("norm_sum"));
    NIBBLE_RETURN_IF_ERROR(sum->fetch(operands.norm_sum.data));
  }
  return d_there.fetch(d.data);
}

}  // namespace

Status run_on_host(const Plan& plan, const PackedWeight& weight, const ConstTensorView& a, const TensorView& d,
                   const Operands& operands, Executor* executor) {
  if (weight.backend() == Backend::cuda) return run_on_device(plan, weight, a, d, operands);
  std::vector<std::byte> fenced = poisoned(plan.workspace_bytes(), kBeforeWorkspace);
  const std::span<std::byte> all(fenced), workspace = all.subspan(kBeforeWorkspace, plan.workspace_bytes());
  NIBBLE_RETURN_IF_ERROR(plan.run(weight, a, d, operands, workspace, executor));
  return intact(all.first(kBeforeWorkspace), all.last(kCanaries), "its workspace");
}

}  // namespace nibble
