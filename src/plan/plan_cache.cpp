// The cache of plans: a list, the most recently used first, which a search mostly ends early in.
#include "nibble/plan_cache.hpp"

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string_view>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "plan/choose.hpp"

namespace nibble {
namespace {

// M is no part of a key: these hold the specification without it.
std::int64_t& largest(LinearSpec& spec) { return spec.m_max; }
std::int64_t& largest(ConvSpec& spec) { return spec.batch_max; }

Result<Plan> made(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options) {
  return Plan::linear(weight, spec, options);
}
Result<Plan> made(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options) {
  return Plan::conv(weight, spec, options);
}

/// Whether plans are the same for both. The bindings name every member, so that a new one cannot be forgotten here.
bool same(const WeightDesc& a, const WeightDesc& b) {
  const auto& [scheme, n, k, zero_type, filter, act_order, prescale, static_acts] = a;
  const bool same_acts = static_acts.has_value() == b.static_acts.has_value() &&
                         (!static_acts || (static_acts->zero == 0) == (b.static_acts->zero == 0));
  return n == b.n && k == b.k && scheme == b.scheme && zero_type == b.zero_type && filter == b.filter &&
         act_order == b.act_order && prescale == b.prescale && same_acts;
}

bool same(const Roofline& a, const Roofline& b) {
  return a.threads == b.threads && std::ranges::all_of(kAllCeilings, [&](Ceiling c) { return a[c] == b[c]; });
}

bool same(const PlanOptions& a, const PlanOptions& b) {
  const auto& [kernel, allow_reference, threads, machine] = a;
  const bool same_machine = machine.has_value() == b.machine.has_value() && (!machine || same(*machine, *b.machine));
  return kernel == b.kernel && allow_reference == b.allow_reference && threads == b.threads && same_machine;
}

/// What a plan depends on, without M.
struct Key {
  WeightDesc weight;
  std::string_view layout;  // of the weight
  Backend backend;
  int gpu = 0;  // that has the weight
  std::variant<LinearSpec, ConvSpec> spec;
  PlanOptions options;
  const Kernel* environment = nullptr;  // NIBBLE_KERNEL

  friend bool operator==(const Key& a, const Key& b) {
    return same(a.weight, b.weight) && a.layout == b.layout && a.backend == b.backend && a.gpu == b.gpu && a.spec == b.spec &&
           same(a.options, b.options) && a.environment == b.environment;
  }
};

template <class Spec>
Result<Key> key_of(const PackedWeight& weight, Spec spec, const PlanOptions& options) {
  largest(spec) = 0;
  Key key{weight.desc(), weight.layout(), weight.backend(), 0, std::move(spec), options};
  NIBBLE_ASSIGN_OR_RETURN(key.environment, kernel_of_environment());
  if (key.backend == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(key.gpu, cuda::current_device());
  }
  return key;
}

}  // namespace

struct PlanCache::Impl {
  struct Entry {
    Key key;
    std::int64_t m;  // the plan serves up to
    Plan plan;
  };

  const std::size_t capacity;
  mutable std::mutex mutex;               // guards the rest
  std::list<Entry> entries;               // the most recently used first; one of each key
  std::list<Key> in_progress;             // of plans that a thread is making
  std::condition_variable progress = {};  // one of them was made, or failed
  std::uint64_t hits = 0, misses = 0;

  template <class Spec>
  Result<Plan> get(const PackedWeight& weight, Spec spec, const PlanOptions& options);
};

template <class Spec>
Result<Plan> PlanCache::Impl::get(const PackedWeight& weight, Spec spec, const PlanOptions& options) {
  const std::int64_t asked = largest(spec);
  if (asked < 1 || asked > kMaxSize) return made(weight, spec, options);  // which says what is wrong
  NIBBLE_ASSIGN_OR_RETURN(const Key key, key_of(weight, spec, options));

  std::unique_lock lock(mutex);
  const auto find = [&] { return std::ranges::find(entries, key, &Entry::key); };
  for (;;) {
    if (const auto entry = find(); entry != entries.end() && asked <= entry->m) {
      ++hits;
      entries.splice(entries.begin(), entries, entry);
      return entry->plan;
    }
    if (std::ranges::find(in_progress, key) == in_progress.end()) break;
    progress.wait(lock);
  }
  ++misses;
  in_progress.push_front(key);
  const auto mine = in_progress.begin();
  lock.unlock();

  largest(spec) = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(asked)));
  Result<Plan> plan = made(weight, spec, options);
  if (!plan && largest(spec) != asked) {  // so large a layer is refused, or errors speak of the M that was asked for
    largest(spec) = asked;
    plan = made(weight, spec, options);
  }

  lock.lock();
  in_progress.erase(mine);
  progress.notify_all();
  if (!plan || capacity == 0) return plan;
  if (const auto smaller = find(); smaller != entries.end()) entries.erase(smaller);
  entries.push_front({key, largest(spec), *plan});
  if (entries.size() > capacity) entries.pop_back();
  return plan;
}

PlanCache::PlanCache(std::size_t capacity) : impl_(new Impl{.capacity = capacity}) {}
PlanCache::~PlanCache() = default;
PlanCache::PlanCache(PlanCache&&) noexcept = default;
PlanCache& PlanCache::operator=(PlanCache&&) noexcept = default;

Result<Plan> PlanCache::linear(const PackedWeight& weight, const LinearSpec& spec, const PlanOptions& options) try {
  return impl_->get(weight, spec, options);
} catch (...) {
  return caught();
}

Result<Plan> PlanCache::conv(const PackedWeight& weight, const ConvSpec& spec, const PlanOptions& options) try {
  return impl_->get(weight, spec, options);
} catch (...) {
  return caught();
}

Result<Plan> PlanCache::linear(const PackedWeight& weight, const PlanOptions& options) {
  if (const auto* spec = std::get_if<LinearSpec>(&weight.spec())) return linear(weight, *spec, options);
  return Plan::linear(weight, options);  // which says why not
}

Result<Plan> PlanCache::conv(const PackedWeight& weight, const PlanOptions& options) {
  if (const auto* spec = std::get_if<ConvSpec>(&weight.spec())) return conv(weight, *spec, options);
  return Plan::conv(weight, options);  // which says why not
}

PlanCache::Statistics PlanCache::statistics() const {
  const std::lock_guard lock(impl_->mutex);
  return {impl_->hits, impl_->misses, impl_->entries.size()};
}

void PlanCache::clear() {
  const std::lock_guard lock(impl_->mutex);
  impl_->entries.clear();
}

}  // namespace nibble
