// Choice: candidates × cost. The one place that decides which kernel runs and which layout it reads.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/kernel.hpp"
#include "nibble/plan.hpp"

namespace nibble {

/// What choosing found for one problem: every kernel of its operation, the winner first to be asked for.
struct Choice {
  const Kernel* kernel = nullptr;  // null when every candidate refused
  double cost_us = 0;
  std::vector<Explanation::Candidate> candidates;
};

/// What `kernel` says to the problem; null: the reference is not allowed.
Explanation::Candidate judge(const Kernel& kernel, const Problem& problem, std::string_view forced, bool allow_reference);
/// Asks every kernel of the table. A forced kernel is the only one that may win; the reference wins only against nobody.
Choice choose_kernel(const Problem& problem, std::string_view forced, bool allow_reference);

/// What NIBBLE_KERNEL names; null when it is unset or empty, invalid_argument when there is no such kernel.
Result<const Kernel*> kernel_of_environment();

/// The kernel forced for `op`: options.kernel, or NIBBLE_KERNEL when that names a kernel of this operation.
Result<std::string_view> forced_kernel(std::string_view requested, Op op);

/// Whether a kernel of Op::conv is forced: by name, or by the environment.
bool forces_conv(std::string_view requested);

/// The question that a layer puts to the table, but for its m and, unless the weight is packed, its layout and memory. Errors: those of
/// the specification (check.hpp).
Result<Problem> problem_of(const WeightDesc& weight, const LinearSpec& spec, const Roofline& machine);
Result<Problem> problem_of(const WeightDesc& weight, const ConvSpec& spec, const Roofline& machine);
/// A pointwise convolution whose images are matrices of pixels, as the linear layer that it is.
std::optional<LinearSpec> as_linear(const ConvSpec& spec);

/// Where packing goes: a layout that can hold the weight, and the memory it will lie in.
struct Packing {
  const Layout* layout = nullptr;
  Backend memory = Backend::cpu;
};
/// What options (or NIBBLE_KERNEL) ask for, or else the layout whose kernels are cheapest for the problem over M in [1, m_max].
Result<Packing> choose_packing(const Problem& problem, std::int64_t m_max, const PackOptions& options);

/// What to do for M in [m_low, m_high].
struct Bucket {
  std::int64_t m_low = 1, m_high = 1;
  const Kernel* prepare = nullptr;  // first step, when there is one
  const Kernel* main = nullptr;
  double cost_us = 0;  // at m_high
  std::vector<Explanation::Candidate> candidates;
};
/// Decides for every M up to m_max. Buckets end at powers of two; neighbours that decide alike are one.
Result<std::vector<Bucket>> choose_buckets(Problem problem, std::int64_t m_max, std::string_view forced, bool allow_reference);
/// The question about the step before a kernel that reads activations in `form`.
Problem preparing(Problem problem, ActForm form);
Explanation explanation_of(const std::vector<Bucket>& buckets, std::string_view layout);

/// Why a plan with a forced kernel is refused: that kernel's reason alone, and the remedy.
Status forced_refusal(const Problem& problem, const Choice& choice, std::string_view forced);

/// "name: reason" of each reason, with the first kernel that has it and the number of others, on one line.
std::string refusals(const Choice& choice);

}  // namespace nibble
