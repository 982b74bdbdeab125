#include "experts/check.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "nibble/parallel.hpp"

namespace nibble::experts {

int threads_of(const PlanOptions& options) { return options.threads > 0 ? options.threads : default_executor().threads(); }

std::string described(const ConstTensorView& v) {
  if (v.empty()) return "nothing";
  return fmt::format("{} [{}]", name(v.dtype), fmt::join(v.shape.begin(), v.shape.begin() + v.rank, ","));
}

Status check_indices(std::string_view what, const ConstTensorView& v, std::initializer_list<std::int64_t> shape) {
  const bool fits = !v.empty() && v.dtype == DType::s32 && v.rank == static_cast<int>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), v.shape.begin());
  if (fits) return {};
  return error(StatusCode::invalid_argument, "{} must be s32 [{}], got {}", what, fmt::join(shape, ","), described(v));
}

Status check_experts(const PackedExperts& experts, std::int64_t count, std::int64_t n, std::int64_t k) {
  if (experts.count() == count && experts.n() == n && experts.k() == k) return {};
  return error(StatusCode::invalid_argument, "the plan is for {} experts of W[{},{}], these are {} of W[{},{}]", count, n, k,
               experts.count(), experts.n(), experts.k());
}

}  // namespace nibble::experts
