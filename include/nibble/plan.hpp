// From a quantized weight to a result: pack once, plan once, run many times.
//
//   QuantTensor ──pack──▶ PackedWeight ──plan──▶ Plan ──run──▶ D
//
//   auto weight = nibble::pack(quant_tensor);
//   auto plan   = nibble::Plan::linear(*weight, {.act = DType::f16, .m_max = 16, .epilogue = {.out = DType::f16}});
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

/// A weight in the byte order its kernels stream. Self-describing and immutable; copies share the bytes between threads.
class PackedWeight {
 public:
  explicit PackedWeight(std::shared_ptr<const PackedWeightData> data) : data_(std::move(data)) {}

  const WeightScheme& scheme() const;
  std::int64_t n() const;
  std::int64_t k() const;
  Extent kernel() const;
  std::string_view layout() const;
  /// Where bytes() are: Backend::cpu is host memory, Backend::cuda the memory of the GPU that was current when it was packed.
  Backend backend() const;
  /// Host or device memory, as backend() says.
  std::span<const std::byte> bytes() const;
  bool has_bias() const;
  bool act_order() const;
  const PackedWeightData& data() const { return *data_; }

 private:
  std::shared_ptr<const PackedWeightData> data_;
};

struct PackOptions {
  std::string layout = {};  // empty: the layout of the cheapest kernel for m in [1, m_max]
  std::int64_t m_max = 1 << 13;
  std::string kernel = {};         // pack for this kernel (by name); overrides layout and backend
  Executor* executor = nullptr;    // null: default_executor()
  Backend backend = Backend::cpu;  // cuda: packed on the current GPU, into its memory
  ActScheme quantize = {};         // how the plans to come quantize activations: LinearSpec::quantize
};

/// Rearranges `q` for a kernel. A layout of the GPU can be packed on any machine, by name and with Backend::cpu; upload() takes the
/// result to a GPU later.
/// Errors: invalid_argument when q.validate() fails or the layout is not for the backend; not_found for an unknown layout;
/// unsupported when the layout cannot hold the weight, or without a GPU; io_error without memory.
Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options = {});
/// The exact inverse: unpack(pack(q)) == q. Copies from device memory first.
Result<QuantTensor> unpack(const PackedWeight& weight);

enum class Op : std::uint8_t {
  linear,      // D[M,N] = epilogue(A[M,K] · W[N,K]ᵀ)
  conv,        // D[B,Co,Oh,Ow] = epilogue(conv2d(A[B,Ci,H,W], W)): linear on patches (conv.hpp)
  dequantize,  // D[N,K] or [K,N] = W
  prepare,     // A[M,K] → f32 [M,K], scaled and permuted as the packed weight wants it: the first step of some linear plans
};
std::string_view name(Op op);

/// A row of the kernel table, as far as the outside may see it.
struct KernelInfo {
  std::string_view name;
  Backend backend;
  Op op;
  std::string_view layout;
  Isa isa;
  std::string_view summary;
  bool batch_invariant;  // the bits of a row of D depend neither on M nor on the other rows
};

/// All kernels of this build, best-loved first, the reference last.
std::vector<KernelInfo> kernels();
/// All packed layouts of this build with a drawing of their bytes.
struct LayoutInfo {
  std::string_view name;
  Backend backend;  // whose kernels read it: cpu or cuda
  std::string_view drawing;
};
std::vector<LayoutInfo> layouts();

struct LinearSpec {
  DType act = DType::f32;  // type of A: f32, f16 or bf16; s8 or e4m3: A comes quantized, as `quantize` says
  std::int64_t m_max = 1;  // the plan serves every M in [1, m_max]
  EpilogueSpec epilogue = {};
  /// codes none: A is multiplied as it is, to f32 accuracy. s8, e4m3: A is quantized while running, as docs/accuracy.md defines it,
  /// and the codes are multiplied: per token, per block of group.k input channels, or per tensor with the weight's static_acts.
  ActScheme quantize = {};
};

