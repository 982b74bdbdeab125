// Plans: decide once, run many times.
#include "nibble/plan.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/environment.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"
#include "epilogue/epilogue.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "kernels/finish.hpp"
#include "kernels/image.hpp"
#include "kernels/kernel.hpp"
#include "kernels/norm.hpp"
#include "kernels/recode.hpp"
#include "plan/check.hpp"
#include "plan/choose.hpp"
#include "plan/experts_plan.hpp"

namespace nibble {
namespace {

/// The alignment of the parts of a workspace: a cache line on the CPU, that of cudaMalloc on the GPU.
std::size_t alignment(Backend memory) { return memory == Backend::cuda ? 256 : Buffer::kAlignment; }

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// The workspace of a run: the A of a first step, the output of prepare, the sums for a last step, then the scratch of the main kernel.
struct Parts {
  // Bytes; all but the last are rounded up to where the next one begins.
  std::size_t first = 0, prepared = 0, sums = 0, scratch = 0;
  std::size_t total() const { return first + prepared + sums + scratch; }
};

std::size_t workspace_of(const Kernel& kernel, const Problem& problem) {
  return kernel.workspace == nullptr ? 0 : kernel.workspace(kernel, problem);
}

/// The workspace that the steps need at problem.m; cheap arithmetic, done in every run.
Parts parts(const Bucket& bucket, const Problem& layer) {
  const Problem problem = bucket.finish == nullptr ? layer : product_of(layer);
  Parts parts{.scratch = workspace_of(*bucket.main, problem)};
  if (bucket.unaligned != nullptr) parts.scratch = std::max(parts.scratch, workspace_of(*bucket.unaligned, problem));
  if (bucket.first != nullptr)
    parts.first = round_up(workspace_of(*bucket.first, *first_step(problem)), alignment(problem.memory));
  if (bucket.prepare != nullptr)
    parts.prepared = round_up(workspace_of(*bucket.prepare, preparing(problem, bucket.main->form)), alignment(problem.memory));
  if (bucket.unaligned_prepare != nullptr)
    parts.prepared =
        round_up(workspace_of(*bucket.unaligned_prepare, preparing(problem, bucket.unaligned->form)), alignment(problem.memory));
  parts.sums = round_up(sums_bytes(layer), alignment(problem.memory));
  return parts;
}

}  // namespace

struct Plan::Impl {
  Impl() = default;
  Impl(const Impl&) = delete;  // problem.gpu points into this one
  Impl& operator=(const Impl&) = delete;

  const Layout* layout = nullptr;
  GpuInfo gpu;      // of weights in device memory: the plan's
  Problem problem;  // without m. problem.memory is that of the weight and of all operands of run()
  LinearSpec linear;
  DequantizeSpec dequantize;
  std::optional<ConvSpec> conv;  // also of a pointwise one, whose problem is the linear layer `linear`
  std::vector<Bucket> buckets;
  /// Of a bucket's `main` and `unaligned`: what they were configured to.
  struct Configs {
    std::shared_ptr<const void> main, unaligned;
  };
  std::vector<Configs> configs;  // by bucket
  std::string_view forced;       // the kernel, for explain(); and whether the reference was allowed
  bool allow_reference = true;
  std::size_t workspace = 0;  // the largest over all M

  /// M as buckets count it, which is pixels of a pointwise convolution: of m tokens or images, or the nearest number that is served.
  std::int64_t served(std::int64_t m) const {
    if (conv && problem.op == Op::linear)
      m = std::clamp<std::int64_t>(m, 1, conv->batch_max) * conv->geometry.height * conv->geometry.width;
    return std::clamp<std::int64_t>(m, 1, buckets.back().m_high);
  }
  const Bucket& bucket(std::int64_t m) const {
    return *std::ranges::find_if(buckets, [m](const Bucket& b) { return m <= b.m_high; });
  }

