#include "plan/choose.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "core/printable.hpp"
#include "core/sizes.hpp"
#include "kernels/finish.hpp"
#include "kernels/norm.hpp"
#include "kernels/recode.hpp"
#include "nibble/cuda.hpp"
#include "plan/check.hpp"

namespace nibble {

namespace {

/// The fewest rows, of a mean expert, for which a kernel is considered. Of experts half as many are enough: kernels leave out the empty parts of
/// their tiles, or wait for memory meanwhile.
std::int64_t least_rows(const Kernel& kernel, const Problem& problem) {
  return problem.experts == 0 ? kernel.least_m : (kernel.least_m + 1) / 2;
}

}  // namespace

Explanation::Candidate judge(const Kernel& kernel, const Problem& layer, std::string_view forced, bool allow_reference) {
  const Problem problem = needs_finish(layer) ? product_of(layer) : layer;
  Status status = kernel.accepts(kernel, problem);
  if (status.ok() && !forced.empty() && kernel.name != forced) status = error(StatusCode::unsupported, "{} is forced", forced);
  if (status.ok() && kernel.backend == Backend::reference && !allow_reference)
    status = error(StatusCode::unsupported, "the reference is not allowed here");
  const Problem mean = mean_expert(problem);
  if (const std::int64_t least = least_rows(kernel, problem); status.ok() && forced.empty() && mean.m < least)
    status = error(StatusCode::unsupported, "is for M of {} and more: fewer rows leave most of its tile empty", least);
  if (status.ok() && problem.any_alignment && kernel.reads != nullptr)
    status = error(StatusCode::unsupported, "reads rows of A that begin at multiples of 16 bytes");
  if (!status.ok()) return {.kernel = kernel.name, .refusal = status.message()};
  return {.kernel = kernel.name,
          .accepted = true,
          .cost_us = kernel.cost_us(kernel, mean) + choose_preparation(kernel, problem).cost_us + choose_finish(layer).cost_us};
}

std::vector<Explanation::Candidate> judge_all(const Problem& problem, std::string_view forced, bool allow_reference) {
  std::vector<Explanation::Candidate> candidates;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == problem.op) candidates.push_back(judge(kernel, problem, forced, allow_reference));
  return candidates;
}

namespace {

/// Whether judge() would refuse the kernel for a reason that needs no text: most refusals of a choice, whose texts took most of its time.
bool is_out(const Kernel& kernel, const Problem& problem, std::string_view forced, bool allow_reference) {
  if (kernel.op != problem.op || !reads_weight(kernel, problem)) return true;
  if (kernel.backend == Backend::reference && !allow_reference) return true;
  if (problem.any_alignment && kernel.reads != nullptr) return true;
  return forced.empty() ? mean_expert(problem).m < least_rows(kernel, problem) : kernel.name != forced;
}

}  // namespace

std::optional<Problem> first_step(const Problem& problem) {
  if (problem.op == Op::prepare) return std::nullopt;
  if (problem.u8_codes) return recoding(problem);
  if (problem.normalizes) return normalizing(problem);
  return std::nullopt;
}

Preparation choose_preparation(const Kernel& kernel, const Problem& problem) {
  const std::optional<Problem> step = first_step(problem);
  const Choice first = step ? choose_kernel(*step, {}, true) : Choice{};
  if (problem.op != Op::linear || !needs_prepare(kernel.form, problem)) return {.first = first.kernel, .cost_us = first.cost_us};
  Problem form = preparing(problem, kernel.form);
  const Choice prepare = choose_kernel(form, {}, true);
  form.normalizes = problem.normalizes;
  const Choice both = problem.normalizes ? choose_kernel(form, {}, true) : Choice{};
  const double cost_us = first.cost_us + prepare.cost_us;
  if (both.kernel != nullptr && both.cost_us <= cost_us) return {.prepare = both.kernel, .cost_us = both.cost_us};
  return {.first = first.kernel, .prepare = prepare.kernel, .cost_us = cost_us};
}

Choice choose_finish(const Problem& problem) {
  return needs_finish(problem) ? choose_kernel(finishing(problem), {}, true) : Choice{};
}

