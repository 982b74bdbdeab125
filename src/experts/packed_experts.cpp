// Experts packed one after the other into one allocation.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/buffer.hpp"
#include "core/error.hpp"
#include "core/sizes.hpp"
#include "experts/pack_each.hpp"
#include "kernels/cuda/launch/launch.hpp"
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

namespace {

/// Copies parts of equal size into one allocation of device memory, `pitch` bytes apart.
template <class Part>
Result<std::shared_ptr<DeviceMemory>> side_by_side(std::int64_t count, std::size_t pitch, Part part) {
  const auto bytes = static_cast<std::size_t>(product({static_cast<std::int64_t>(pitch), count}));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(bytes));
  for (std::int64_t e = 0; e < count; ++e) {
    const Buffer& from = part(e);
    NIBBLE_RETURN_IF_ERROR(cuda::copy_on_device(memory.data() + static_cast<std::size_t>(e) * pitch, from.data(), from.size()));
  }
  return std::make_shared<DeviceMemory>(std::move(memory));
}

/// The buffer of expert e in such an allocation.
Buffer part_of(const std::shared_ptr<DeviceMemory>& all, std::int64_t e, std::size_t pitch, std::size_t size) {
  return {all->data() + static_cast<std::size_t>(e) * pitch, size, all};
}

}  // namespace

/// The bytes between experts, where they are the same for all, as of weights that lie in one tensor; else 0.
std::size_t common_pitch(std::span<const PackedWeight> weights) {
  const auto at = [&](std::size_t e) { return weights[e].bytes().data(); };
  if (weights.size() == 1) return weights[0].bytes().size();
  const std::ptrdiff_t pitch = at(1) - at(0);
  if (pitch < std::ssize(weights[0].bytes())) return 0;
  for (std::size_t e = 2; e < weights.size(); ++e)
    if (at(e) - at(e - 1) != pitch) return 0;
  return static_cast<std::size_t>(pitch);
}

Result<PackedExperts> PackedExperts::on_device(std::vector<PackedWeight> weights) {
  const auto count = std::ssize(weights);
  const auto data = [&](std::int64_t e) -> const PackedWeightData& { return weights[static_cast<std::size_t>(e)].data(); };
  constexpr std::size_t kApart = 256;  // as cudaMalloc aligns
  const std::size_t there = common_pitch(weights);
  const std::size_t pitch = there != 0 ? there : (data(0).bytes.size() + kApart - 1) / kApart * kApart;
  using OnDevice = PackedWeightData::OnDevice;
  Buffer OnDevice::*const kParts[] = {&OnDevice::perm, &OnDevice::prescale, &OnDevice::bias};
  std::shared_ptr<DeviceMemory> copied;
  if (there == 0) {
    NIBBLE_ASSIGN_OR_RETURN(copied, side_by_side(count, pitch, [&](std::int64_t e) -> const Buffer& { return data(e).bytes; }));
  }
  /// Records of expert e: of the copy, or where they are, as long as the weight lives.
  const auto records = [&](std::int64_t e) {
    if (copied != nullptr) return part_of(copied, e, pitch, data(e).bytes.size());
    auto owner = std::make_shared<PackedWeight>(weights[static_cast<std::size_t>(e)]);
    return Buffer(const_cast<std::byte*>(data(e).bytes.data()), data(e).bytes.size(), std::move(owner));
  };
  std::shared_ptr<DeviceMemory> parts[std::size(kParts)];
  for (std::size_t i = 0; i < std::size(kParts); ++i) {
    const std::size_t size = (data(0).device.*kParts[i]).size();
    if (size == 0) continue;
    NIBBLE_ASSIGN_OR_RETURN(
        parts[i], side_by_side(count, size, [&](std::int64_t e) -> const Buffer& { return data(e).device.*kParts[i]; }));
  }
  std::shared_ptr<const DeviceMemory> scale2;
  if (std::ranges::any_of(weights, [](const PackedWeight& w) { return w.data().scale2.has_value(); })) {
    std::vector<float> scales(static_cast<std::size_t>(count));
    for (std::int64_t e = 0; e < count; ++e) scales[static_cast<std::size_t>(e)] = data(e).scale2.value_or(1.0f);
    NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(scales.size() * sizeof(float)));
    NIBBLE_RETURN_IF_ERROR(copy_to_device(memory.data(), scales.data(), memory.size()));
    scale2 = std::make_shared<const DeviceMemory>(std::move(memory));
  }
  NIBBLE_RETURN_IF_ERROR(synchronize());  // before what was copied is freed
  std::vector<PackedWeight> experts;
  for (std::int64_t e = 0; e < count; ++e) {
    auto own = std::make_shared<PackedWeightData>();
    static_cast<PackedWeightHeader&>(*own) = data(e);
    own->bytes = records(e);
    for (std::size_t i = 0; i < std::size(kParts); ++i)
      if (const std::size_t size = (data(e).device.*kParts[i]).size(); size != 0)
        own->device.*kParts[i] = part_of(parts[i], e, size, size);
    experts.emplace_back(std::move(own), weights[static_cast<std::size_t>(e)].spec());
  }
  auto plain = std::make_shared<PackedWeightData>();
  static_cast<PackedWeightHeader&>(*plain) = data(0);
  plain->bytes = records(0);
  if (parts[2] != nullptr) plain->device.bias = part_of(parts[2], 0, data(0).device.bias.size(), data(0).device.bias.size());
  plain->perm.clear(), plain->prescale = {}, plain->prescale_f32.clear(), plain->scale2.reset();
  PackedExperts packed(std::move(experts));
  packed.for_plans_.emplace(std::move(plain), weights.front().spec());
  packed.scale2_ = std::move(scale2);
  return packed;
}

