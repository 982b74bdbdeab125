// From a quantized weight to a result: pack once, plan once, run many times.
//
//   QuantTensor ──pack──▶ PackedWeight ──plan──▶ Plan ──run──▶ D
//
//   nibble::LinearSpec spec{.a_dtype = DType::f16, .m_max = 16, .epilogue = {.out = DType::f16}};
//   auto weight = nibble::pack(quant_tensor, spec);
//   auto plan   = nibble::Plan::linear(*weight, spec);
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
#include <vector>

#include "nibble/conv.hpp"
#include "nibble/device.hpp"
#include "nibble/epilogue.hpp"
#include "nibble/parallel.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

struct PackedWeightData;  // src/layouts/layout.hpp
struct WeightDesc;

/// A weight in the byte order its kernels stream. Self-describing and immutable; copies share the bytes between threads.
class PackedWeight {
 public:
  /// What pack() ends with.
  explicit PackedWeight(std::shared_ptr<const PackedWeightData> data) : data_(std::move(data)) {}

  /// That of the QuantTensor.
  const WeightScheme& scheme() const;
  /// Output channels.
  std::int64_t n() const;
  /// Input channels; of a convolution Kh·Kw·Ci/groups.
  std::int64_t k() const;
  /// Kh × Kw of a convolution, 1×1 of every linear layer.
  Extent filter() const;
  /// The name of the layout of bytes(): LayoutInfo::name.
  std::string_view layout() const;
  /// Where bytes() are: Backend::cpu is host memory, Backend::cuda the memory of the GPU that was current when it was packed.
  Backend backend() const;
  /// Host or device memory, as backend() says.
  std::span<const std::byte> bytes() const;
  /// Whether it brings a bias, which EpilogueSpec::bias adds when no other is given.
  bool has_bias() const;
  /// Whether its input channels are in an order of their own; plans undo that.
  bool act_order() const;
  /// All of it but the bytes.
  WeightDesc desc() const;
  /// For kernels.
  const PackedWeightData& data() const { return *data_; }

 private:
  std::shared_ptr<const PackedWeightData> data_;
};

/// What a plan for a linear layer has to know.
struct LinearSpec {
  DType a_dtype = DType::f32;  // type of A: f32, f16 or bf16; s8 or e4m3: A comes quantized, as `act_scheme` says
  std::int64_t m_max = 1;  // the plan serves every M in [1, m_max], at most kMaxSize; m_max·N and m_max·K at most kMaxElements
  EpilogueSpec epilogue = {};  // the type of D among it
  /// codes none: A is multiplied as it is, to f32 accuracy. s8, e4m3: A is quantized while running, as docs/accuracy.md defines it,
  /// and the codes are multiplied: per token, per block of group.k input channels, or per tensor with the weight's static_acts.
  ActScheme act_scheme = {};
  Accumulation accumulation = Accumulation::fast;  // of FP8 codes

  friend bool operator==(const LinearSpec&, const LinearSpec&) = default;
};

/// What a plan for W itself has to know.
struct DequantizeSpec {
  DType out = DType::f32;   // f32, f16 or bf16
  bool transposed = false;  // false: D[N,K]; true: D[K,N]

  friend bool operator==(const DequantizeSpec&, const DequantizeSpec&) = default;
};

/// What packing and planning know of a weight: all but its bytes.
struct WeightDesc {
  WeightScheme scheme;
  std::int64_t n = 0, k = 0;                   // W[N,K]
  DType zero_type = DType::none;               // of zero points or offsets, where the scheme has some
  Extent filter = {};                          // of a convolution; 1×1 of every linear layer
  bool act_order = false;                      // input channels are in an order of their own
  bool prescale = false;                       // A is multiplied by a scale per channel first
  std::optional<StaticActs> static_acts = {};  // known beforehand: scales per tensor
};
/// Of a quantized weight.
WeightDesc describe(const QuantTensor& q);

