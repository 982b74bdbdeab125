#include "packed/parts.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <variant>

#include "checkpoint/io/json.hpp"
#include "core/error.hpp"
#include "core/weight_check.hpp"
#include "kernels/finish.hpp"
#include "plan/check.hpp"
#include "plan/pack.hpp"

namespace nibble::packed {

using storage::printable;
namespace {

Status check_floats(const TensorInfo& tensor, std::int64_t length) {
  if (is_compute_float(tensor.dtype)) return check_tensor(tensor, tensor.dtype, length);
  return error(StatusCode::corrupt_data, "tensor {} is {}, expected f32, f16 or bf16", printable(tensor.name),
               name(tensor.dtype));
}

/// Whether the sums can be those of a weight: kernels convert them to integers.
Status check_sums(const std::vector<double>& sums, const PackedWeightHeader& header) {
  const double most = 512.0 * static_cast<double>(header.k);  // codes and zero points have up to 8 bits
  const auto bad = std::ranges::find_if(sums, [&](double sum) { return !(std::abs(sum) <= most) || sum != std::trunc(sum); });
  if (bad == sums.end()) return {};
  return error(StatusCode::corrupt_data, "channel_sums[{}] is {}, not a whole number of at most {}", bad - sums.begin(), *bad,
               most);
}

/// Whether every input channel is there once.
Status check_perm(const std::vector<std::int32_t>& perm) {
  std::vector<bool> seen(perm.size());
  for (std::size_t i = 0; i < perm.size(); ++i) {
    const auto channel = static_cast<std::size_t>(static_cast<std::uint32_t>(perm[i]));
    if (channel >= perm.size() || seen[channel])
      return error(StatusCode::corrupt_data, "perm[{}] is {}, {}", i, perm[i],
                   channel >= perm.size() ? fmt::format("outside [0,{})", perm.size()) : "for the second time");
    seen[channel] = true;
  }
  return {};
}

template <class T>
std::vector<T> elements(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.as<T>() + tensor.numel()};
}

template <class T>
Tensor tensor_of(const std::vector<T>& values) {
  Tensor tensor(dtype_of<T>, {static_cast<std::int64_t>(values.size())});
  std::ranges::copy(std::as_bytes(std::span(values)), tensor.bytes.begin());
  return tensor;
}

}  // namespace

std::vector<std::pair<std::string_view, Tensor>> small_tensors(const PackedWeightHeader& weight) {
  std::vector<std::pair<std::string_view, Tensor>> list{{"perm", tensor_of(weight.perm)},
                                                        {"prescale", weight.prescale},
                                                        {"bias", weight.bias},
                                                        {"channel_sums", tensor_of(weight.channel_sums)}};
  std::erase_if(list, [](const auto& item) { return item.second.bytes.empty(); });
  return list;
}

WeightDesc desc_of(const PackedWeightHeader& header, const SmallTensors& small) {
  return {.scheme = header.scheme,
          .n = header.n,
          .k = header.k,
          .zero_type = header.zero_type,
          .filter = header.filter,
          .act_order = small.perm != nullptr,
          .prescale = small.prescale != nullptr,
          .static_acts = header.static_acts};
}

bool packed_in_pairs(const PackedWeight::Spec& spec, const WeightScheme& scheme) {
  const auto* const linear = std::get_if<LinearSpec>(&spec);
  return linear != nullptr && pairs_rows(linear->epilogue, scheme);
}

Status check_tensor(const TensorInfo& tensor, DType dtype, std::int64_t length) {
  if (tensor.dtype == dtype && tensor.shape == std::vector<std::int64_t>{length}) return {};
  return error(StatusCode::corrupt_data, "tensor {} is {} [{}], expected {} [{}]", printable(tensor.name), name(tensor.dtype),
               fmt::join(tensor.shape, ","), name(dtype), length);
}