Choice choose_kernel(const Problem& problem, std::string_view forced, bool allow_reference) {
  if (const Choice finish = choose_finish(problem); finish.kernel != nullptr) {
    Choice product = choose_kernel(product_of(problem), forced, allow_reference);
    product.cost_us += finish.cost_us;
    return product;
  }
  Choice choice;
  Preparation prepare;
  const Kernel* prepared = nullptr;  // `prepare` is for this one, and for the next ones that read the same form
  for (const Kernel& kernel : kernel_table()) {
    if (is_out(kernel, problem, forced, allow_reference) || !kernel.accepts(kernel, problem).ok()) continue;
    if (prepared == nullptr || prepared->form != kernel.form) prepare = choose_preparation(kernel, problem);
    prepared = &kernel;
    const double cost_us = kernel.cost_us(kernel, mean_expert(problem)) + prepare.cost_us;
    const bool replaces_reference = choice.kernel != nullptr && choice.kernel->backend == Backend::reference;
    const bool beats = kernel.backend != Backend::reference && cost_us < choice.cost_us;
    if (choice.kernel == nullptr || replaces_reference || beats) choice = {.kernel = &kernel, .cost_us = cost_us};
  }
  return choice;
}

Result<const Kernel*> kernel_of_environment() {
  const char* const text = std::getenv("NIBBLE_KERNEL");
  if (text == nullptr || *text == '\0') return static_cast<const Kernel*>(nullptr);
  if (const Kernel* kernel = find_kernel(text)) return kernel;
  return error(StatusCode::invalid_argument, "NIBBLE_KERNEL={} is not in the kernel table; see nibble doctor --kernels", text);
}

Result<std::string_view> forced_kernel(std::string_view requested, Op op) {
  if (requested.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const Kernel* kernel, kernel_of_environment());
    return kernel != nullptr && kernel->op == op ? kernel->name : std::string_view{};
  }
  NIBBLE_ASSIGN_OR_RETURN(const KernelInfo kernel, kernel_info(requested));
  if (kernel.op != op)
    return error(StatusCode::invalid_argument, "kernel {} does {}, this plan needs {}", requested, name(kernel.op), name(op));
  return kernel.name;
}

bool forces_conv(std::string_view requested) {
  const auto forced = forced_kernel(requested, Op::conv);
  return forced.ok() && !forced->empty();
}

namespace {

/// The part of a problem that follows from the weight.
template <typename Spec>
Problem ask(Op op, const WeightDesc& weight, const Spec& spec, const Roofline& machine) {
  return {.op = op,
          .n = weight.n,
          .k = weight.k,
          .scheme = weight.scheme,
          .zero_type = weight.zero_type,
          .a_dtype = spec.a_dtype == DType::u8 ? DType::s8 : spec.a_dtype,
          .epilogue = spec.epilogue,
          .act_scheme = spec.act_scheme,
          .accumulation = spec.accumulation,
          .u8_codes = spec.a_dtype == DType::u8,
          .permutes_k = weight.act_order,
          .prescales_k = weight.prescale,
          .machine = machine};
}

}  // namespace

Result<Problem> problem_of(const WeightDesc& weight, const LinearSpec& spec, const Roofline& machine) {
  NIBBLE_RETURN_IF_ERROR(check_spec(weight, spec));
  Problem problem = ask(Op::linear, weight, spec, machine);
  problem.normalizes = spec.norm.kind != Norm::none;
  return problem;
}

Result<Problem> problem_of(const WeightDesc& weight, const ConvSpec& spec, const Roofline& machine) {
  NIBBLE_RETURN_IF_ERROR(check_spec(weight, spec));
  Problem problem = ask(Op::conv, weight, spec, machine);
  problem.geometry = spec.geometry;
  problem.input = spec.input;
  problem.output = spec.output;
  return problem;
}

