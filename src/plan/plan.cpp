// Plans: deciding once, running often.
#include "nibble/plan.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/environment.hpp"
#include "core/sizes.hpp"
#include "epilogue/epilogue.hpp"
#include "kernels/image.hpp"
#include "kernels/kernel.hpp"
#include "plan/choose.hpp"

namespace nibble {
namespace {

/// What to do for M in [m_low, m_high].
struct Bucket {
  std::int64_t m_low = 1, m_high = 1;
  const Kernel* prepare = nullptr;  // first step, when there is one
  const Kernel* main = nullptr;
  double cost_us = 0;
  std::vector<Explanation::Candidate> candidates;
};

/// Where the parts of a workspace begin: on the CPU at a cache line, on the GPU where cudaMalloc would begin them.
std::size_t alignment(Backend memory) { return memory == Backend::cuda ? 256 : Buffer::kAlignment; }

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// The workspace of a run: what prepare writes, then the scratch of the main kernel.
struct Parts {
  std::size_t prepared = 0, scratch = 0;  // bytes; `prepared` is rounded up to where the scratch begins
  std::size_t total() const { return prepared + scratch; }
};

/// The question about the step before a kernel that reads activations in `form`.
Problem preparing(Problem problem, ActForm form) {
  problem.op = Op::prepare;
  problem.form = form;
  problem.layout = {};
  return problem;
}

std::size_t workspace_of(const Kernel& kernel, const Problem& problem) {
  return kernel.workspace == nullptr ? 0 : kernel.workspace(kernel, problem);
}

/// What the steps ask for at problem.m. Arithmetic: cheap enough for every run.
Parts parts(const Bucket& bucket, const Problem& problem) {
  Parts parts{.scratch = workspace_of(*bucket.main, problem)};
  if (bucket.prepare != nullptr)
    parts.prepared = round_up(workspace_of(*bucket.prepare, preparing(problem, bucket.main->form)), alignment(problem.memory));
  return parts;
}

}  // namespace

struct Plan::Impl {
  const Layout* layout = nullptr;
  Problem problem;  // but for its m. problem.memory is where the weight is, and with it all that run() gets
  LinearSpec linear;
  DequantizeSpec dequantize;
  std::optional<ConvSpec> conv;  // also of a pointwise one, whose problem is the linear layer `linear`
  std::vector<Bucket> buckets;
  std::size_t workspace = 0;  // of the hungriest M

  const Bucket& bucket(std::int64_t m) const {
    return *std::ranges::find_if(buckets, [m](const Bucket& b) { return m <= b.m_high; });
  }

  /// Decides for every m up to m_max.
  Status choose(std::int64_t m_max, std::string_view forced, bool allow_reference);

  /// `args` holds the caller's a, d, operands, and the executor or the stream; this checks and completes it.
  Status run(const PackedWeight& weight, StepArgs args, std::span<std::byte> workspace_memory) const;

