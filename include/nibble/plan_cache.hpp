// Plans by what they are for: a caller asks with every call, and few plans are made.
//
//   nibble::PlanCache plans;
//   auto plan = plans.linear(weight, {.a_dtype = DType::f16, .m_max = tokens, .epilogue = {.out = DType::f16}});
//   plan->run(weight, a, d, {}, workspace);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "nibble/conv.hpp"
#include "nibble/plan.hpp"
#include "nibble/status.hpp"

namespace nibble {

/// A bounded set of plans, shared by any number of threads and layers. A plan is found by everything that it depends on: the shape,
/// scheme and layout of the weight, the GPU that has it, the specification, the options, and NIBBLE_KERNEL.
///
/// Of m_max and batch_max the next power of two is planned for, where a layer may be so large, and a plan for a larger M serves smaller
/// ones: M that grows to 4096 costs 13 plans, not 4096. A plan for a larger M takes the place of the smaller one.
///
/// Threads that ask for the same plan at the same time wait while one of them makes it. Errors are not kept.
class PlanCache {
 public:
  /// How many plans are kept by default.
  static constexpr std::size_t kCapacity = 256;
  /// Keeps up to `capacity` plans and drops the least recently used one first; 0 keeps none.
  explicit PlanCache(std::size_t capacity = kCapacity);
  ~PlanCache();
  PlanCache(PlanCache&&) noexcept;
  PlanCache& operator=(PlanCache&&) noexcept;

  /// A plan that serves at least every M in [1, spec.m_max]. Errors: those of Plan::linear().
  Result<Plan> linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options = {});
  /// The same for the specification that the weight was packed for.
  Result<Plan> linear(const PackedWeight& weight, const PlanOptions& options = {});
  /// A plan that serves at least every batch in [1, spec.batch_max]. Errors: those of Plan::conv().
  Result<Plan> conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options = {});
  /// The same for the specification that the weight was packed for.
  Result<Plan> conv(const PackedWeight& weight, const PlanOptions& options = {});

  /// What became of the calls so far.
  struct Statistics {
    std::uint64_t hits = 0;    // calls that got a plan that another call had made
    std::uint64_t misses = 0;  // calls that made a plan, or failed to
    std::size_t size = 0;      // plans that are kept, at most the capacity
  };
  /// Of one moment.
  Statistics statistics() const;
  /// Drops every plan; copies that callers hold stay valid.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nibble
