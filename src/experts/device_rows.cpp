#include "experts/device_rows.hpp"

#include "core/error.hpp"
#include "layouts/layout.hpp"

namespace nibble::experts {

Status check_device_experts(std::int64_t count) {
  if (count <= cuda::kMostExperts) return {};
  return error(StatusCode::unsupported, "{} experts: on the GPU a layer has up to {}", count, cuda::kMostExperts);
}

bool changes_channels(const PackedExperts& experts) {
  const PackedWeightData& first = experts[0].data();
  return !first.perm.empty() || !first.prescale.empty();
}

bool are_vectors(const ConstTensorView& rows) {
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.stride(0) * bits(rows.dtype) % 128 == 0;
}

cuda::GatherRowsTask gathering(const PackedExperts& experts, const ConstTensorView& from, std::int64_t rows, void* to) {
  const PackedWeightData::OnDevice& parts = experts[0].data().device;
  return {.from = from.data,
          .from_stride = from.stride(0),
          .type = from.dtype,
          .to = to,
          .to_stride = gathered_pitch(from.dim(1)),
          .rows = rows,
          .columns = from.dim(1),
          .sources = static_cast<int>(from.dim(0)),
          .perm = reinterpret_cast<const std::int32_t*>(parts.perm.data()),
          .prescale = reinterpret_cast<const float*>(parts.prescale.data()),
          .parameter_pitch = experts.k()};
}

cuda::ExpertTiles tiles_of(const PackedExperts& experts, const cuda::SortTask& sorted, const cuda::SortTask::Tiles& tiles) {
  const PackedWeightData& first = experts[0].data();
  return {.tiles = tiles.tiles,
          .count = tiles.count,
          .most = cuda::most_tiles(sorted.rows, sorted.experts, tiles.rows),
          .weight_pitch = experts.count() == 1 ? 0 : experts[1].bytes().data() - experts[0].bytes().data(),
          .scale2 = experts.scale2_on_device(),
          .expert_of = sorted.expert_of,
          .bias_pitch = static_cast<std::int64_t>(first.device.bias.size())};
}

}  // namespace nibble::experts