Result<Problem> problem_of(const WeightDesc& weight, const DequantizeSpec& spec, const Roofline& machine) {
  if (!is_compute_float(spec.out))
    return error(StatusCode::unsupported, "cannot dequantize to {}; use f32, f16 or bf16", name(spec.out));
  return Problem{.op = Op::dequantize,
                 .n = weight.n,
                 .k = weight.k,
                 .scheme = weight.scheme,
                 .zero_type = weight.zero_type,
                 .epilogue = {.out = spec.out},
                 .machine = machine};
}

std::optional<LinearSpec> as_linear(const ConvSpec& spec) {
  const ConvGeometry& geometry = spec.geometry;
  const bool flat =
      (spec.input == ImageLayout::nhwc && spec.output == ImageLayout::nhwc) || geometry.height * geometry.width == 1;
  if (!geometry.pointwise() || !flat) return std::nullopt;
  return LinearSpec{.a_dtype = spec.a_dtype,
                    .m_max = spec.batch_max * geometry.height * geometry.width,
                    .epilogue = spec.epilogue,
                    .act_scheme = spec.act_scheme,
                    .accumulation = spec.accumulation};
}

namespace {

std::string refusal(const Layout& layout, const Problem& problem) {
  return refusal(layout, problem.scheme, problem.zero_type, problem.k);
}

/// The layout whose best kernels have the smallest geometric mean of cost over M = 1, 4, 16, ... m_max. The reference counts only if there
/// is no other kernel: for a small weight its predicted time is less than a launch of any other.
Result<const Layout*> cheapest_layout(Problem problem, std::int64_t m_max) {
  const Layout* best = nullptr;
  double best_cost = std::numeric_limits<double>::infinity();
  std::vector<Refusal> reasons;
  std::vector<const Layout*> candidates;
  for (const Layout* layout : layout_table()) {
    if (layout->backend != problem.memory) continue;
    if (const std::string reason = refusal(*layout, problem); reason.empty())
      candidates.push_back(layout);
    else
      reasons.push_back({.layout = layout->name, .reason = reason});
  }
  for (const bool allow_reference : {false, true}) {
    if (best != nullptr) break;
    for (const Layout* layout : candidates) {
      problem.layout = layout->name;
      double log_cost = 0;
      for (std::int64_t m = 1; m <= m_max; m *= 4) {
        problem.m = m;
        const Choice choice = choose_kernel(problem, {}, allow_reference);
        log_cost += choice.kernel == nullptr ? std::numeric_limits<double>::infinity() : std::log(choice.cost_us);
      }
      if (log_cost < best_cost) {
        best = layout;
        best_cost = log_cost;
      }
    }
  }
  if (best == nullptr) {
    problem.m = m_max;
    for (const Layout* layout : candidates) {
      problem.layout = layout->name;
      std::vector<Explanation::Candidate> readers;
      for (const Kernel& kernel : kernel_table())
        if (kernel.op == problem.op && reads_weight(kernel, problem)) readers.push_back(judge(kernel, problem, {}, true));
      for (Refusal& reason : refusals(problem, readers)) {
        reason.layout = layout->name;
        reasons.push_back(std::move(reason));
      }
    }
    std::string message = fmt::format("no {} kernel of this build takes scheme {} (W[{},{}]){}{}", name(problem.memory),
                                      Scheme{problem.scheme, problem.act_scheme}.name(), problem.n, problem.k,
                                      reasons.empty() ? "" : "; ", text_of(reasons));
    return Status(StatusCode::unsupported, std::move(message), std::move(reasons));
  }
  return best;
}

}  // namespace

