// Choice: candidates × cost. The one place that decides which kernel runs and which layout it reads.
#pragma once

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

/// Asks every kernel of the table. A forced kernel is the only one that may win; the reference wins only against nobody.
Choice choose_kernel(const Problem& problem, std::string_view forced, bool allow_reference);

/// What NIBBLE_KERNEL names; null when it is unset or empty, invalid_argument when there is no such kernel.
Result<const Kernel*> kernel_of_environment();

/// The kernel forced for `op`: options.kernel, or NIBBLE_KERNEL when that names a kernel of this operation.
Result<std::string_view> forced_kernel(std::string_view requested, Op op);

/// Where packing goes: a layout that can hold the weight, and the memory it will lie in.
struct Packing {
  const Layout* layout = nullptr;
  Backend memory = Backend::cpu;
};
/// What options (or NIBBLE_KERNEL) ask for, or else the layout whose kernels are cheapest over M in [1, m_max].
Result<Packing> choose_packing(const QuantTensor& q, const PackOptions& options);

/// Why a plan with a forced kernel is refused: that kernel's reason alone, and the remedy.
Status forced_refusal(const Problem& problem, const Choice& choice, std::string_view forced);

/// "name: reason" of each reason, with the first kernel that has it and the number of others, on one line.
std::string refusals(const Choice& choice);

}  // namespace nibble