 private:
  Status check_weight(const PackedWeight& weight) const;
  void take_own_bias(StepArgs& args) const;
  Status run_linear(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_conv(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_dequantize(StepArgs args, std::span<std::byte> workspace_memory) const;
  Status run_steps(const Bucket& bucket, std::int64_t m, StepArgs args, std::span<std::byte> workspace_memory) const;
};

namespace {

/// Chooses for one M; an error lists every refusal, or that of the forced kernel.
Result<Bucket> choose_bucket(const Problem& problem, std::string_view forced, bool allow_reference) {
  Choice choice = choose_kernel(problem, forced, allow_reference);
  if (choice.kernel == nullptr && !forced.empty()) return forced_refusal(problem, choice, forced);
  if (choice.kernel == nullptr)
    return error(StatusCode::unsupported, "no kernel takes {} {} M={} N={} K={} {}: {}", name(problem.op), problem.scheme.name(),
                 problem.m, problem.n, problem.k, problem.epilogue.name(), refusals(choice));
  Bucket bucket{.m_low = problem.m,
                .m_high = problem.m,
                .main = choice.kernel,
                .cost_us = choice.cost_us,
                .candidates = std::move(choice.candidates)};
  if (problem.op == Op::linear && needs_prepare(choice.kernel->form, problem)) {
    const Choice first = choose_kernel(preparing(problem, choice.kernel->form), {}, true);
    if (first.kernel == nullptr)
      return error(StatusCode::unsupported, "nothing prepares the {} activations of {}: {}", choice.kernel->act,
                   choice.kernel->name, refusals(first));
    bucket.prepare = first.kernel;
    bucket.cost_us += first.cost_us;
  }
  return bucket;
}

Roofline machine_for(const PlanOptions& options) {
  if (options.machine) return *options.machine;
  return assumed_roofline(options.threads > 0 ? options.threads : default_executor().threads());
}

/// What every plan is asked before anything else.
Status check_options(const PlanOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  const int threads = options.machine ? options.machine->threads : options.threads;
  if (threads < 0 || threads > kMaxThreads)
    return error(StatusCode::invalid_argument, "a plan for {} threads; {} at most", threads, kMaxThreads);
  if (!options.machine) return {};
  for (const Ceiling ceiling : kAllCeilings)
    if (const double rate = (*options.machine)[ceiling]; !std::isfinite(rate) || rate < 0)
      return error(StatusCode::invalid_argument, "the machine's {} is {}; measure_roofline() gives finite numbers", name(ceiling),
                   rate);
  if (threads > 0 && options.machine->read_gbytes_per_s > 0 && options.machine->f32_gflops > 0) return {};
  return error(StatusCode::invalid_argument, "the machine was not measured: {} threads, {} GB/s, {} GFLOP/s", threads,
               options.machine->read_gbytes_per_s, options.machine->f32_gflops);
}

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

/// Which ways of quantizing activations there are.
Status check_quantize(const LinearSpec& spec, const PackedWeightData& weight) {
  const ActScheme& act = spec.act_scheme;
  if (!is_compute_float(spec.a_dtype) && spec.a_dtype != act.codes)
    return error(StatusCode::unsupported,
                 "activations of type {}: neither f32, f16, bf16 nor codes, which LinearSpec::quantize names",
                 name(spec.a_dtype));
  if (act.codes == DType::none) return {};
  if (act.codes != DType::s8 && act.codes != DType::e4m3)
    return error(StatusCode::unsupported, "activations cannot be quantized to {}; use s8 or e4m3", name(act.codes));
  if (act.zero != ZeroKind::none && (act.zero != ZeroKind::integer || act.codes != DType::s8))
    return error(StatusCode::unsupported, "activations of type {} have no zero points; s8 has integers", name(act.codes));
  if (act.group.n > 1) return error(StatusCode::unsupported, "a scale of activations is not shared by {} tokens", act.group.n);
  if (act.group == GroupShape::tensor() && is_compute_float(spec.a_dtype) && !weight.static_acts)
    return error(StatusCode::unsupported,
                 "a scale per tensor for activations has to be known beforehand, and the weight has no static_acts; use one per "
                 "token or block");
  if (act.group == GroupShape::tensor() && act.zero == ZeroKind::none && weight.static_acts && weight.static_acts->zero != 0)
    return error(StatusCode::unsupported, "the weight's static_acts have the zero point {}; quantize with ZeroKind::integer",
                 weight.static_acts->zero);
  if (!is_compute_float(spec.a_dtype) && !weight.prescale.empty())
    return error(StatusCode::unsupported,
                 "A comes quantized, but the weight has a prescale, which activations are multiplied by first");
  const std::int64_t group = weight.scheme.group.k, block = act.group.k;
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0)
    return error(StatusCode::unsupported, "activations in blocks of {} do not line up with the weight's groups of {}", block,
                 group);
  return {};
}

/// The operands of an A that comes quantized.
Status check_act_args(const LinearSpec& spec, const PackedWeightData& weight, const Operands& args, std::int64_t m) {
  if (is_compute_float(spec.a_dtype)) return {};
  const ActScheme& act = spec.act_scheme;
  const bool per_tensor = act.group == GroupShape::tensor();
  if (args.a_scale.empty() && per_tensor && weight.static_acts) return {};
  const std::int64_t rows = per_tensor ? 1 : m, groups = act.group.cols(weight.k);
  const auto check_one = [&](std::string_view what, const ConstTensorView& v, DType type) {
    const bool shaped =
        act.group.k == 0 ? v.rank == 1 && v.dim(0) == rows : v.rank == 2 && v.dim(0) == rows && v.dim(1) == groups;
    if (!v.empty() && v.dtype == type && shaped) return Status();
    return error(StatusCode::invalid_argument, "A comes quantized: {} must be {} [{}{}], got {} of rank {} and {} elements", what,
                 name(type), rows, act.group.k == 0 ? "" : fmt::format(",{}", groups), name(v.dtype), v.rank, v.numel());
  };
  NIBBLE_RETURN_IF_ERROR(check_one("a_scale", args.a_scale, DType::f32));
  return act.zero == ZeroKind::none ? Status() : check_one("a_zero", args.a_zero, DType::s32);
}

/// The first zero point of an A that comes quantized, in host memory, that is no code; nothing: there is none.
std::optional<std::int32_t> far_zero(const ActScheme& act, const Operands& args) {
  if (act.zero == ZeroKind::none || args.a_scale.empty()) return std::nullopt;
  const ConstTensorView& zeros = args.a_zero;
  const std::int64_t groups = zeros.rank == 1 ? 1 : zeros.dim(1), step = zeros.rank == 1 ? 0 : zeros.stride(1);
  for (std::int64_t m = 0; m < zeros.dim(0); ++m)
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int32_t zero = static_cast<const std::int32_t*>(zeros.data)[m * zeros.stride(0) + g * step];
      if (zero < -128 || zero > 127) return zero;
    }
  return std::nullopt;
}

/// What a convolution asks for beyond a linear layer.
Status check_conv(const ConvSpec& spec, const PackedWeightData& weight) {
  const ConvGeometry& geometry = spec.geometry;
  NIBBLE_RETURN_IF_ERROR(check_batch(geometry, spec.batch_max));
  if (weight.n != geometry.out_channels || weight.k != geometry.k() || weight.filter != geometry.filter)
    return error(
        StatusCode::invalid_argument,
        "the convolution has {} output channels and a kernel of {}x{} elements of {} channels, the weight is W[{},{}] of a "
        "{}x{} kernel",
        geometry.out_channels, geometry.filter.h, geometry.filter.w, geometry.group_inputs(), weight.n, weight.k, weight.filter.h,
        weight.filter.w);
  NIBBLE_RETURN_IF_ERROR(spec.epilogue.validate());
  if (spec.epilogue.row_scale)
    return error(StatusCode::unsupported,
                 "a convolution has no row_scale: a scale per pixel is the work of whoever makes the next layer");
  NIBBLE_RETURN_IF_ERROR(check_quantize({.a_dtype = spec.a_dtype, .act_scheme = spec.act_scheme}, weight));
  if (!weight.perm.empty() || !weight.prescale.empty())
    return error(StatusCode::unsupported, "a convolution's weight has no {}", weight.perm.empty() ? "prescale" : "act-order");
  if (!is_compute_float(spec.a_dtype) && spec.act_scheme.group != GroupShape::tensor())
    return error(StatusCode::unsupported, "images that come quantized have one scale per tensor; leave other scales to run()");
  const std::int64_t block = spec.act_scheme.group.k;
  if (block != 0 && geometry.group_inputs() % block != 0)
    return error(StatusCode::unsupported, "activations in blocks of {} channels do not divide the {} of a pixel and group", block,
                 geometry.group_inputs());
  return {};
}

}  // namespace

/// Buckets end at powers of two; neighbours that decide alike are one.
Status Plan::Impl::choose(std::int64_t m_max, std::string_view forced, bool allow_reference) {
  Problem at = problem;
  for (std::int64_t low = 1; low <= m_max;) {
    const std::int64_t high = low == 1 ? 1 : std::min(m_max, (low - 1) * 2);
    at.m = high;
    NIBBLE_ASSIGN_OR_RETURN(Bucket bucket, choose_bucket(at, forced, allow_reference));
    bucket.m_low = low;
    if (!buckets.empty() && buckets.back().main == bucket.main && buckets.back().prepare == bucket.prepare) {
      bucket.m_low = buckets.back().m_low;
      buckets.back() = std::move(bucket);
    } else {
      buckets.push_back(std::move(bucket));
    }
    workspace = std::max(workspace, parts(buckets.back(), at).total());
    low = high + 1;
  }
  return {};
}

namespace {

/// What every operation with a weight tells the kernels.
template <typename Spec>
Problem problem_of(Op op, const PackedWeightData& packed, const Spec& spec, const PlanOptions& options) {
  return {.op = op,
          .n = packed.n,
          .k = packed.k,
          .scheme = packed.scheme,
          .zero_type = packed.zero_type,
          .layout = packed.layout->name,
          .memory = packed.backend(),
          .a_dtype = spec.a_dtype,
          .epilogue = spec.epilogue,
          .act_scheme = spec.act_scheme,
          .accumulation = spec.accumulation,
          .permutes_k = !packed.perm.empty(),
          .prescales_k = !packed.prescale.empty(),
          .machine = machine_for(options)};
}

}  // namespace

Result<Plan> Plan::linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_RETURN_IF_ERROR(check_quantize(spec, weight.data()));
  NIBBLE_RETURN_IF_ERROR(check_product(spec.m_max, weight.n(), weight.k()));
  NIBBLE_RETURN_IF_ERROR(spec.epilogue.validate());
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::linear));

  auto impl = std::make_shared<Impl>();
  const PackedWeightData& packed = weight.data();
  impl->layout = packed.layout;
  impl->linear = spec;
  impl->problem = problem_of(Op::linear, packed, spec, options);
  NIBBLE_RETURN_IF_ERROR(impl->choose(spec.m_max, forced, options.allow_reference));
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

