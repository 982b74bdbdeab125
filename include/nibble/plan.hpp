// From a quantized weight to a result: pack once, plan once, run many times.
//
//   QuantTensor ──pack──▶ PackedWeight ──plan──▶ Plan ──run──▶ D
//
//   nibble::LinearSpec spec{.a_dtype = DType::f16, .m_max = 16, .epilogue = {.out = DType::f16}};
//   auto weight = nibble::pack(quant_tensor, spec);
//   auto plan   = nibble::Plan::linear(*weight);  // for the same specification, unless another is given
//   std::vector<std::byte> workspace(plan->workspace_bytes());
//   plan->run(*weight, a, d, {}, workspace);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "nibble/conv.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/norm.hpp"
#include "nibble/parallel.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

struct GpuInfo;

struct PackedWeightData;  // src/layouts/layout.hpp
struct WeightDesc;

/// The specification of a linear layer: for pack(), explain() and Plan::linear().
struct LinearSpec {
  /// The type of A: f32, f16 or bf16; s8 or e4m3: A comes quantized, as `act_scheme` says; u8: the same with integer zero points ("s8zr"),
  /// of codes and zero points in 0 … 255.
  DType a_dtype = DType::f32;
  std::int64_t m_max = 1;  // the plan serves every M in [1, m_max], at most kMaxSize; m_max·N and m_max·K at most kMaxElements
  EpilogueSpec epilogue = {};  // also the type of D
  /// codes none: A is multiplied as it is, to f32 accuracy. codes s8 or e4m3: run() quantizes A as docs/accuracy.md defines it, per
  /// token, per group of group.k input channels, or per tensor with the weight's static_acts, and multiplies the codes.
  ActScheme act_scheme = {};
  Accumulation accumulation = Accumulation::fast;  // of FP8 codes
  NormSpec norm = {};                              // of a float A: normalized before anything else

  friend bool operator==(const LinearSpec&, const LinearSpec&) = default;
};

/// A weight in the byte order that its kernels read. Self-describing and immutable; copies share the bytes, between threads too.
class PackedWeight {
 public:
  /// What it was packed for.
  using Spec = std::variant<LinearSpec, ConvSpec>;

  /// For pack(): wraps packed data.
  PackedWeight(std::shared_ptr<const PackedWeightData> data, const Spec& spec) : data_(std::move(data)), spec_(spec) {}

  /// The specification that it was packed for, which plans take when none is given.
  const Spec& spec() const { return spec_; }

  /// The scheme of the QuantTensor it was packed from.
  const WeightScheme& scheme() const;
  /// Output channels.
  std::int64_t n() const;
  /// Input channels; of a convolution Kh·Kw·Ci/groups.
  std::int64_t k() const;
  /// Kh × Kw of a convolution; 1×1 of linear layers.
  Extent filter() const;
  /// The name of the layout of bytes(): LayoutInfo::name.
  std::string_view layout() const;
  /// Where bytes() are: Backend::cpu means host memory, Backend::cuda the GPU that was current when the weight was packed.
  Backend backend() const;
  /// The packed bytes, in host or device memory, as backend() says.
  std::span<const std::byte> bytes() const;
  /// Whether it has a bias of its own, which EpilogueSpec::bias adds when the operand is absent.
  bool has_bias() const;
  /// Whether its input channels are permuted (act-order); plans permute A to match.
  bool act_order() const;
  /// Whether its rows lie in pairs, because it was packed for EpilogueSpec::glu: only plans for a glu take it.
  bool paired() const;
  /// Everything but the bytes, for explain().
  WeightDesc desc() const;
  /// The internal form, for kernels.
  const PackedWeightData& data() const { return *data_; }

 private:
  std::shared_ptr<const PackedWeightData> data_;
  Spec spec_;
};

/// The specification of a plan for W itself.
struct DequantizeSpec {
  DType out = DType::f32;   // f32, f16 or bf16
  bool transposed = false;  // false: D[N,K]; true: D[K,N]

  friend bool operator==(const DequantizeSpec&, const DequantizeSpec&) = default;
};

/// A weight without its bytes: what explain() needs.
struct WeightDesc {
  WeightScheme scheme;
  std::int64_t n = 0, k = 0;                   // W[N,K]
  DType zero_type = DType::none;               // type of zero points or offsets; none without them
  Extent filter = {};                          // Kh × Kw of a convolution; 1×1 of linear layers
  bool act_order = false;                      // input channels are permuted
  bool prescale = false;                       // A is first multiplied by a scale per input channel
  std::optional<StaticActs> static_acts = {};  // the known scale of activations quantized per tensor
};
/// The description of a quantized weight.
WeightDesc describe(const QuantTensor& q);

/// Where a weight is packed, and in which layout.
struct PackOptions {
  std::string layout = {};         // empty: the layout of the cheapest kernels over all M of the specification
  std::string kernel = {};         // pack for this kernel (by name); overrides layout and backend
  Executor* executor = nullptr;    // null: default_executor()
  Backend backend = Backend::cpu;  // cuda: packed on the current GPU, into its memory
};