  /// `args` holds the caller's a, d, operands, and the executor or the stream; this checks and completes it.
  Status run(const PackedWeight& weight, StepArgs args, std::span<std::byte> workspace_memory) const;
  /// The same of a product that another one's launch runs.
  Result<StepArgs> joined(const PackedWeight& weight, StepArgs args) const;

 private:
  Status check_weight(const PackedWeight& weight) const;
  Status take_weight(const PackedWeight& weight, StepArgs& args) const;
  Status take_operands(StepArgs& args) const;
  void take_own_bias(StepArgs& args) const;
  Status run_linear(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_conv(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_dequantize(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_steps(const Bucket& bucket, std::int64_t m, StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_main(const Bucket& bucket, StepArgs args) const;
};

namespace {

Status check_matrix(std::string_view what, const ConstTensorView& v) {
  if (v.empty()) return error(StatusCode::invalid_argument, "{} has no data", what);
  if (v.rank != 2 || v.stride(1) != 1)
    return error(StatusCode::invalid_argument, "{} must be 2-D with a last stride of 1, got rank {} and stride {}", what, v.rank,
                 v.stride(1));
  return {};
}

/// An output: rows may not overlap, they are written by different threads.
Status check_output(const TensorView& d) {
  NIBBLE_RETURN_IF_ERROR(check_matrix("D", d));
  if (d.dim(0) > 1 && d.stride(0) < d.dim(1))
    return error(StatusCode::invalid_argument, "the rows of D overlap: they are {} elements apart and {} long", d.stride(0),
                 d.dim(1));
  return {};
}

/// Why a plan does not take a weight whose rows lie in pairs, or do not.
std::string_view unpaired(bool weight_is_paired) {
  return weight_is_paired
             ? "the weight was packed for a glu, which this plan does not have: set EpilogueSpec::glu, or pack without it"
             : "the plan has a glu, and the weight was packed without: pack it for a specification with EpilogueSpec::glu";
}

/// The operands of an A that comes quantized.
Status check_act_args(const LinearSpec& spec, const PackedWeightData& weight, const Operands& args, std::int64_t m) {
  if (is_compute_float(spec.a_dtype)) return {};
  const ActScheme& act = spec.act_scheme;
  const bool per_tensor = act.group == GroupShape::tensor();
  if (args.a_scale.empty() && per_tensor && weight.static_acts) return {};
  const std::int64_t rows = per_tensor ? 1 : m, groups = act.group.cols(weight.k);
  const auto check_one = [&](std::string_view what, const ConstTensorView& v, DType type) {
    const bool shaped = act.group.k == 0 ? v.rank == 1 && (v.dim(0) == rows || v.dim(0) == 1)
                                         : v.rank == 2 && v.dim(0) == rows && v.dim(1) == groups;
    if (!v.empty() && v.dtype == type && shaped) return Status();
    return error(StatusCode::invalid_argument, "A comes quantized: {} must be {} [{}{}], got {} of rank {} and {} elements", what,
                 name(type), rows, act.group.k == 0 ? "" : fmt::format(",{}", groups), name(v.dtype), v.rank, v.numel());
  };
  if (args.a_scale.empty() && spec.epilogue.out == DType::s32)
    return act.zero == ZeroKind::none ? Status() : check_one("a_zero", args.a_zero, DType::s32);
  NIBBLE_RETURN_IF_ERROR(check_one("a_scale", args.a_scale, DType::f32));
  if (act.zero == ZeroKind::none) return {};
  return check_one("a_zero", args.a_zero, act.zero == ZeroKind::offset ? DType::f32 : DType::s32);
}

/// For a D of s32, which no scale is for, in host memory: a scale of 1 where the caller gives none.
void take_no_scale(const LinearSpec& spec, const PackedWeightData& weight, Operands& args) {
  static constexpr float kOne = 1.0f;
  const bool known = spec.act_scheme.group == GroupShape::tensor() && weight.static_acts;
  if (spec.epilogue.out == DType::s32 && args.a_scale.empty() && !known) args.a_scale = ConstTensorView(&kOne, DType::f32, {1});
}

/// The first zero point of a quantized A of codes of `type` in host memory that is not a code; nothing when all are.
std::optional<std::int32_t> far_zero(const ActScheme& act, DType type, const Operands& args) {
  if (act.zero != ZeroKind::integer || args.a_scale.empty()) return std::nullopt;
  const ConstTensorView& zeros = args.a_zero;
  const std::int64_t groups = zeros.rank == 1 ? 1 : zeros.dim(1), step = zeros.rank == 1 ? 0 : zeros.stride(1);
  for (std::int64_t m = 0; m < zeros.dim(0); ++m)
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int32_t zero = static_cast<const std::int32_t*>(zeros.data)[m * zeros.stride(0) + g * step];
      if (zero < code_shift(type) - 128 || zero > code_shift(type) + 127) return zero;
    }
  return std::nullopt;
}

}  // namespace

namespace {

Result<std::shared_ptr<const void>> configured(const Kernel* kernel, const Problem& problem) {
  if (kernel == nullptr || kernel->configure == nullptr) return std::shared_ptr<const void>();
  return kernel->configure(*kernel, problem);
}

/// Makes the plan of a problem: every plan is made here.
Result<std::shared_ptr<Plan::Impl>> decided(const PackedWeight& weight, Problem problem, std::int64_t m_max,
                                            std::string_view forced, bool allow_reference) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->layout = weight.data().layout;
  impl->problem = problem;
  impl->problem.layout = impl->layout->name;
  impl->problem.memory = weight.backend();
  impl->forced = forced;
  impl->allow_reference = allow_reference;
  NIBBLE_ASSIGN_OR_RETURN(impl->buckets, choose_buckets(impl->problem, m_max, forced, allow_reference));
  if (impl->problem.memory == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(impl->gpu, this_gpu());
    impl->problem.gpu = &impl->gpu;
  }
  for (const Bucket& bucket : impl->buckets) {
    Problem largest = impl->problem;
    largest.m = bucket.m_high;
    impl->workspace = std::max(impl->workspace, parts(bucket, largest).total());
    Plan::Impl::Configs& configs = impl->configs.emplace_back();
    if (bucket.finish != nullptr) largest = product_of(largest);
    NIBBLE_ASSIGN_OR_RETURN(configs.main, configured(bucket.main, largest));
    NIBBLE_ASSIGN_OR_RETURN(configs.unaligned, configured(bucket.unaligned, largest));
  }
  return impl;
}

/// Of a linear layer, or of a pointwise convolution as one.
Result<std::shared_ptr<Plan::Impl>> decided(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::linear));
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight.desc(), spec, machine_for(options)));
  NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(weight, problem, spec.m_max, forced, options.allow_reference));
  impl->linear = spec;
  return impl;
}

}  // namespace

