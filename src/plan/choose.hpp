// Choice: candidates × cost. The one place that decides which kernel runs and which layout it reads.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/kernel.hpp"
#include "nibble/plan.hpp"

namespace nibble {

/// The result of choosing for one problem.
struct Choice {
  const Kernel* kernel = nullptr;  // null when every candidate refused
  double cost_us = 0;              // with the steps that prepare its activations
};

/// The answer of `kernel` to the problem: accepted with its cost, or refused with the reason.
Explanation::Candidate judge(const Kernel& kernel, const Problem& problem, std::string_view forced, bool allow_reference);
/// The answer of every kernel of the operation, with its text: to explain, not to choose.
std::vector<Explanation::Candidate> judge_all(const Problem& problem, std::string_view forced, bool allow_reference);
/// The cheapest of the kernels that accept. Only a forced kernel can win, if there is one; the reference is chosen only if no other kernel accepts.
Choice choose_kernel(const Problem& problem, std::string_view forced, bool allow_reference);

/// The problem of the step before all others, which makes the A that they see; none where that is the caller's.
std::optional<Problem> first_step(const Problem& problem);
/// The steps before a linear kernel: the first, and the one that prepares its activations, which may normalize them itself.
struct Preparation {
  const Kernel* first = nullptr;    // null: none is needed, or none was found
  const Kernel* prepare = nullptr;  // likewise
  double cost_us = 0;               // of both
};
/// The cheapest ones.
Preparation choose_preparation(const Kernel& kernel, const Problem& problem);
/// The cheapest step that finishes the sums of the product; null and 0 where the main kernel stores D.
Choice choose_finish(const Problem& problem);

/// The kernel that NIBBLE_KERNEL names; null when it is unset or empty, invalid_argument when there is no such kernel.
Result<const Kernel*> kernel_of_environment();

/// The kernel forced for `op`: options.kernel, or NIBBLE_KERNEL when that names a kernel of this operation.
Result<std::string_view> forced_kernel(std::string_view requested, Op op);

/// Whether a kernel of Op::conv is forced: by name, or by the environment.
bool forces_conv(std::string_view requested);

/// The problem of a layer, without m and, unless the weight is packed, without layout and memory. Errors: those of the specification
/// (check.hpp).
Result<Problem> problem_of(const WeightDesc& weight, const LinearSpec& spec, const Roofline& machine);
Result<Problem> problem_of(const WeightDesc& weight, const ConvSpec& spec, const Roofline& machine);
Result<Problem> problem_of(const WeightDesc& weight, const DequantizeSpec& spec, const Roofline& machine);
/// A pointwise convolution whose images are matrices of pixels, as a linear layer.
std::optional<LinearSpec> as_linear(const ConvSpec& spec);

/// The target of packing: a layout that can hold the weight, and a memory.
struct Packing {
  const Layout* layout = nullptr;
  Backend memory = Backend::cpu;
};
/// The target that options (or NIBBLE_KERNEL) request, or else the layout whose kernels are cheapest for the problem over M in [1, m_max].
Result<Packing> choose_packing(const Problem& problem, std::int64_t m_max, const PackOptions& options);

/// The steps for M in [m_low, m_high].
struct Bucket {
  std::int64_t m_low = 1, m_high = 1;
  const Kernel* first = nullptr;    // first step, when there is one: every other one sees the A that it makes
  const Kernel* prepare = nullptr;  // next step, when there is one
  const Kernel* main = nullptr;
  const Kernel* finish = nullptr;             // last step, where main stores sums
  const Kernel* unaligned = nullptr;          // instead of main, for an A that main cannot read where it lies (Kernel::reads)
  const Kernel* unaligned_prepare = nullptr;  // before unaligned, where that one reads another form
  double cost_us = 0;                         // at m_high

  /// Whether main can read A where it lies, or a step before it has made what it reads.
  bool reads(const StepArgs& args) const { return prepare != nullptr || main->reads == nullptr || main->reads(args); }
};
/// Chooses for every M up to m_max. Buckets end at powers of two; neighbours with the same choice are merged.
Result<std::vector<Bucket>> choose_buckets(Problem problem, std::int64_t m_max, std::string_view forced, bool allow_reference);
/// The problem of the prepare step of a kernel that reads activations in `form`.
Problem preparing(Problem problem, ActForm form);
/// The buckets of a problem with the answer of every kernel.
Explanation explanation_of(const std::vector<Bucket>& buckets, Problem problem, std::string_view forced, bool allow_reference);

/// Why a plan with a forced kernel is refused: that kernel's reason alone, and the remedy.
Status forced_refusal(const Problem& problem, std::string_view forced, bool allow_reference);

/// The reasons of those that refuse, each once, with the first kernel that has it.
std::vector<Refusal> refusals(const Problem& problem, const std::vector<Explanation::Candidate>& candidates);
/// "name: reason" of each, behind the name of its layout, on one line.
std::string text_of(const std::vector<Refusal>& refusals);

}  // namespace nibble
