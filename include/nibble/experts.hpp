// Mixture of experts: E layers of the same sizes, of which every token goes through a few.
//
//   QuantTensors ──pack_experts──▶ PackedExperts ──▶ GroupedPlan   one product: rows of A sorted by expert
//                                                └─▶ MoePlan       the layer: gate_up · glu · down, and the weighted sum
//
//   logits ──route──▶ the experts of each token, and their weights
//
//   auto gate_up = nibble::pack_experts(gate_ups, {.a_dtype = DType::bf16, .m_max = 64, .epilogue = {.activation = Activation::silu, .glu = true, .out = DType::bf16}});
//   auto down = nibble::pack_experts(downs, {.a_dtype = DType::bf16, .m_max = 64});
//   auto plan = nibble::MoePlan::make(*gate_up, *down, {.tokens_max = 64, .top_k = 8, .out = DType::bf16});
//   plan->run(*gate_up, *down, x, {.ids = ids, .weights = weights}, d, workspace);
//
// In host or in device memory. An expert without a token costs nothing. The bits of a token's result do not depend on the number of threads that run, nor
// on the order of tokens; on how many other tokens its experts have only as those of linear plans do: more rows may take another kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "nibble/cuda.hpp"
#include "nibble/parallel.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

/// Packed weights of the same sizes, scheme and layout. Immutable; copies share the bytes.
class PackedExperts {
 public:
  /// For pack_experts() and experts_of().
  explicit PackedExperts(std::vector<PackedWeight> experts) : experts_(std::move(experts)) {}

  /// How many: E.
  std::int64_t count() const { return static_cast<std::int64_t>(experts_.size()); }
  /// Expert e, 0 … E − 1: a weight like any other, for plans of its own, unpack() and verification.
  const PackedWeight& operator[](std::int64_t e) const { return experts_[static_cast<std::size_t>(e)]; }
  /// What they were packed for.
  const LinearSpec& spec() const { return std::get<LinearSpec>(experts_.front().spec()); }
  /// Output channels of each.
  std::int64_t n() const { return experts_.front().n(); }
  /// Input channels of each.
  std::int64_t k() const { return experts_.front().k(); }
  /// Packed bytes of all experts.
  std::size_t nbytes() const;
  /// Where they are: Backend::cuda means memory of the GPU that was current when they were packed.
  Backend backend() const { return experts_.front().backend(); }

  /// For pack_experts() and experts_of(), of weights in device memory: their records, biases and what else they have follow one another.
  static Result<PackedExperts> on_device(std::vector<PackedWeight> weights);
  /// Expert 0 of device memory as plans of grouped products take it: rows of A come in the order of the packed channels, multiplied by the
  /// prescale, and a second-level scale is each expert's own.
  const PackedWeight& for_plans() const { return *for_plans_; }
  /// f32 [E] in device memory: the second-level scale of each expert; null where they have none. For kernels.
  const float* scale2_on_device() const { return scale2_ == nullptr ? nullptr : reinterpret_cast<const float*>(scale2_->data()); }

 private:
  std::vector<PackedWeight> experts_;
  std::optional<PackedWeight> for_plans_;
  std::shared_ptr<const DeviceMemory> scale2_;
};

/// Packs the experts for a specification as pack() does one weight, into one allocation. The specification is that of an expert, whose m_max
/// is the most tokens of a call.
/// Errors: invalid_argument without experts, or where they differ in sizes, scheme or types, with the expert and the values; otherwise as
/// pack().
Result<PackedExperts> pack_experts(std::span<const QuantTensor> experts, const LinearSpec& spec, const PackOptions& options = {});
/// The same for experts that are read one by one, so that no more than one is in memory unpacked. Errors: also those of `read`.
Result<PackedExperts> pack_experts(std::int64_t count, const std::function<Result<QuantTensor>(std::int64_t expert)>& read,
                                   const LinearSpec& spec, const PackOptions& options = {});

/// Weights that have been packed one by one, as of files, as experts. They keep their memory; weights in device memory that are not equally far
/// apart are copied into one allocation.
/// Errors: invalid_argument without weights, or where they differ in sizes, scheme, types, memory, layout or specification; for convolutions.
Result<PackedExperts> experts_of(std::vector<PackedWeight> weights);

/// Which rows of A go through which expert. In the memory of the experts. In device memory they are not checked: rows beyond those of A are
/// not read, what offsets and counts say beyond them is left out, and ids outside 0 … E − 1 are none.
struct ExpertRows {
  /// s32 [E+1], rising from 0 to R: rows offsets[e] … offsets[e+1] − 1 of A [R,K] and D [R,N] are expert e's.
  ConstTensorView offsets = {};
  /// s32 [E], in place of offsets: A is [E,R,K] and D [E,R,N], of which the first counts[e] rows of expert e are read and written.
  ConstTensorView counts = {};
  /// s32 [R], with offsets: row i of the sorted order is row rows[i] of A, which may have any number of rows, and row i of D. Of a float A.
  ConstTensorView rows = {};
  /// s32 [T,top_k], alone: pair (t,j) is row t·top_k + j of D [T·top_k,N], and expert ids[t,j]'s; of −1, no expert, that row becomes zeros. A
  /// is [T,K], or has a row for each pair. Of a float A. Nothing is to be sorted: an expert's only row is read and written where it lies.
  ConstTensorView ids = {};
};