namespace {

Result<PackedExperts> of_weights(std::vector<PackedWeight> weights) {
  if (weights.front().backend() == Backend::cuda) return PackedExperts::on_device(std::move(weights));
  return PackedExperts(std::move(weights));
}

}  // namespace

Result<PackedExperts> pack_each(std::int64_t count,
                                const std::function<Result<PackedWeight>(std::int64_t, const PackOptions&)>& pack_one,
                                const LinearSpec& spec, const PackOptions& options) {
  NIBBLE_RETURN_IF_ERROR(check_sizes({{"experts", count}}));
  std::vector<PackedWeight> experts;
  std::shared_ptr<Buffer> all;
  std::size_t pitch = 0;
  PackOptions same = options;  // as the first
  for (std::int64_t e = 0; e < count; ++e) {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack_one(e, same));
    if (e == 0) {
      same.layout = weight.layout();
      same.kernel.clear();
    } else if (const std::string what = difference(facts_of(experts.front()), facts_of(weight)); !what.empty()) {
      return error(StatusCode::invalid_argument, "experts 0 and {} differ: {}", e, what);
    }
    if (weight.backend() == Backend::cuda) {
      experts.push_back(weight);
      continue;
    }
    const std::span<const std::byte> bytes = weight.bytes();
    if (all == nullptr) {
      pitch = (bytes.size() + Buffer::kAlignment - 1) / Buffer::kAlignment * Buffer::kAlignment;
      all = std::make_shared<Buffer>(static_cast<std::size_t>(product({static_cast<std::int64_t>(pitch), count})));
    }
    std::byte* const to = all->data() + static_cast<std::size_t>(e) * pitch;
    std::memcpy(to, bytes.data(), bytes.size());
    auto data = std::make_shared<PackedWeightData>();
    static_cast<PackedWeightHeader&>(*data) = weight.data();
    data->bytes = Buffer(std::span<const std::byte>(to, bytes.size()), all);
    experts.emplace_back(std::move(data), spec);
  }
  return of_weights(std::move(experts));
}

Result<PackedExperts> pack_experts(std::int64_t count, const std::function<Result<QuantTensor>(std::int64_t)>& read,
                                   const LinearSpec& spec, const PackOptions& options) try {
  std::optional<Facts> first;
  const auto pack_one = [&](std::int64_t e, const PackOptions& same) -> Result<PackedWeight> {
    Result<QuantTensor> q = read(e);
    if (!q.ok()) return q.status().with_context(context(e));
    const Facts facts{describe(*q), !q->bias.empty()};
    if (!first) first = facts;
    if (const std::string what = difference(*first, facts); !what.empty())  // before the first one's layout refuses it
      return error(StatusCode::invalid_argument, "experts 0 and {} differ: {}", e, what);
    Result<PackedWeight> weight = pack(*q, spec, same);
    return weight.ok() ? std::move(weight) : weight.status().with_context(context(e));
  };
  return pack_each(count, pack_one, spec, options);
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
    if (weight.backend() != first.backend())
      return error(StatusCode::invalid_argument, "expert {} is in {} memory, expert 0 in {} memory", e,
                   weight.backend() == Backend::cuda ? "device" : "host", first.backend() == Backend::cuda ? "device" : "host");
    if (const std::string what = difference(facts_of(first), facts_of(weight)); !what.empty())
      return error(StatusCode::invalid_argument, "experts 0 and {} differ: {}", e, what);
    if (weight.layout() != first.layout() || weight.spec() != first.spec())
      return error(StatusCode::invalid_argument, "experts 0 and {} were packed for other specifications or layouts ({} and {})",
                   e, first.layout(), weight.layout());
  }
  return of_weights(std::move(weights));
} catch (...) {
  return caught();
}

Result<PackedExperts> pack_experts(std::span<const QuantTensor> experts, const LinearSpec& spec, const PackOptions& options) {
  return pack_experts(
      static_cast<std::int64_t>(experts.size()),
      [&](std::int64_t e) -> Result<QuantTensor> { return experts[static_cast<std::size_t>(e)]; }, spec, options);
}

}  // namespace nibble