/// Rearranges `q` for the kernels that plans for `spec` will choose. A layout of the GPU can be packed on any machine, by name and
/// with Backend::cpu; upload() copies the result to a GPU later.
/// Errors: invalid_argument when q.validate() fails, the specification contradicts itself or the layout is not for the backend;
/// not_found for an unknown layout; unsupported when the layout cannot hold the weight, or without a GPU; io_error without memory.
Result<PackedWeight> pack(const QuantTensor& q, const LinearSpec& spec, const PackOptions& options = {});
/// The same for a convolution.
Result<PackedWeight> pack(const QuantTensor& q, const ConvSpec& spec, const PackOptions& options = {});
/// The same for a linear layer of f32 activations and up to 8192 tokens.
Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options = {});
/// The exact inverse: unpack(pack(q)) == q. Copies from device memory first.
Result<QuantTensor> unpack(const PackedWeight& weight);

/// A copy in the current GPU's memory of a weight that was packed in host memory for a layout of the GPU; equal to what pack() with
/// Backend::cuda makes.
Result<PackedWeight> upload(const PackedWeight& weight);

/// The operation of a kernel.
enum class Op : std::uint8_t {
  linear,      // D[M,N] = epilogue(A[M,K] · W[N,K]ᵀ)
  conv,        // D[B,Co,Oh,Ow] = epilogue(conv2d(A[B,Ci,H,W], W)): a linear layer on patches (conv.hpp)
  dequantize,  // D[N,K] or [K,N] = W
  prepare,     // A[M,K] → f32 [M,K], scaled and permuted to match the packed weight: the first step of some linear plans
  finish,      // sums [M,N] → D[M,N/2]: the last step of some linear plans with a glu
};
/// "linear".
std::string_view name(Op op);

/// The public part of a row of the kernel table.
struct KernelInfo {
  std::string_view name;     // op_out_act_weight__backend_isa_tile
  Backend backend;           // where it runs
  Op op;                     // what it does
  std::string_view layout;   // of the packed weight that it reads; "" when it reads none
  Isa isa;                   // the lowest level that it needs
  std::string_view summary;  // a line for people
  bool batch_invariant;      // the bits of a row of D depend neither on M nor on the other rows
};

/// All kernels of this build in tie-breaking order, the reference last.
std::vector<KernelInfo> kernels();
/// The kernel of that name. Errors: not_found, with the nearest name.
Result<KernelInfo> kernel_info(std::string_view name);
/// A packed layout.
struct LayoutInfo {
  std::string_view name;     // "cpu_n32"
  Backend backend;           // of the kernels that read it: cpu or cuda
  std::string_view drawing;  // of its bytes, several lines
};
/// All packed layouts of this build.
std::vector<LayoutInfo> layouts();

/// Limits on the choice of kernels, and the machine that costs are predicted for.
struct PlanOptions {
  std::string kernel = {};      // force this main kernel; empty: NIBBLE_KERNEL from the environment, else by cost
  bool allow_reference = true;  // false: fail rather than fall back to the reference kernel
  int threads = 0;              // assumed by the cost model, 4096 at most; 0: default_executor().threads()
  /// The roofline of this machine, by measure_roofline(), for predicted times. Without it typical values are assumed, which choose the
  /// same kernels. Overrides `threads`. Not used for the GPU.
  std::optional<Roofline> machine = {};
};

/// Why each kernel was or was not chosen, per range of M.
struct Explanation {
  /// A kernel of the table, and whether it takes the problem.
  struct Candidate {
    std::string_view kernel;  // KernelInfo::name
    bool accepted = false;    // false: `refusal` says why
    double cost_us = 0;       // predicted microseconds with the step that prepares A, when accepted
    std::string refusal;      // the reason with the values, when not accepted
  };
  /// A range of M for which the same kernels run.
  struct Bucket {
    std::int64_t m_low = 1, m_high = 1;   // both included
    std::vector<std::string_view> steps;  // kernels, in the order that they run
    std::string_view unaligned;  // runs instead if rows of A do not begin at multiples of 16 bytes; empty: steps read any A
    double cost_us = 0;          // predicted microseconds, at m_high
    std::vector<Candidate> candidates;  // every kernel of the operation
  };
  std::vector<Bucket> buckets;  // by rising M, without gaps
  std::string_view layout;      // of the weight; from explain(): the one that pack() chooses
};

/// What pack() and Plan::linear() would decide for such a weight; no bytes are needed. Candidates of other layouts are judged as if
/// the weight were packed for them. Errors: those of both.
Result<Explanation> explain(const WeightDesc& weight, const LinearSpec& spec, const PackOptions& packing = {},
                            const PlanOptions& options = {});
/// The same for a convolution.
Result<Explanation> explain(const WeightDesc& weight, const ConvSpec& spec, const PackOptions& packing = {},
                            const PlanOptions& options = {});