/// D = epilogue(A · W_eᵀ), where each row has its expert e.
class GroupedPlan {
 public:
  /// spec: of an expert; m_max is the most rows of all experts together. Of the operands of its epilogue, those with a row for each of A's
  /// are taken (row_scale, gate, residual, and scales and zero points of a quantized A), with counts for each of the E·R, with ids for each
  /// pair, and biases are the experts' own.
  /// Errors: as Plan::linear; unsupported for other operands.
  static Result<GroupedPlan> make(const PackedExperts& experts, const LinearSpec& spec, const PlanOptions& options = {});

  /// Bytes of scratch memory that run() needs; any alignment will do.
  std::size_t workspace_bytes() const;
  /// The same for a run with ExpertRows::ids, which gathers rows there and puts results in order.
  std::size_t ids_workspace_bytes() const;
  /// The plan of an expert's rows: explain() it.
  const Plan& expert_plan() const;

  /// Errors: invalid_argument with the values that do not fit; nothing has been written then.
  Status run(const PackedExperts& experts, const ConstTensorView& a, const ExpertRows& rows, const TensorView& d,
             const Operands& operands, std::span<std::byte> workspace, Executor* executor = nullptr) const;
  /// The same for experts in device memory, as Plan::run with a stream: everything is device memory, the call enqueues and returns, and a
  /// captured graph serves every offsets, counts, rows and ids that are there when it is replayed. With counts, m_max has to be E·R; with ids D
  /// is f32, f16 or bf16, with a multiple of 8 columns and nothing between its rows, and there is no row_scale for each row.
  Status run(const PackedExperts& experts, const ConstTensorView& a, const ExpertRows& rows, const TensorView& d,
             const Operands& operands, std::span<std::byte> workspace, Stream stream) const;

  struct Impl;
  /// For make(): wraps the decision.
  explicit GroupedPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

/// The specification of a layer of experts, beside those of its two products.
struct MoeSpec {
  std::int64_t tokens_max = 1;  // the plan serves every number of tokens up to it
  std::int64_t top_k = 1;       // experts of a token, 1 … E
  bool residual = false;        // shaped like D: added last
  DType out = DType::f32;       // of D: f32, f16 or bf16

  friend bool operator==(const MoeSpec&, const MoeSpec&) = default;
};

/// What a run of a layer reads beside x and the experts.
struct MoeOperands {
  ConstTensorView ids = {};       // s32 [T,top_k]: the experts of a token, each at most once; −1: none
  ConstTensorView weights = {};   // f32 [T,top_k]: what their results are multiplied by
  ConstTensorView residual = {};  // f32, f16 or bf16 [T,N], with MoeSpec::residual
};

/// D[t] = Σ_j weights[t,j] · down_e(glu(gate_up_e(x[t]))) + residual[t], with e = ids[t,j]: added in f32 in the order of j. On the
/// GPU the results of down_e are of its specification's type (epilogue.out: f32, f16 or bf16) before they are added: those of 16 bits are rounded, and
/// half as much to write and to read. On the CPU they are f32.
class MoePlan {
 public:
  /// Plans the products for these specifications of an expert, with the layer's tokens for their m_max, and biases where the experts have them.
  /// Errors: invalid_argument where the two do not fit each other, with the values; unsupported for operands; otherwise as Plan::linear.
  static Result<MoePlan> make(const PackedExperts& gate_up, const LinearSpec& gate_up_spec, const PackedExperts& down,
                              const LinearSpec& down_spec, const MoeSpec& spec, const PlanOptions& options = {});
  /// The same for the specifications that the experts were packed for.
  static Result<MoePlan> make(const PackedExperts& gate_up, const PackedExperts& down, const MoeSpec& spec,
                              const PlanOptions& options = {});

  /// Bytes of scratch memory that run() needs; any alignment will do.
  std::size_t workspace_bytes() const;
  /// The plans of an expert's rows: explain() them.
  const Plan& gate_up_plan() const;
  const Plan& down_plan() const;

  /// x is [T,K] of the type that `gate_up` was packed for, d [T,N].
  /// Errors: invalid_argument with the values that do not fit, ids included; nothing has been written then.
  Status run(const PackedExperts& gate_up, const PackedExperts& down, const ConstTensorView& x, const MoeOperands& operands,
             const TensorView& d, std::span<std::byte> workspace, Executor* executor = nullptr) const;
  /// The same for experts in device memory, as Plan::run with a stream: everything is device memory, the call enqueues and returns, and a
  /// captured graph serves every ids and weights that are there when it is replayed. Ids are not checked: those outside 0 … E − 1 are none.
  Status run(const PackedExperts& gate_up, const PackedExperts& down, const ConstTensorView& x, const MoeOperands& operands,
             const TensorView& d, std::span<std::byte> workspace, Stream stream) const;

  struct Impl;
  /// For make(): wraps the decision.
  explicit MoePlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace nibble