Result<Plan> plan_experts(const PackedWeight& first, std::int64_t experts, const LinearSpec& spec, const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  if (first.paired() != pairs_rows(spec.epilogue, first.scheme()))
    return error(StatusCode::invalid_argument, "{}", unpaired(first.paired()));
  if (spec.act_scheme.codes != DType::none && spec.act_scheme.group == GroupShape::tensor())
    return error(
        StatusCode::unsupported,
        "grouped products of the GPU take activations quantized per token or group, not per tensor ({}), whose scale is another "
        "for each expert",
        Scheme{first.scheme(), spec.act_scheme}.name());
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::linear));
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(first.desc(), spec, machine_for(options)));
  problem.experts = experts;
  NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(first, problem, spec.m_max, forced, false));
  impl->linear = spec;
  return Plan(std::move(impl));
}

int expert_rows(const Plan& plan, std::int64_t m) { return plan.impl().bucket(plan.impl().served(m)).main->expert_rows; }

bool fetches_rows(const Plan& plan, std::int64_t m) {
  const Bucket& bucket = plan.impl().bucket(plan.impl().served(m));
  return (bucket.prepare != nullptr ? bucket.prepare : bucket.main)->fetches_rows;
}

bool sorts_rows(const Plan& plan, std::int64_t m) {
  return plan.impl().bucket(plan.impl().served(m)).prepare == nullptr && fetches_rows(plan, m);
}