/// A machine that need not be there, for explain(): a GPU (described_gpu), or a CPU that has this level and its parents, and no other.
/// This build need not have CUDA; rows of another processor's instruction sets are not in its table.
struct Machine {
  const GpuInfo* gpu = nullptr;  // has to outlive the call
  Isa cpu = Isa::baseline;       // without a GPU
  /// A GPU.
  Machine(const GpuInfo& which) : gpu(&which) {}  // NOLINT(google-explicit-constructor)
  /// A CPU of that level.
  Machine(Isa level) : cpu(level) {}  // NOLINT(google-explicit-constructor)
};
/// What they would decide on that machine. Errors: also invalid_argument for a level of GPUs.
Result<Explanation> explain(const WeightDesc& weight, const LinearSpec& spec, const Machine& machine,
                            const PlanOptions& options = {});
Result<Explanation> explain(const WeightDesc& weight, const ConvSpec& spec, const Machine& machine,
                            const PlanOptions& options = {});
/// The same for Plan::dequantize() of a weight in that layout.
Result<Explanation> explain(const WeightDesc& weight, const DequantizeSpec& spec, std::string_view layout, const Machine& machine,
                            const PlanOptions& options = {});

/// An immutable decision: which kernels to run, in which order, for every M up to m_max. Share it between all layers of one
/// shape and scheme, and between threads. A plan for weights in device memory belongs to the GPU that was current when it was made.
///
/// A batch_invariant kernel (KernelInfo) gives a row of D the same bits whatever M and the other rows are. For another M a plan may
/// choose another kernel, which sums in another order; Explanation says where. To keep the bits for every M, force a batch_invariant
/// kernel by name.
class Plan {
 public:
  /// A plan for linear layers of the weight's shape and scheme.
  /// Errors: invalid_argument for a spec that contradicts itself; not_found, with the nearest name, for a forced kernel that does
  /// not exist; unsupported, with the reasons, when no kernel takes the layer or the forced one does not.
  static Result<Plan> linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options = {});
  /// The same for the specification that the weight was packed for. Errors: also invalid_argument when that is a convolution's.
  static Result<Plan> linear(const PackedWeight& weight, const PlanOptions& options = {});
  /// A plan for a convolution. A pointwise one whose images are matrices of pixels (NHWC on both sides, or 1×1 images) is a linear layer
  /// and uses its kernels, unless one of Op::conv is forced.
  /// Errors: invalid_argument for an impossible geometry or one that is not the weight's; otherwise as linear().
  static Result<Plan> conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options = {});
  /// The same for the specification that the weight was packed for. Errors: also invalid_argument when that is a linear layer's.
  static Result<Plan> conv(const PackedWeight& weight, const PlanOptions& options = {});
  /// A plan that writes W: bit for bit QuantTensor::value, rounded once to spec.out. Errors: unsupported with the reasons.
  static Result<Plan> dequantize(const PackedWeight& weight, const DequantizeSpec& spec, const PlanOptions& options = {});

  /// Bytes of scratch memory that run() needs, for the largest M; any alignment will do.
  std::size_t workspace_bytes() const;
  /// The same for m tokens, or of a convolution a batch of m images; of an m that the plan does not serve, for the nearest that it does.
  std::size_t workspace_bytes(std::int64_t m) const;
  /// The main kernel for this M; of a convolution, for a batch of m images.
  std::string_view kernel(std::int64_t m = 1) const;
  /// Per range of M: the kernels that run, their predicted time, and why every other kernel does not run.
  Explanation explain() const;

  /// Runs the plan. `a` is [M,K], `d` is [M,N], both with a last stride of 1 (a plan of dequantize() takes no `a`); of a convolution `a` is
  /// [B,Ci,H,W] and `d` [B,Co,Oh,Ow] with the strides of their layouts (ImageLayout). `weight` must have the
  /// shape, scheme, layout and backend the plan was made for. No allocation and no search; the only lock is that of the
  /// default executor, which runs one loop at a time.
  /// Errors: invalid_argument with the values that do not fit; nothing has been written then.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
             std::span<std::byte> workspace, Executor* executor = nullptr) const;
  /// The same for a weight in device memory: `a`, `d`, the operands and `workspace` are device memory too, of the GPU the weight is
  /// on, which must be current in the calling thread. Enqueues on `stream` and returns. Can be captured in a CUDA graph, except
  /// for the first run on a device, which loads the kernel's code: run once before, with the same M and strides. No allocation, search
  /// or lock, except in the dense tier (linear_*_dense): its first run of a shape searches, later ones take a shared lock.
  /// Errors: as above, and internal with CUDA's message when a launch fails.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
             std::span<std::byte> workspace, Stream stream) const;

  struct Impl;
  /// For linear(), conv() and dequantize(): wraps the decision.
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  /// The decision, for plans of experts.
  const Impl& impl() const { return *impl_; }

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace nibble
