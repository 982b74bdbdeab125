#include "plan/choose.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "nibble/cuda.hpp"

namespace nibble {

Choice choose_kernel(const Problem& problem, std::string_view forced, bool allow_reference) {
  Choice choice;
  for (const Kernel* kernel : kernel_table()) {
    if (kernel->op != problem.op) continue;
    Explanation::Candidate candidate{.kernel = kernel->name};
    Status status = kernel->accepts(*kernel, problem);
    if (status.ok() && !forced.empty() && kernel->name != forced) status = error(StatusCode::unsupported, "{} is forced", forced);
    if (status.ok() && kernel->backend == Backend::reference && !allow_reference)
      status = error(StatusCode::unsupported, "the reference is not allowed here");
    if (status.ok() && forced.empty() && problem.m < kernel->least_m)
      status = error(StatusCode::unsupported, "is for M of {} and more; {} rows leave most of its tile empty", kernel->least_m,
                     problem.m);
    if (status.ok()) {
      candidate.accepted = true;
      candidate.cost_us = kernel->cost_us(*kernel, problem);
      const bool replaces_reference = choice.kernel != nullptr && choice.kernel->backend == Backend::reference;
      const bool beats = kernel->backend != Backend::reference && candidate.cost_us < choice.cost_us;
      if (choice.kernel == nullptr || replaces_reference || beats) {
        choice.kernel = kernel;
        choice.cost_us = candidate.cost_us;
      }
    } else {
      candidate.refusal = status.message();
    }
    choice.candidates.push_back(std::move(candidate));
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

namespace {

/// The layout whose best kernels have the smallest geometric mean of cost over M = 1, 4, 16, ... m_max. The reference counts only where
/// there is no other kernel: what it is predicted to take for a small weight is less than a launch of any other.
Result<const Layout*> cheapest_layout(const QuantTensor& q, const PackOptions& options, Backend memory) {
  Problem problem{
      .n = q.n, .k = q.k, .scheme = q.scheme, .zero_type = q.zeros.dtype, .memory = memory, .act_scheme = options.act_scheme};
  problem.machine = assumed_roofline((options.executor != nullptr ? *options.executor : default_executor()).threads());
  const Layout* best = nullptr;
  double best_cost = std::numeric_limits<double>::infinity();
  std::string reasons;
  std::vector<const Layout*> candidates;
  for (const Layout* layout : layout_table()) {
    if (layout->backend != memory) continue;
    if (const std::string reason = refusal(*layout, q); reason.empty())
      candidates.push_back(layout);
    else
      reasons += fmt::format("; layout {}: {}", layout->name, reason);
  }
  for (const bool allow_reference : {false, true}) {
    if (best != nullptr) break;
    for (const Layout* layout : candidates) {
      problem.layout = layout->name;
      double log_cost = 0;
      for (std::int64_t m = 1; m <= std::max<std::int64_t>(1, options.m_max); m *= 4) {
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
  if (best == nullptr)
    return error(StatusCode::unsupported, "no {} kernel of this build takes scheme {} (W[{},{}]){}", name(memory),
                 q.scheme.name(), q.n, q.k, reasons);
  return best;
}

}  // namespace

Result<Packing> choose_packing(const QuantTensor& q, const PackOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"m_max", options.m_max}}));
  std::string_view wanted = options.layout;
  Backend memory = options.backend == Backend::cuda ? Backend::cuda : Backend::cpu;
  if (!options.kernel.empty() || wanted.empty()) {
    const Kernel* named = find_kernel(options.kernel);
    const Op op = named != nullptr && named->op == Op::conv ? Op::conv : Op::linear;
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view forced, forced_kernel(options.kernel, op));
    if (!forced.empty()) {
      const Kernel& kernel = *find_kernel(forced);
      wanted = kernel.layout;
      memory = kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu;
    }
  }
  if (memory == Backend::cuda) NIBBLE_RETURN_IF_ERROR(this_gpu().status().with_context("packing on the GPU"));
  if (wanted.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(const Layout* layout, cheapest_layout(q, options, memory));
    return Packing{layout, memory};
  }
  const Layout* layout = find_layout(wanted);
  if (layout == nullptr) return error(StatusCode::not_found, "no layout is called '{}'; see nibble doctor --layouts", wanted);
  if (memory == Backend::cuda && layout->backend != Backend::cuda)
    return error(StatusCode::invalid_argument, "layout {} is not for the GPU; leave the layout or the backend open", wanted);
  if (const std::string reason = refusal(*layout, q); !reason.empty())
    return error(StatusCode::unsupported, "layout {} cannot hold W[{},{}] {}: {}", wanted, q.n, q.k, q.scheme.name(), reason);
  return Packing{layout, memory};
}

Status forced_refusal(const Problem& problem, const Choice& choice, std::string_view forced) {
  const auto own = std::ranges::find(choice.candidates, forced, &Explanation::Candidate::kernel);
  const Kernel& kernel = *find_kernel(forced);
  const char* from_environment = std::getenv("NIBBLE_KERNEL");
  const bool by_environment = from_environment != nullptr && forced == from_environment;
  // What a CPU lacks is told before the layout, which would not help then.
  const bool other_layout = !kernel.layout.empty() && kernel.layout != problem.layout;
  const bool repack = other_layout && (kernel.backend == Backend::cuda || runs_here(kernel.isa).ok());
  return error(StatusCode::unsupported, "kernel {}{} does not take {} {} M={} N={} K={} {}: {}; {}", forced,
               by_environment ? " of NIBBLE_KERNEL" : "", name(problem.op), Scheme{problem.scheme, problem.act_scheme}.name(),
               problem.m, problem.n, problem.k, problem.epilogue.name(), own->refusal,
               repack           ? fmt::format("pack with kernel={}", forced)
               : by_environment ? "unset NIBBLE_KERNEL, or name another kernel"
                                : "force another kernel, or none");
}

std::string refusals(const Choice& choice) {
  struct Reason {
    std::string_view refusal, kernel;  // the first of those that say so
    int others = 0;
  };
  std::vector<Reason> reasons;
  for (const Explanation::Candidate& candidate : choice.candidates) {
    if (candidate.accepted) continue;
    const auto said = std::ranges::find(reasons, candidate.refusal, &Reason::refusal);
    if (said != reasons.end())
      ++said->others;
    else
      reasons.push_back({candidate.refusal, candidate.kernel});
  }
  std::string text;
  for (const Reason& reason : reasons)
    text += fmt::format("{}{}{}: {}", text.empty() ? "" : "; ", reason.kernel,
                        reason.others == 0 ? "" : fmt::format(" and {} more", reason.others), reason.refusal);
  return text;
}

}  // namespace nibble