Status check(const Description& description, const SmallTensors& small) {
  const PackedWeightHeader& header = description.header;
  const auto corrupt = [](const Status& status) {
    return status.ok() ? status : Status(StatusCode::corrupt_data, status.message());
  };
  NIBBLE_RETURN_IF_ERROR(corrupt(check_weight({header.scheme, header.n, header.k, header.zero_type, header.filter,
                                               small.perm != nullptr, header.static_acts, header.act_limit})));
  if (header.scheme.is_dense() && header.scale2)
    return error(StatusCode::corrupt_data, "a dense weight has no scale2, this one is {}", *header.scale2);
  if (const std::string reason = refusal(*header.layout, header.scheme, header.zero_type, header.k); !reason.empty())
    return error(StatusCode::corrupt_data, "layout {} cannot hold it: {}", header.layout->name, reason);
  const std::size_t size = header.layout->size(header.scheme, header.zero_type, header.n, header.k);
  if (description.bytes != size)
    return error(StatusCode::corrupt_data, "has {} bytes, and W[{},{}] of {} in layout {} takes {}", description.bytes, header.n,
                 header.k, header.scheme.name(), header.layout->name, size);
  if (small.perm != nullptr) NIBBLE_RETURN_IF_ERROR(check_tensor(*small.perm, DType::s32, header.k));
  if (small.prescale != nullptr) NIBBLE_RETURN_IF_ERROR(check_floats(*small.prescale, header.k));
  if (small.bias != nullptr) NIBBLE_RETURN_IF_ERROR(check_floats(*small.bias, header.n));
  if (small.channel_sums != nullptr) {
    const std::size_t sums = channel_sums_length(header.scheme, header.n);
    if (sums == 0) return error(StatusCode::corrupt_data, "has channel_sums, which such a weight has not");
    NIBBLE_RETURN_IF_ERROR(check_tensor(*small.channel_sums, DType::f64, static_cast<std::int64_t>(sums)));
  }
  if (header.paired != packed_in_pairs(description.spec, header.scheme))
    return error(StatusCode::corrupt_data, "its rows lie {}in pairs, which is not as it was packed for",
                 header.paired ? "" : "not ");
  const WeightDesc desc = desc_of(header, small);
  return corrupt(std::visit([&](const auto& spec) { return check_spec(desc, spec); }, description.spec))
      .with_context("what it was packed for");
}

Result<std::shared_ptr<PackedWeightData>> without_bytes(const PackedWeightHeader& header, const SmallTensors& small,
                                                        const std::function<Result<Tensor>(const TensorInfo&)>& read) {
  auto weight = std::make_shared<PackedWeightData>();
  static_cast<PackedWeightHeader&>(*weight) = header;
  if (small.perm != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const Tensor perm, read(*small.perm));
    weight->perm = elements<std::int32_t>(perm);
    NIBBLE_RETURN_IF_ERROR(check_perm(weight->perm));
  }
  if (small.channel_sums != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(const Tensor sums, read(*small.channel_sums));
    weight->channel_sums = elements<double>(sums);
    NIBBLE_RETURN_IF_ERROR(check_sums(weight->channel_sums, header));
  }
  if (small.bias != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(weight->bias, read(*small.bias));
  }
  if (small.prescale != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(weight->prescale, read(*small.prescale));
    for (std::int64_t k = 0; k < header.k; ++k) weight->prescale_f32.push_back(weight->prescale.at(k));
  }
  return weight;
}

Result<PackedWeight> with_sums(const std::shared_ptr<PackedWeightData>& weight, const PackedWeight::Spec& spec) {
  PackedWeight whole(weight, spec);
  if (weight->channel_sums.empty() && channel_sums_length(weight->scheme, weight->n) != 0) {
    NIBBLE_ASSIGN_OR_RETURN(const QuantTensor q, unpack(whole));
    weight->channel_sums = channel_sums(q, default_executor());
  }
  return whole;
}

}  // namespace nibble::packed