Result<Plan> Plan::conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  NIBBLE_RETURN_IF_ERROR(check_conv(spec, weight.data()));
  const ConvGeometry& geometry = spec.geometry;
  const bool flat =
      (spec.input == ImageLayout::nhwc && spec.output == ImageLayout::nhwc) || geometry.height * geometry.width == 1;
  std::string_view forced;
  if (const auto of_conv = forced_kernel(options.kernel, Op::conv); of_conv.ok()) forced = *of_conv;
  if (geometry.pointwise() && flat && forced.empty()) {
    const LinearSpec linear{.a_dtype = spec.a_dtype,
                            .m_max = spec.batch_max * geometry.height * geometry.width,
                            .epilogue = spec.epilogue,
                            .act_scheme = spec.act_scheme,
                            .accumulation = spec.accumulation};
    NIBBLE_ASSIGN_OR_RETURN(const Plan plan, Plan::linear(weight, linear, options));
    auto impl = std::make_shared<Impl>(*plan.impl_);
    impl->conv = spec;
    return Plan(std::move(impl));
  }
  NIBBLE_ASSIGN_OR_RETURN(forced, forced_kernel(options.kernel, Op::conv));
  auto impl = std::make_shared<Impl>();
  const PackedWeightData& packed = weight.data();
  impl->layout = packed.layout;
  impl->conv = spec;
  impl->problem = problem_of(Op::conv, packed, spec, options);
  impl->problem.geometry = geometry;
  impl->problem.input = spec.input;
  impl->problem.output = spec.output;
  NIBBLE_RETURN_IF_ERROR(impl->choose(spec.batch_max, forced, options.allow_reference));
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