struct DequantizeSpec {
  DType out = DType::f32;   // f32, f16 or bf16
  bool transposed = false;  // false: D[N,K]; true: D[K,N]
};

struct PlanOptions {
  std::string kernel = {};      // force this main kernel; empty: NIBBLE_KERNEL from the environment, else by cost
  bool allow_reference = true;  // false: fail rather than fall back to the reference kernel
  int threads = 0;              // assumed by the cost model; 0: default_executor().threads()
  /// What the machine does, by measure_roofline(): makes the predicted times those of this machine. Without it typical values are
  /// assumed, which choose the same kernels and predict times of a typical machine. Overrides `threads`. Not for the GPU.
  std::optional<Roofline> machine = {};
};

/// Why each kernel was or was not chosen, per range of M.
struct Explanation {
  struct Candidate {
    std::string_view kernel;
    bool accepted = false;
    double cost_us = 0;   // predicted, when accepted
    std::string refusal;  // with the values, when not
  };
  struct Bucket {
    std::int64_t m_low = 1, m_high = 1;
    std::vector<std::string_view> steps;  // kernels run in this order
    double cost_us = 0;                   // predicted, at m_high
    std::vector<Candidate> candidates;
  };
  std::vector<Bucket> buckets;
};

/// An immutable decision: which kernels to run, in which order, for every M up to m_max. Share it between all layers of one
/// shape and scheme, and between threads.
///
/// With one kernel the bits of a row depend neither on M nor on the other rows, if it is batch_invariant (KernelInfo). For another
/// M a plan may choose another kernel, whose sums are rounded in another order; Explanation says where. To keep the bits for every
/// M, force such a kernel by name.
class Plan {
 public:
  static Result<Plan> linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options = {});
  /// A pointwise convolution whose images are matrices of pixels − NHWC on both sides, or 1×1 images − is the linear layer and takes its
  /// kernel, unless one of Op::conv is forced.
  /// Errors: invalid_argument for a geometry that is none or not the weight's, unsupported with the reasons.
  static Result<Plan> conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options = {});
  static Result<Plan> dequantize(const PackedWeight& weight, const DequantizeSpec& spec, const PlanOptions& options = {});

  /// Bytes of scratch memory a run needs, for the largest M.
  std::size_t workspace_bytes() const;
  /// The main kernel for this M; of a convolution for a batch of so many images.
  std::string_view kernel(std::int64_t m = 1) const;
  Explanation explain() const;

  /// Runs the plan. `a` is [M,K], `d` is [M,N], both with a last stride of 1 (dequantize takes no `a`); of a convolution `a` is
  /// [B,Ci,H,W] and `d` [B,Co,Oh,Ow] with the strides of their layouts (ImageLayout). `weight` must have the
  /// shape, scheme, layout and backend the plan was made for. No allocation and no search; the only lock is the default
  /// executor's, which runs one loop at a time.
  /// Errors: invalid_argument with the values that do not fit; nothing has been written then.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const EpilogueArgs& epilogue,
             std::span<std::byte> workspace, Executor* executor = nullptr) const;
  /// The same for a weight in device memory: `a`, `d`, the operands and `workspace` are device memory too, of the GPU the weight is
  /// on, which must be current in the calling thread. Enqueues on `stream` and returns. Can be captured in a CUDA graph, but not
  /// the first run on a device, which loads the kernel's code: run once before, with the same M and strides. No allocation, search
  /// or lock, but for kernels that are not batch_invariant: their first run of a shape searches, later ones take a shared lock.
  /// Errors: as above, and internal with CUDA's words when a launch fails.
  Status run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const EpilogueArgs& epilogue,
             std::span<std::byte> workspace, Stream stream) const;

  struct Impl;
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<const Impl> impl_;
};

}  // namespace nibble