Status run_experts(const Plan& plan, const PackedWeight& first, const cuda::ExpertTiles& experts, const ConstTensorView& a,
                   const TensorView& d, const Operands& operands, std::span<std::byte> workspace, Stream stream) {
  return plan.impl().run(first, {.a = a, .d = d, .operands = operands, .experts = &experts, .stream = stream}, workspace);
}

namespace {

bool joins(const Plan::Impl& first, const Bucket& of_first, const Plan::Impl& second, const Bucket& of_second) {
  const auto alone = [](const Bucket& b) { return b.first == nullptr && b.prepare == nullptr && b.finish == nullptr; };
  return of_first.main == of_second.main && of_first.main->joins != nullptr && alone(of_first) && alone(of_second) &&
         of_first.main->joins(first.problem, second.problem);
}

}  // namespace

bool joins(const Plan& first, const Plan& second, std::int64_t m) {
  const auto bucket = [m](const Plan& plan) -> const Bucket& { return plan.impl().bucket(plan.impl().served(m)); };
  return joins(first.impl(), bucket(first), second.impl(), bucket(second));
}

Status run_joined(const ExpertProduct& first, const ExpertProduct& second, std::span<std::byte> workspace, Stream stream) {
  const auto args = [stream](const ExpertProduct& of) {
    return StepArgs{.a = of.a, .d = of.d, .experts = &of.experts, .stream = stream};
  };
  NIBBLE_ASSIGN_OR_RETURN(StepArgs of_second, second.plan.impl().joined(second.weight, args(second)));
  of_second.scratch = workspace;
  StepArgs of_first = args(first);
  of_first.joined = &of_second;
  return first.plan.impl().run(first.weight, of_first, {});
}

Result<Plan> Plan::linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  if (weight.paired() != pairs_rows(spec.epilogue, weight.scheme()))
    return error(StatusCode::invalid_argument, "{}", unpaired(weight.paired()));
  NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(weight, spec, options));
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

Result<Plan> Plan::conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  if (weight.paired()) return error(StatusCode::invalid_argument, "{}", unpaired(true));
  NIBBLE_ASSIGN_OR_RETURN(Problem problem, problem_of(weight.desc(), spec, machine_for(options)));
  if (const auto linear = as_linear(spec); linear && !forces_conv(options.kernel)) {
    NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(weight, *linear, options));
    impl->conv = spec;
    return Plan(std::move(impl));
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::conv));
  NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(weight, problem, spec.batch_max, forced, options.allow_reference));
  impl->conv = spec;
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

Result<Plan> Plan::linear(const PackedWeight& weight, const PlanOptions& options) {
  if (const auto* spec = std::get_if<LinearSpec>(&weight.spec())) return linear(weight, *spec, options);
  return error(StatusCode::invalid_argument, "W[{},{}] was packed for a convolution; call Plan::conv(), or pass a LinearSpec",
               weight.n(), weight.k());
}

Result<Plan> Plan::conv(const PackedWeight& weight, const PlanOptions& options) {
  if (const auto* spec = std::get_if<ConvSpec>(&weight.spec())) return conv(weight, *spec, options);
  return error(StatusCode::invalid_argument, "W[{},{}] was packed for a linear layer; pass a ConvSpec here or to pack()",
               weight.n(), weight.k());
}

