#include "core/sizes.hpp"

#include "core/error.hpp"

namespace nibble {

Status check_sizes(std::initializer_list<std::pair<std::string_view, std::int64_t>> sizes, std::int64_t least) {
  for (const auto& [what, size] : sizes)
    if (size < least || size > kMaxSize)
      return error(StatusCode::invalid_argument, "{}={} is outside [{}, {}]", what, size, least, kMaxSize);
  return {};
}

Status check_elements(std::string_view what, std::initializer_list<std::int64_t> sizes) {
  if (product(sizes) <= kMaxElements) return {};
  return error(StatusCode::invalid_argument, "{} would have {} elements; {} at most", what, fmt::join(sizes, "·"), kMaxElements);
}

Status check_product(std::int64_t m, std::int64_t n, std::int64_t k) {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"m_max", m}, {"N", n}, {"K", k}}));
  NIBBLE_RETURN_IF_ERROR(check_elements("A", {m, k}));
  return check_elements("D", {m, n});
}

}  // namespace nibble