/// Where a weight is packed, and what is chosen for it beforehand.
struct PackOptions {
  std::string layout = {};         // empty: the layout of the cheapest kernels over all M of the specification
  std::string kernel = {};         // pack for this kernel (by name); overrides layout and backend
  Executor* executor = nullptr;    // null: default_executor()
  Backend backend = Backend::cpu;  // cuda: packed on the current GPU, into its memory
};

/// Rearranges `q` for the kernels of the plans to come, which `spec` specifies. A layout of the GPU can be packed on any machine, by
/// name and with Backend::cpu; upload() takes the result to a GPU later.
/// Errors: invalid_argument when q.validate() fails, the specification contradicts itself or the layout is not for the backend;
/// not_found for an unknown layout; unsupported when the layout cannot hold the weight, or without a GPU; io_error without memory.
Result<PackedWeight> pack(const QuantTensor& q, const LinearSpec& spec, const PackOptions& options = {});
/// For a convolution.
Result<PackedWeight> pack(const QuantTensor& q, const ConvSpec& spec, const PackOptions& options = {});
/// For linear layers of f32 activations and up to 8192 tokens.
Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options = {});
/// The exact inverse: unpack(pack(q)) == q. Copies from device memory first.
Result<QuantTensor> unpack(const PackedWeight& weight);

/// The same packed weight with its bytes in device memory: what pack() with Backend::cuda ends with. For a weight that was packed
/// earlier, for the layout of a GPU, on a machine that may have none.
Result<PackedWeight> upload(const PackedWeight& weight);

/// What a kernel does.
enum class Op : std::uint8_t {
  linear,      // D[M,N] = epilogue(A[M,K] · W[N,K]ᵀ)
  conv,        // D[B,Co,Oh,Ow] = epilogue(conv2d(A[B,Ci,H,W], W)): linear on patches (conv.hpp)
  dequantize,  // D[N,K] or [K,N] = W
  prepare,     // A[M,K] → f32 [M,K], scaled and permuted as the packed weight wants it: the first step of some linear plans
};
/// "linear".
std::string_view name(Op op);

/// A row of the kernel table, as far as the outside may see it.
struct KernelInfo {
  std::string_view name;     // op_out_act_weight__backend_isa_tile
  Backend backend;           // where it runs
  Op op;                     // what it does
  std::string_view layout;   // of the weights it reads; "" when it reads none
  Isa isa;                   // the least it needs
  std::string_view summary;  // a line for people
  bool batch_invariant;      // the bits of a row of D depend neither on M nor on the other rows
};

/// All kernels of this build, best-loved first, the reference last.
std::vector<KernelInfo> kernels();
/// The one of that name. Errors: not_found, with the nearest name.
Result<KernelInfo> kernel_info(std::string_view name);
/// A packed layout.
struct LayoutInfo {
  std::string_view name;     // "cpu_n32"
  Backend backend;           // whose kernels read it: cpu or cuda
  std::string_view drawing;  // of its bytes, several lines
};
/// All packed layouts of this build.
std::vector<LayoutInfo> layouts();

/// What may be chosen, and for which machine.
struct PlanOptions {
  std::string kernel = {};      // force this main kernel; empty: NIBBLE_KERNEL from the environment, else by cost
  bool allow_reference = true;  // false: fail rather than fall back to the reference kernel
  int threads = 0;              // assumed by the cost model, 4096 at most; 0: default_executor().threads()
  /// What the machine does, by measure_roofline(): makes the predicted times those of this machine. Without it typical values are
  /// assumed, which choose the same kernels and predict times of a typical machine. Overrides `threads`. Not for the GPU.
  std::optional<Roofline> machine = {};
};