Result<Plan> Plan::dequantize(const PackedWeight& weight, const DequantizeSpec& spec, const PlanOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_options(options));
  if (!is_compute_float(spec.out))
    return error(StatusCode::unsupported, "cannot dequantize to {}; use f32, f16 or bf16", name(spec.out));
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, Op::dequantize));
  auto impl = std::make_shared<Impl>();
  const PackedWeightData& packed = weight.data();
  impl->layout = packed.layout;
  impl->dequantize = spec;
  impl->problem = {.op = Op::dequantize,
                   .n = packed.n,
                   .k = packed.k,
                   .scheme = packed.scheme,
                   .zero_type = packed.zero_type,
                   .layout = packed.layout->name,
                   .memory = packed.backend(),
                   .epilogue = {.out = spec.out},
                   .machine = machine_for(options)};
  NIBBLE_ASSIGN_OR_RETURN(Bucket bucket, choose_bucket(impl->problem, forced, options.allow_reference));
  impl->workspace = parts(bucket, impl->problem).total();
  impl->buckets.push_back(std::move(bucket));
  return Plan(std::move(impl));
} catch (...) {
  return caught();
}

std::size_t Plan::workspace_bytes() const {
  return impl_->workspace == 0 ? 0 : impl_->workspace + alignment(impl_->problem.memory);
}