Result<Plan> Plan::dequantize(const PackedWeight& weight, const DequantizeSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  if (weight.paired())
    return error(
        StatusCode::invalid_argument,
        "the weight was packed for a glu, and its rows lie in pairs: unpack() it, and dequantize a weight that is packed "
        "without one");
  NIBBLE_ASSIGN_OR_RETURN(const Problem problem, problem_of(weight.desc(), spec, machine_for(options)));
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::dequantize));
  NIBBLE_ASSIGN_OR_RETURN(auto impl, decided(weight, problem, 1, forced, options.allow_reference));
  impl->dequantize = spec;
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

std::size_t Plan::workspace_bytes() const {
  return impl_->workspace == 0 ? 0 : impl_->workspace + alignment(impl_->problem.memory);
}

std::size_t Plan::workspace_bytes(std::int64_t m) const {
  Problem problem = impl_->problem;
  problem.m = impl_->served(m);
  const std::size_t bytes = parts(impl_->bucket(problem.m), problem).total();
  return bytes == 0 ? 0 : bytes + alignment(problem.memory);
}

std::string_view Plan::kernel(std::int64_t m) const { return impl_->bucket(impl_->served(m)).main->name; }

Explanation Plan::explain() const {
  Problem problem = impl_->problem;
  problem.gpu = nullptr;  // as the plan's choice asked: of a described GPU, kernels do not ask for the libraries that they load
  return explanation_of(impl_->buckets, problem, impl_->forced, impl_->allow_reference);
}

Status Plan::Impl::check_weight(const PackedWeight& weight) const {
  const PackedWeightData& w = weight.data();
  const Problem& p = problem;
  if (conv && w.filter != conv->geometry.filter)
    return error(StatusCode::invalid_argument, "the plan is for a filter of {}x{}, the weight has one of {}x{}",
                 conv->geometry.filter.h, conv->geometry.filter.w, w.filter.h, w.filter.w);
  if (w.layout != layout || w.scheme != p.scheme || w.n != p.n || w.k != p.k ||
      (p.op != Op::dequantize && (p.permutes_k == w.perm.empty() || p.prescales_k == w.prescale.empty())))
    return error(StatusCode::invalid_argument, "the plan is for W[{},{}] {} packed as {}, the weight is W[{},{}] {} packed as {}",
                 p.n, p.k, p.scheme.name(), layout->name, w.n, w.k, w.scheme.name(), w.layout->name);
  if (w.zero_type != p.zero_type)  // sums that fit 32 bits with those of one type may not with those of another
    return error(StatusCode::invalid_argument, "the plan is for zero points of {}, the weight has those of {}", name(p.zero_type),
                 name(w.zero_type));
  if (w.paired != pairs_rows(linear.epilogue, w.scheme))  // only a linear plan has a glu
    return error(StatusCode::invalid_argument, "{}", unpaired(w.paired));
  if (w.backend() != p.memory)
    return error(StatusCode::invalid_argument, "the plan is for a weight in {} memory, this one is in {} memory",
                 p.memory == Backend::cuda ? "device" : "host", p.memory == Backend::cuda ? "host" : "device");
  return {};
}

/// Checks the weight, where its product runs, and the device.
Status Plan::Impl::take_weight(const PackedWeight& weight, StepArgs& args) const {
  const bool on_gpu = problem.memory == Backend::cuda;
  if (on_gpu && args.executor != nullptr)
    return error(StatusCode::invalid_argument, "the weight is in device memory: pass a nibble::Stream to run(), not an executor");
  if (!on_gpu && args.executor == nullptr)
    return error(StatusCode::invalid_argument, "the weight is in host memory: run() takes no stream for it; see upload()");
  NIBBLE_RETURN_IF_ERROR(check_weight(weight));
  if (on_gpu) {
    NIBBLE_ASSIGN_OR_RETURN(const int device, cuda::current_device());
    if (device != problem.gpu->ordinal)
      return error(StatusCode::invalid_argument, "the plan is for GPU {}, the current one is {}; make a plan on each GPU",
                   problem.gpu->ordinal, device);
  }
  if (on_gpu && args.operands.next != nullptr && args.operands.next->backend() != Backend::cuda)
    return error(StatusCode::invalid_argument,
                 "the next weight is in host memory, this one in device memory: upload() it, or leave Operands::next out");
  args.weight = &weight.data();
  return {};
}