/// Why each kernel was or was not chosen, per range of M.
struct Explanation {
  /// What one kernel of the table says.
  struct Candidate {
    std::string_view kernel;  // its name
    bool accepted = false;    // else `refusal` says why not
    double cost_us = 0;       // predicted, when accepted
    std::string refusal;      // with the values, when not
  };
  /// A range of M for which the same kernels run.
  struct Bucket {
    std::int64_t m_low = 1, m_high = 1;   // both included
    std::vector<std::string_view> steps;  // kernels run in this order
    double cost_us = 0;                   // predicted, at m_high
    std::vector<Candidate> candidates;    // every kernel of the operation
  };
  std::vector<Bucket> buckets;  // by rising M, without gaps
  std::string_view layout;      // of the weight; of explain() that which pack() chooses
};

/// What pack() and Plan::linear() would decide for such a weight, without one. Candidates of other layouts are judged as if the weight
/// were packed for them. Errors: those of both.
Result<Explanation> explain(const WeightDesc& weight, const LinearSpec& spec, const PackOptions& packing = {},
                            const PlanOptions& options = {});
/// The same for a convolution.
Result<Explanation> explain(const WeightDesc& weight, const ConvSpec& spec, const PackOptions& packing = {},
                            const PlanOptions& options = {});

/// An immutable decision: which kernels to run, in which order, for every M up to m_max. Share it between all layers of one
/// shape and scheme, and between threads.
///
/// With one kernel the bits of a row depend neither on M nor on the other rows, if it is batch_invariant (KernelInfo). For another
/// M a plan may choose another kernel, whose sums are rounded in another order; Explanation says where. To keep the bits for every
/// M, force such a kernel by name.
class Plan {
 public:
  /// For layers of the weight's shape and scheme.
  /// Errors: invalid_argument for a spec that contradicts itself; not_found for a forced kernel that is none; unsupported when no kernel
  /// takes it, with every kernel's reason, or when the forced one does not, with its own.
  static Result<Plan> linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options = {});
  /// A pointwise convolution whose images are matrices of pixels − NHWC on both sides, or 1×1 images − is the linear layer and takes its
  /// kernel, unless one of Op::conv is forced.
  /// Errors: invalid_argument for a geometry that is none or not the weight's, unsupported with the reasons.
  static Result<Plan> conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options = {});
  /// For W as D, bit for bit what QuantTensor::value says, rounded once to spec.out. Errors: unsupported with the reasons.
  static Result<Plan> dequantize(const PackedWeight& weight, const DequantizeSpec& spec, const PlanOptions& options = {});

  /// Bytes of scratch memory a run needs, for the largest M.
  std::size_t workspace_bytes() const;
  /// The main kernel for this M; of a convolution for a batch of so many images.
  std::string_view kernel(std::int64_t m = 1) const;
  /// Which kernels run for which M, what they are predicted to take, and why every other one does not.
  Explanation explain() const;

  /// Runs the plan. `a` is [M,K], `d` is [M,N], both with a last stride of 1 (dequantize takes no `a`); of a convolution `a` is
  /// [B,Ci,H,W] and `d` [B,Co,Oh,Ow] with the strides of their layouts (ImageLayout). `weight` must have the
  /// shape, scheme, layout and backend the plan was made for. No allocation and no search; the only lock is the default
  /// executor's, which runs one loop at a time.
  /// Errors: invalid_argument with the values that do not fit; nothing has been written then.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
             std::span<std::byte> workspace, Executor* executor = nullptr) const;
  /// The same for a weight in device memory: `a`, `d`, the operands and `workspace` are device memory too, of the GPU the weight is
  /// on, which must be current in the calling thread. Enqueues on `stream` and returns. Can be captured in a CUDA graph, but not
  /// the first run on a device, which loads the kernel's code: run once before, with the same M and strides. No allocation, search
  /// or lock, but for the dense tier (linear_*_dense): its first run of a shape searches, later ones take a shared lock.
  /// Errors: as above, and internal with CUDA's words when a launch fails.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
             std::span<std::byte> workspace, Stream stream) const;

  struct Impl;
  /// What linear(), conv() and dequantize() end with.
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace nibble