std::string_view Plan::kernel(std::int64_t m) const {
  if (impl_->conv && impl_->problem.op == Op::linear)  // its buckets count pixels
    m = std::clamp<std::int64_t>(m, 1, impl_->conv->batch_max) * impl_->conv->geometry.height * impl_->conv->geometry.width;
  return impl_->bucket(std::clamp<std::int64_t>(m, 1, impl_->buckets.back().m_high)).main->name;
}

Explanation Plan::explain() const {
  Explanation explanation;
  for (const Bucket& b : impl_->buckets) {
    Explanation::Bucket out{.m_low = b.m_low, .m_high = b.m_high, .cost_us = b.cost_us, .candidates = b.candidates};
    if (b.prepare != nullptr) out.steps.push_back(b.prepare->name);
    out.steps.push_back(b.main->name);
    explanation.buckets.push_back(std::move(out));
  }
  return explanation;
}

Status Plan::Impl::check_weight(const PackedWeight& weight) const {
  const PackedWeightData& w = weight.data();
  const Problem& p = problem;
  if (conv && w.filter != conv->geometry.filter)
    return error(StatusCode::invalid_argument, "the plan is for a kernel of {}x{} elements, the weight is of one of {}x{}",
                 conv->geometry.filter.h, conv->geometry.filter.w, w.filter.h, w.filter.w);
  if (w.layout != layout || w.scheme != p.scheme || w.n != p.n || w.k != p.k ||
      (p.op == Op::linear && (p.permutes_k == w.perm.empty() || p.prescales_k == w.prescale.empty())))
    return error(StatusCode::invalid_argument, "the plan is for W[{},{}] {} packed as {}, the weight is W[{},{}] {} packed as {}",
                 p.n, p.k, p.scheme.name(), layout->name, w.n, w.k, w.scheme.name(), w.layout->name);
  if (w.backend() != p.memory)
    return error(StatusCode::invalid_argument, "the plan is for a weight in {} memory, this one is in {} memory",
                 p.memory == Backend::cuda ? "device" : "host", p.memory == Backend::cuda ? "host" : "device");
  return {};
}