Result<StepArgs> Plan::Impl::joined(const PackedWeight& weight, StepArgs args) const {
  NIBBLE_RETURN_IF_ERROR(take_weight(weight, args));
  NIBBLE_RETURN_IF_ERROR(take_operands(args));
  args.config = configs[static_cast<std::size_t>(&bucket(args.a.dim(0)) - buckets.data())].main.get();
  return args;
}

Status Plan::Impl::run(const PackedWeight& weight, StepArgs args, std::span<std::byte> workspace_memory) const {
  NIBBLE_RETURN_IF_ERROR(take_weight(weight, args));
  if (conv) return run_conv(args, workspace_memory);
  return problem.op == Op::linear ? run_linear(args, workspace_memory) : run_dequantize(args, workspace_memory);
}

/// Gives the steps their parts of the workspace and runs them.
Status Plan::Impl::run_steps(const Bucket& bucket, std::int64_t m, StepArgs args, std::span<std::byte> workspace_memory) const {
  Problem now = problem;
  now.m = m;
  const Parts needed = parts(bucket, now);
  if (needed.total() != 0) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace_memory.data());
    const std::size_t skip = round_up(address, alignment(problem.memory)) - address;
    if (workspace_memory.size() < skip + needed.total())
      return error(StatusCode::invalid_argument, "the workspace has {} bytes, this run needs {}; see workspace_bytes()",
                   workspace_memory.size(), skip + needed.total());
    workspace_memory = workspace_memory.subspan(skip, needed.total());
    args.scratch = workspace_memory.subspan(needed.first + needed.prepared + needed.sums);
  }
  if (bucket.first != nullptr) {
    args.prepared = workspace_memory.data();
    NIBBLE_RETURN_IF_ERROR(bucket.first->run(*bucket.first, args));
    args = problem.u8_codes ? recoded(args) : normalized(args);
  }
  const Kernel* const prepare = bucket.reads(args) ? bucket.prepare : bucket.unaligned_prepare;
  if (prepare == nullptr) {
    args.prepared = static_cast<std::byte*>(const_cast<void*>(args.a.data));  // only read: A is its own prepared form
  } else {
    args.prepared = workspace_memory.subspan(needed.first).data();
    args.prepare_tile = bucket.main->tile.m;
    NIBBLE_RETURN_IF_ERROR(prepare->run(*prepare, args));
  }
  if (bucket.finish == nullptr) return run_main(bucket, args);
  std::byte* const sums = workspace_memory.subspan(needed.first + needed.prepared).data();
  const Problem multiplied = product_of(now);
  StepArgs product = args;
  product.epilogue = &multiplied.epilogue;
  product.d = sums_view(now, sums);
  NIBBLE_RETURN_IF_ERROR(run_main(bucket, product));
  args.a = product.d;
  return bucket.finish->run(*bucket.finish, args);
}

/// The product, by the kernel that reads A where it lies.
Status Plan::Impl::run_main(const Bucket& bucket, StepArgs args) const {
  const Configs& config = configs[static_cast<std::size_t>(&bucket - buckets.data())];
  if (!bucket.reads(args)) {
    if (bucket.unaligned == nullptr || args.experts != nullptr)
      return error(
          StatusCode::unsupported,
          "{} reads rows of A that begin at multiples of 16 bytes, and no other kernel takes this layer: A is at {}, its "
          "rows are {} elements of {} apart; copy it to aligned rows",
          bucket.main->name, args.a.data, args.a.stride(0), name(args.a.dtype));
    args.config = config.unaligned.get();
    return bucket.unaligned->run(*bucket.unaligned, args);
  }
  args.config = config.main.get();
  return bucket.main->run(*bucket.main, args);
}