Result<Packing> choose_packing(const Problem& problem, std::int64_t m_max, const PackOptions& options) {
  std::string_view wanted = options.layout;
  Backend memory = options.backend == Backend::cuda ? Backend::cuda : Backend::cpu;
  if (!options.kernel.empty() || wanted.empty()) {
    const Kernel* named = find_kernel(options.kernel);
    const Op op = named != nullptr && (named->op == Op::conv || named->op == Op::linear) ? named->op : problem.op;
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, op));
    if (!forced.empty()) {
      const Kernel& kernel = *find_kernel(forced);
      wanted = kernel.layout;
      memory = kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu;
    }
  }
  if (memory == Backend::cuda && problem.gpu == nullptr)
    NIBBLE_RETURN_IF_ERROR(this_gpu().status().with_context("packing on the GPU"));
  if (wanted.empty()) {
    Problem open = problem;
    open.memory = memory;
    NIBBLE_ASSIGN_OR_RETURN(const Layout* layout, cheapest_layout(open, m_max));
    return Packing{layout, memory};
  }
  const Layout* layout = find_layout(wanted);
  if (layout == nullptr)
    return error(StatusCode::not_found, "no layout is called '{}'; see nibble doctor --layouts", shown(wanted));
  if (memory == Backend::cuda && layout->backend != Backend::cuda)
    return error(StatusCode::invalid_argument, "layout {} is not for the GPU; leave the layout or the backend open", wanted);
  if (const std::string reason = refusal(*layout, problem); !reason.empty())
    return error(StatusCode::unsupported, "layout {} cannot hold W[{},{}] {}: {}", wanted, problem.n, problem.k,
                 problem.scheme.name(), reason);
  return Packing{layout, memory};
}

Problem preparing(Problem problem, ActForm form) {
  problem.op = Op::prepare;
  problem.form = form;
  problem.layout = {};
  problem.u8_codes = problem.normalizes = false;
  return problem;
}

namespace {

/// Of a problem that no kernel takes.
Status refused(const std::string& what, const Problem& problem, std::string_view forced, bool allow_reference) {
  std::vector<Refusal> reasons = refusals(problem, judge_all(problem, forced, allow_reference));
  std::string message = fmt::format("{}: {}", what, text_of(reasons));
  return {StatusCode::unsupported, std::move(message), std::move(reasons)};
}

/// Chooses for one M; an error lists every refusal, or that of the forced kernel.
Result<Bucket> choose_bucket(const Problem& problem, std::string_view forced, bool allow_reference) {
  const Choice choice = choose_kernel(problem, forced, allow_reference);
  if (choice.kernel == nullptr && !forced.empty()) return forced_refusal(problem, forced, allow_reference);
  if (choice.kernel == nullptr)
    return refused(fmt::format("no kernel takes {} {} M={} N={} K={} {}", name(problem.op), problem.scheme.name(), problem.m,
                               problem.n, problem.k, problem.epilogue.name()),
                   problem, forced, allow_reference);
  const Preparation before = choose_preparation(*choice.kernel, problem);
  Bucket bucket{.m_low = problem.m,
                .m_high = problem.m,
                .first = before.first,
                .prepare = before.prepare,
                .main = choice.kernel,
                .finish = choose_finish(problem).kernel,
                .cost_us = choice.cost_us};
  const bool normalized = bucket.prepare != nullptr && normalizes(*bucket.prepare);
  if (const auto first = first_step(problem); first && bucket.first == nullptr && !normalized)
    return refused(fmt::format("nothing makes {} activations", name(first->form)), *first, {}, true);
  if (needs_finish(problem) && bucket.finish == nullptr)
    return refused("nothing finishes the sums of a glu", finishing(problem), {}, true);
  if (problem.op == Op::linear && needs_prepare(choice.kernel->form, problem)) {
    if (bucket.prepare == nullptr)
      return refused(fmt::format("nothing prepares the {} activations of {}", choice.kernel->act, choice.kernel->name),
                     preparing(problem, choice.kernel->form), {}, true);
  } else if (choice.kernel->reads != nullptr) {
    Problem anywhere = problem;
    anywhere.any_alignment = true;
    bucket.unaligned = choose_kernel(anywhere, {}, allow_reference).kernel;
    if (problem.op == Op::linear && bucket.unaligned != nullptr && needs_prepare(bucket.unaligned->form, problem))
      bucket.unaligned_prepare = choose_kernel(preparing(problem, bucket.unaligned->form), {}, true).kernel;
  }
  return bucket;
}

}  // namespace

