// Experts packed one after the other into one allocation.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/buffer.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"
#include "layouts/layout.hpp"
#include "nibble/experts.hpp"

namespace nibble {
namespace {

/// What plans of all experts depend on.
struct Facts {
  WeightDesc desc;
  bool bias;
};

/// The field in which b differs from a, with the values; empty where one plan serves both.
std::string difference(const Facts& a, const Facts& b) {
  const auto has = [](bool there) { return there ? "present" : "absent"; };
  if (a.desc.n != b.desc.n || a.desc.k != b.desc.k)
    return fmt::format("W is [{},{}] and [{},{}]", a.desc.n, a.desc.k, b.desc.n, b.desc.k);
  if (a.desc.scheme != b.desc.scheme)
    return fmt::format("the scheme is {} with scales of {}, and {} with {}", a.desc.scheme.name(), name(a.desc.scheme.scale),
                       b.desc.scheme.name(), name(b.desc.scheme.scale));
  if (a.desc.zero_type != b.desc.zero_type)
    return fmt::format("zeros are {} and {}", name(a.desc.zero_type), name(b.desc.zero_type));
  if (a.desc.act_order != b.desc.act_order)
    return fmt::format("g_idx is {} and {}", has(a.desc.act_order), has(b.desc.act_order));
  if (a.desc.prescale != b.desc.prescale) return fmt::format("prescale is {} and {}", has(a.desc.prescale), has(b.desc.prescale));
  if (a.desc.static_acts.has_value() != b.desc.static_acts.has_value())
    return fmt::format("static_acts are {} and {}", has(a.desc.static_acts.has_value()), has(b.desc.static_acts.has_value()));
  if (a.bias != b.bias) return fmt::format("the bias is {} and {}", has(a.bias), has(b.bias));
  return {};
}

std::string context(std::int64_t expert) { return fmt::format("expert {}", expert); }

Facts facts_of(const PackedWeight& weight) { return {weight.desc(), weight.has_bias()}; }

}  // namespace

std::size_t PackedExperts::nbytes() const { return experts_.size() * experts_.front().bytes().size(); }

Result<PackedExperts> pack_experts(std::int64_t count, const std::function<Result<QuantTensor>(std::int64_t)>& read,
                                   const LinearSpec& spec, const PackOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"experts", count}}));
  if (options.backend == Backend::cuda)
    return error(StatusCode::unsupported, "experts are packed for the CPU only; pack each by pack() for linear plans on the GPU");
  std::vector<PackedWeight> experts;
  std::shared_ptr<Buffer> all;
  std::size_t pitch = 0;
  PackOptions same = options;  // as the first
  std::optional<Facts> first;
  for (std::int64_t e = 0; e < count; ++e) {
    Result<QuantTensor> q = read(e);
    if (!q.ok()) return q.status().with_context(context(e));
    const Facts facts{describe(*q), !q->bias.empty()};
    if (!first) first = facts;
    if (const std::string what = difference(*first, facts); !what.empty())
      return error(StatusCode::invalid_argument, "experts 0 and {} differ: {}", e, what);
    const Result<PackedWeight> weight = pack(*q, spec, same);
    if (!weight.ok()) return weight.status().with_context(context(e));
    const std::span<const std::byte> bytes = weight->bytes();
    if (all == nullptr) {
      same.layout = weight->layout();
      same.kernel.clear();
      pitch = (bytes.size() + Buffer::kAlignment - 1) / Buffer::kAlignment * Buffer::kAlignment;
      all = std::make_shared<Buffer>(static_cast<std::size_t>(product({static_cast<std::int64_t>(pitch), count})));
    }
    std::byte* const to = all->data() + static_cast<std::size_t>(e) * pitch;
    std::memcpy(to, bytes.data(), bytes.size());
    auto data = std::make_shared<PackedWeightData>();
    static_cast<PackedWeightHeader&>(*data) = weight->data();
    data->bytes = Buffer(std::span<const std::byte>(to, bytes.size()), all);
    experts.emplace_back(std::move(data), spec);
  }
  return PackedExperts(std::move(experts));
} catch (...) {
  return caught();
}

Result<PackedExperts> experts_of(std::vector<PackedWeight> weights) try {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"experts", std::ssize(weights)}}));
  const PackedWeight& first = weights.front();
  if (!std::holds_alternative<LinearSpec>(first.spec()))
    return error(StatusCode::invalid_argument, "expert 0 was packed for a convolution");
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const PackedWeight& weight = weights[e];
    if (weight.backend() != Backend::cpu)
      return error(StatusCode::unsupported, "expert {} is in device memory; layers of experts run in host memory only", e);
    if (const std::string what = difference(facts_of(first), facts_of(weight)); !what.empty())
      return error(StatusCode::invalid_argument, "experts 0 and {} differ: {}", e, what);
    if (weight.layout() != first.layout() || weight.spec() != first.spec())
      return error(StatusCode::invalid_argument, "experts 0 and {} were packed for other specifications or layouts ({} and {})",
                   e, first.layout(), weight.layout());
  }
  return PackedExperts(std::move(weights));
} catch (...) {
  return caught();
}

Result<PackedExperts> pack_experts(std::span<const QuantTensor> experts, const LinearSpec& spec, const PackOptions& options) {
  return pack_experts(
      static_cast<std::int64_t>(experts.size()),
      [&](std::int64_t e) -> Result<QuantTensor> { return experts[static_cast<std::size_t>(e)]; }, spec, options);
}

}  // namespace nibble
