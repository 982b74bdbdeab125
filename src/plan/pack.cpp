// Packing: a layout is chosen, its bytes are filled.
#include <algorithm>
#include <new>
#include <numeric>

#include "core/error.hpp"
#include "kernels/cuda/launch/device_weight.hpp"
#include "layouts/layout.hpp"
#include "nibble/plan.hpp"
#include "plan/choose.hpp"

namespace nibble {

std::vector<LayoutInfo> layouts() {
  std::vector<LayoutInfo> list;
  for (const Layout* layout : layout_table()) list.push_back({layout->name, layout->backend, layout->drawing});
  return list;
}

const WeightScheme& PackedWeight::scheme() const { return data_->scheme; }
std::int64_t PackedWeight::n() const { return data_->n; }
std::int64_t PackedWeight::k() const { return data_->k; }
Extent PackedWeight::filter() const { return data_->filter; }
std::string_view PackedWeight::layout() const { return data_->layout->name; }
Backend PackedWeight::backend() const { return data_->backend(); }
std::span<const std::byte> PackedWeight::bytes() const { return data_->bytes.span(); }
bool PackedWeight::has_bias() const { return !data_->bias.empty(); }
bool PackedWeight::act_order() const { return !data_->perm.empty(); }

Result<PackedWeight> pack(const QuantTensor& q, const PackOptions& options) try {
  NIBBLE_RETURN_IF_ERROR(q.validate());
  const DType zero_type = q.zeros.dtype;
  NIBBLE_ASSIGN_OR_RETURN(const Packing packing, choose_packing(q, options));
  const Layout* layout = packing.layout;

  auto packed = std::make_shared<PackedWeightData>();
  packed->layout = layout;
  packed->scheme = q.scheme;
  packed->n = q.n;
  packed->k = q.k;
  packed->filter = q.filter;
  packed->zero_type = zero_type;
  packed->scale2 = q.scale2;
  packed->prescale = q.prescale;
  if (!q.prescale.empty())
    for (std::int64_t k = 0; k < q.k; ++k) packed->prescale_f32.push_back(q.prescale.at(k));
  packed->bias = q.bias;
  packed->static_acts = q.static_acts;
  packed->act_limit = q.act_limit;
  if (!q.g_idx.empty()) {  // stable, so that unpack can restore g_idx
    packed->perm.resize(static_cast<std::size_t>(q.k));
    std::iota(packed->perm.begin(), packed->perm.end(), 0);
    std::ranges::stable_sort(packed->perm, {}, [&](std::int32_t k) { return q.g_idx[static_cast<std::size_t>(k)]; });
  }
  Executor& executor = options.executor != nullptr ? *options.executor : default_executor();
  try {
    if (packing.memory == Backend::cuda) {
      NIBBLE_RETURN_IF_ERROR(cuda::pack(q, *packed, executor));
    } else {
      packed->bytes = Buffer(layout->size(q.scheme, zero_type, q.n, q.k));
      layout->pack(q, *packed, executor);
    }
  } catch (const std::bad_alloc&) {
    return error(StatusCode::io_error, "no memory for the {} bytes of W[{},{}] packed as {}",
                 layout->size(q.scheme, zero_type, q.n, q.k), q.n, q.k, layout->name);
  }
  return PackedWeight(std::move(packed));
} catch (...) {
  return caught();
}

Result<QuantTensor> unpack(const PackedWeight& weight) try {
  const PackedWeightData& packed = weight.data();
  QuantTensor q;
  q.scheme = packed.scheme;
  q.n = packed.n;
  q.k = packed.k;
  q.filter = packed.filter;
  q.scale2 = packed.scale2;
  q.prescale = packed.prescale;
  q.bias = packed.bias;
  q.static_acts = packed.static_acts;
  q.act_limit = packed.act_limit;
  q.codes.resize(static_cast<std::size_t>(q.n * q.k));
  const std::vector<std::int64_t> shape{q.scheme.group.rows(q.n), q.groups()};
  q.scales = Tensor(q.scheme.scale, shape);
  if (packed.zero_type != DType::none) q.zeros = Tensor(packed.zero_type, shape);
  if (!packed.perm.empty()) {
    q.g_idx.resize(static_cast<std::size_t>(q.k));
    for (std::int64_t i = 0; i < q.k; ++i)
      q.g_idx[static_cast<std::size_t>(packed.perm[static_cast<std::size_t>(i)])] =
          static_cast<std::int32_t>(i / packed.group_size());
  }
  if (packed.backend() == Backend::cuda) {
    NIBBLE_ASSIGN_OR_RETURN(const PackedWeightData on_host, cuda::download(packed));
    packed.layout->unpack(on_host, q);
  } else {
    packed.layout->unpack(packed, q);
  }
  return q;
} catch (...) {
  return caught();
}

}  // namespace nibble