Result<std::vector<Bucket>> choose_buckets(Problem problem, std::int64_t m_max, std::string_view forced, bool allow_reference) {
  std::vector<Bucket> buckets;
  for (std::int64_t low = 1; low <= m_max;) {
    const std::int64_t high = low == 1 ? 1 : std::min(m_max, (low - 1) * 2);
    problem.m = high;
    NIBBLE_ASSIGN_OR_RETURN(Bucket bucket, choose_bucket(problem, forced, allow_reference));
    bucket.m_low = low;
    if (!buckets.empty() && buckets.back().main == bucket.main && buckets.back().prepare == bucket.prepare &&
        buckets.back().first == bucket.first && buckets.back().unaligned == bucket.unaligned &&
        buckets.back().finish == bucket.finish) {
      bucket.m_low = buckets.back().m_low;
      buckets.back() = bucket;
    } else {
      buckets.push_back(bucket);
    }
    low = high + 1;
  }
  return buckets;
}

Explanation explanation_of(const std::vector<Bucket>& buckets, Problem problem, std::string_view forced, bool allow_reference) {
  Explanation explanation{.layout = problem.layout};
  for (const Bucket& b : buckets) {
    problem.m = b.m_high;
    Explanation::Bucket out{
        .m_low = b.m_low, .m_high = b.m_high, .cost_us = b.cost_us, .candidates = judge_all(problem, forced, allow_reference)};
    if (b.first != nullptr) out.steps.push_back(b.first->name);
    if (b.prepare != nullptr) out.steps.push_back(b.prepare->name);
    out.steps.push_back(b.main->name);
    if (b.finish != nullptr) out.steps.push_back(b.finish->name);
    if (b.unaligned != nullptr) out.unaligned = b.unaligned->name;
    explanation.buckets.push_back(std::move(out));
  }
  return explanation;
}

Status forced_refusal(const Problem& problem, std::string_view forced, bool allow_reference) {
  const Kernel& kernel = *find_kernel(forced);
  const char* from_environment = std::getenv("NIBBLE_KERNEL");
  const bool by_environment = from_environment != nullptr && forced == from_environment;
  // A missing CPU feature is reported before the layout, which would not help then.
  const bool other_layout = !kernel.layout.empty() && kernel.layout != problem.layout;
  const bool repack = other_layout && (kernel.backend == Backend::cuda || runs_here(kernel.isa).ok());
  return error(StatusCode::unsupported, "kernel {}{} does not take {} {} M={} N={} K={} {}: {}; {}", forced,
               by_environment ? " of NIBBLE_KERNEL" : "", name(problem.op), Scheme{problem.scheme, problem.act_scheme}.name(),
               problem.m, problem.n, problem.k, problem.epilogue.name(), judge(kernel, problem, forced, allow_reference).refusal,
               repack           ? fmt::format("pack with kernel={}", forced)
               : by_environment ? "unset NIBBLE_KERNEL, or name another kernel"
                                : "force another kernel, or none");
}

std::vector<Refusal> refusals(const Problem& problem, const std::vector<Explanation::Candidate>& candidates) {
  std::vector<Refusal> reasons;
  for (const Explanation::Candidate& candidate : candidates) {
    if (candidate.accepted) continue;
    const auto said = std::ranges::find(reasons, candidate.refusal, &Refusal::reason);
    if (said != reasons.end()) {
      ++said->others;
      continue;
    }
    const Kernel& kernel = *find_kernel(candidate.kernel);
    Refusal& reason = reasons.emplace_back(Refusal{.kernel = kernel.name, .reason = candidate.refusal});
    const bool looked =
        kernel.backend != Backend::cuda || reads_weight(kernel, problem);  // for a GPU, which may start its driver
    if (looked && runs_there(kernel, problem).message() == reason.reason) reason.needs = kernel.isa;
  }
  return reasons;
}

std::string text_of(const std::vector<Refusal>& refusals) {
  std::string text;
  std::string_view layout;
  for (const Refusal& refusal : refusals) {
    if (!text.empty()) text += "; ";
    if (refusal.layout != layout) text += fmt::format("layout {}: ", refusal.layout);
    layout = refusal.layout;
    if (!refusal.kernel.empty())
      text += fmt::format("{}{}: ", refusal.kernel, refusal.others == 0 ? "" : fmt::format(" and {} more", refusal.others));
    text += refusal.reason;
  }
  return text;
}

}  // namespace nibble