/// The packed weight's bias, where the epilogue needs one and none was given.
void Plan::Impl::take_own_bias(StepArgs& args) const {
  const PackedWeightData& packed = *args.weight;
  if (!args.epilogue->bias || !args.operands.bias.empty() || packed.bias.empty()) return;
  const std::byte* bias = problem.memory == Backend::cuda ? packed.device.bias.data() : packed.bias.bytes.data();
  args.operands.bias = ConstTensorView(bias, packed.bias.dtype, {packed.n});
}

/// Checks A, D and the operands, and adds what the specification says.
Status Plan::Impl::take_operands(StepArgs& args) const {
  const ConstTensorView& a = args.a;
  const TensorView& d = args.d;
  NIBBLE_RETURN_IF_ERROR(check_matrix("A", a));
  NIBBLE_RETURN_IF_ERROR(check_output(d));
  const std::int64_t m = a.dim(0), n = linear.epilogue.columns(problem.n), k = problem.k;
  if (a.dtype != linear.a_dtype || a.dim(1) != k || m < 1 || m > linear.m_max)
    return error(StatusCode::invalid_argument, "A is {} [{},{}], the plan takes {} [1…{},{}]", name(a.dtype), m, a.dim(1),
                 name(linear.a_dtype), linear.m_max, k);
  if (d.dtype != linear.epilogue.out || d.dim(0) != m || d.dim(1) != n)
    return error(StatusCode::invalid_argument, "D is {} [{},{}], the plan writes {} [{},{}]", name(d.dtype), d.dim(0), d.dim(1),
                 name(linear.epilogue.out), m, n);
  args.epilogue = &linear.epilogue;
  args.act_scheme = linear.act_scheme;
  args.norm = linear.norm;
  args.accumulation = linear.accumulation;
  take_own_bias(args);
  NIBBLE_RETURN_IF_ERROR(epilogue::check_args(linear.epilogue, args.operands, d));
  NIBBLE_RETURN_IF_ERROR(check_act_args(linear, *args.weight, args.operands, m));
  NIBBLE_RETURN_IF_ERROR(check_norm_args(linear.norm, args.operands, a));
  if (problem.memory != Backend::cuda && !is_compute_float(linear.a_dtype)) {
    take_no_scale(linear, *args.weight, args.operands);
    args.far_zeros = far_zero(linear.act_scheme, linear.a_dtype, args.operands).has_value();
  }
  return {};
}

Status Plan::Impl::run_linear(StepArgs args, std::span<std::byte> workspace_memory) const {
  NIBBLE_RETURN_IF_ERROR(take_operands(args));
  const std::int64_t m = args.a.dim(0);
  return run_steps(bucket(m), m, args, workspace_memory);
}