Status Plan::Impl::run(const PackedWeight& weight, StepArgs args, std::span<std::byte> workspace_memory) const {
  const bool on_gpu = problem.memory == Backend::cuda;
  if (on_gpu && args.executor != nullptr)
    return error(StatusCode::invalid_argument, "the weight is in device memory: pass a nibble::Stream to run(), not an executor");
  if (!on_gpu && args.executor == nullptr)
    return error(StatusCode::invalid_argument, "the weight is in host memory: run() takes no stream for it; see upload()");
  NIBBLE_RETURN_IF_ERROR(check_weight(weight));
  args.weight = &weight.data();
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
    args.scratch = workspace_memory.subspan(skip + needed.prepared, needed.scratch);
    workspace_memory = workspace_memory.subspan(skip, needed.prepared);
  }
  if (bucket.prepare == nullptr) {
    args.prepared = static_cast<std::byte*>(const_cast<void*>(args.a.data));  // read only: A is its own prepared form
  } else {
    args.prepared = workspace_memory.data();
    args.prepare_tile = bucket.main->tile.m;
    NIBBLE_RETURN_IF_ERROR(bucket.prepare->run(*bucket.prepare, args));
  }
  return bucket.main->run(*bucket.main, args);
}

/// The packed weight's bias, where the epilogue needs one and none was given.
void Plan::Impl::take_own_bias(StepArgs& args) const {
  const PackedWeightData& packed = *args.weight;
  if (!problem.epilogue.bias || !args.operands.bias.empty() || packed.bias.empty()) return;
  const std::byte* bias = problem.memory == Backend::cuda ? packed.device.bias.data() : packed.bias.bytes.data();
  args.operands.bias = ConstTensorView(bias, packed.bias.dtype, {packed.n});
}

Status Plan::Impl::run_linear(StepArgs args, std::span<std::byte> workspace_memory) const {
  const ConstTensorView& a = args.a;
  const TensorView& d = args.d;
  NIBBLE_RETURN_IF_ERROR(check_matrix("A", a));
  NIBBLE_RETURN_IF_ERROR(check_output(d));
  const std::int64_t m = a.dim(0), n = problem.n, k = problem.k;
  if (a.dtype != linear.a_dtype || a.dim(1) != k || m < 1 || m > linear.m_max)
    return error(StatusCode::invalid_argument, "A is {} [{},{}], the plan takes {} [1…{},{}]", name(a.dtype), m, a.dim(1),
                 name(linear.a_dtype), linear.m_max, k);
  if (d.dtype != linear.epilogue.out || d.dim(0) != m || d.dim(1) != n)
    return error(StatusCode::invalid_argument, "D is {} [{},{}], the plan writes {} [{},{}]", name(d.dtype), d.dim(0), d.dim(1),
                 name(linear.epilogue.out), m, n);
  args.epilogue = &linear.epilogue;
  args.act_scheme = linear.act_scheme;
  args.accumulation = linear.accumulation;
  take_own_bias(args);
  NIBBLE_RETURN_IF_ERROR(epilogue::check_args(linear.epilogue, args.operands, d));
  NIBBLE_RETURN_IF_ERROR(check_act_args(linear, *args.weight, args.operands, m));
  if (problem.memory != Backend::cuda && !is_compute_float(linear.a_dtype))
    args.far_zeros = far_zero(linear.act_scheme, args.operands).has_value();
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
  NIBBLE_RETURN_IF_ERROR(
      check_act_args({.a_dtype = conv->a_dtype, .act_scheme = conv->act_scheme}, *args.weight, args.operands, 1));
  if (problem.memory != Backend::cuda && !is_compute_float(conv->a_dtype))
    if (const auto zero = far_zero(conv->act_scheme, args.operands)) {
      if (geometry.padding != Padding{})
        return error(StatusCode::invalid_argument,
                     "a_zero={} is outside [-128, 127]: padding would be filled with that code; convolve without padding, or "
                     "quantize with a range that holds 0",
                     *zero);
      args.far_zeros = true;
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