Status Plan::Impl::run_conv(StepArgs args, std::span<std::byte> workspace_memory) const {
  const ConvGeometry& geometry = conv->geometry;
  const std::int64_t batch = args.a.dim(0), height = geometry.out_height(), width = geometry.out_width();
  if (batch < 1 || batch > conv->batch_max)
    return error(StatusCode::invalid_argument, "A holds {} images, the plan takes 1…{}", batch, conv->batch_max);
  if (args.a.dtype != conv->a_dtype || args.d.dtype != conv->epilogue.out)
    return error(StatusCode::invalid_argument, "A is {} and D is {}, the plan takes {} and writes {}", name(args.a.dtype),
                 name(args.d.dtype), name(conv->a_dtype), name(conv->epilogue.out));
  NIBBLE_ASSIGN_OR_RETURN(const Image a,
                          image_of("A", args.a, conv->input, batch, geometry.in_channels, geometry.height, geometry.width));
  NIBBLE_ASSIGN_OR_RETURN(const Image d, image_of("D", args.d, conv->output, batch, geometry.out_channels, height, width));
  std::array<Image, 2> addends;  // gate, residual
  const std::array<std::string_view, 2> names{"gate", "residual"};
  const std::array<ConstTensorView*, 2> views{&args.operands.gate, &args.operands.residual};
  for (std::size_t i = 0; i < 2; ++i) {
    if (!(i == 0 ? conv->epilogue.gate : conv->epilogue.residual)) continue;
    if (!is_compute_float(views[i]->dtype))
      return error(StatusCode::invalid_argument, "{} is {}, expected f32, f16 or bf16", names[i], name(views[i]->dtype));
    NIBBLE_ASSIGN_OR_RETURN(addends[i], image_of(names[i], *views[i], conv->output, batch, geometry.out_channels, height, width));
  }
  if (problem.op == Op::linear) {
    const std::int64_t tokens = batch * height * width;
    args.a = a.matrix(0, 0, 0, tokens, geometry.in_channels);
    args.d = d.matrix(0, 0, 0, tokens, geometry.out_channels);
    for (std::size_t i = 0; i < 2; ++i)
      if (addends[i].data != nullptr) *views[i] = addends[i].matrix(0, 0, 0, tokens, geometry.out_channels);
    return run_linear(args, workspace_memory);
  }
  args.conv = &*conv;
  args.epilogue = &conv->epilogue;
  args.act_scheme = conv->act_scheme;
  args.accumulation = conv->accumulation;
  take_own_bias(args);
  EpilogueSpec vectors = conv->epilogue;
  vectors.gate = vectors.residual = false;
  NIBBLE_RETURN_IF_ERROR(epilogue::check_args(vectors, args.operands, args.d));
  const LinearSpec acts{.a_dtype = conv->a_dtype, .epilogue = conv->epilogue, .act_scheme = conv->act_scheme};
  NIBBLE_RETURN_IF_ERROR(check_act_args(acts, *args.weight, args.operands, 1));
  if (problem.memory != Backend::cuda && !is_compute_float(conv->a_dtype)) {
    take_no_scale(acts, *args.weight, args.operands);
    if (const auto zero = far_zero(conv->act_scheme, conv->a_dtype, args.operands)) {
      if (geometry.padding != Padding{})
        return error(StatusCode::invalid_argument,
                     "a_zero={} is outside [{}, {}]: padding would be filled with that code; convolve without padding, or "
                     "quantize with a range that holds 0",
                     *zero, code_shift(conv->a_dtype) - 128, code_shift(conv->a_dtype) + 127);
      args.far_zeros = true;
    }
  }
  return run_steps(bucket(batch), batch, args, workspace_memory);
}

Status Plan::Impl::run_dequantize(StepArgs args, std::span<std::byte> workspace_memory) const {
  const TensorView& d = args.d;
  NIBBLE_RETURN_IF_ERROR(check_output(d));
  const std::int64_t rows = dequantize.transposed ? problem.k : problem.n;
  const std::int64_t cols = dequantize.transposed ? problem.n : problem.k;
  if (d.dtype != dequantize.out || d.dim(0) != rows || d.dim(1) != cols)
    return error(StatusCode::invalid_argument, "D is {} [{},{}], the plan writes {} [{},{}]", name(d.dtype), d.dim(0), d.dim(1),
                 name(dequantize.out), rows, cols);
  args.transposed = dequantize.transposed;
  return run_steps(buckets.front(), 1, args, workspace_memory);
}

Status Plan::run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
                 std::span<std::byte> workspace, Executor* executor) const try {
  Executor& on = executor != nullptr ? *executor : default_executor();
  return impl_->run(weight, {.a = a, .d = d, .operands = epilogue, .executor = &on}, workspace);
} catch (...) {
  return caught();
}

Status Plan::run(const PackedWeight& weight, const ConstTensorView& a, const TensorView& d, const Operands& epilogue,
                 std::span<std::byte> workspace, Stream stream) const try {
  return impl_->run(weight, {.a = a, .d = d, .operands = epilogue, .stream = stream}, workspace);
} catch (...) {
  return caught();
}

}  // namespace nibble
