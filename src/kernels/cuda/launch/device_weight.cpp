#include "kernels/cuda/launch/device_weight.hpp"

#include <memory>
#include <new>

#include "core/error.hpp"
#include "kernels/cuda/launch/launch.hpp"
#include "nibble/cuda.hpp"
#include "nibble/plan.hpp"

namespace nibble {

Buffer cuda::as_buffer(DeviceMemory memory) {
  if (memory.data() == nullptr) return {};
  std::byte* const data = memory.data();
  const std::size_t size = memory.size();
  return {data, size, std::make_shared<DeviceMemory>(std::move(memory))};
}

namespace {

using cuda::as_buffer;

/// A copy in device memory; nothing of nothing.
Result<DeviceMemory> to_device(std::span<const std::byte> bytes) {
  if (bytes.empty()) return DeviceMemory();
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::allocate(bytes.size()));
  NIBBLE_RETURN_IF_ERROR(copy_to_device(memory.data(), bytes.data(), bytes.size()));
  return memory;
}

/// The parts of the header that kernels read.
Result<PackedWeightData::OnDevice> parts_to_device(const PackedWeightHeader& header) {
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory perm, to_device(std::as_bytes(std::span(header.perm))));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory prescale, to_device(std::as_bytes(std::span(header.prescale_f32))));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory bias, to_device(header.bias.bytes));
  return PackedWeightData::OnDevice{as_buffer(std::move(perm)), as_buffer(std::move(prescale)), as_buffer(std::move(bias))};
}

}  // namespace

Result<PackedWeight> upload(const PackedWeight& weight) try {
  const PackedWeightData& from = weight.data();
  if (from.backend() == Backend::cuda) return weight;
  if (from.layout->backend != Backend::cuda)
    return error(StatusCode::invalid_argument, "layout {} is for the CPU; pack with Backend::cuda, or for layout {} or {}",
                 from.layout->name, kGpuTileLayout.name, kGpuW8Layout.name);
  auto packed = std::make_shared<PackedWeightData>();
  static_cast<PackedWeightHeader&>(*packed) = from;
  NIBBLE_ASSIGN_OR_RETURN(packed->device, parts_to_device(from));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory bytes, to_device(from.bytes.span()));
  packed->bytes = as_buffer(std::move(bytes));
  return PackedWeight(std::move(packed), weight.spec());
} catch (const std::bad_alloc&) {
  return error(StatusCode::io_error, "no host memory to upload the {} bytes of W[{},{}]", weight.bytes().size(), weight.n(),
               weight.k());
}

namespace cuda {

Status copy_parts(PackedWeightData& packed) {
  NIBBLE_ASSIGN_OR_RETURN(packed.device, parts_to_device(packed));
  return {};
}

Status pack(const QuantTensor& q, const CodeRows& all, PackedWeightData& packed) {
  NIBBLE_RETURN_IF_ERROR(copy_parts(packed));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory codes,
                          to_device(std::as_bytes(std::span(all.data, static_cast<std::size_t>(q.n * all.pitch)))));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory scales, to_device(gpu_tile::stored_scales(q.scales).bytes));
  NIBBLE_ASSIGN_OR_RETURN(const DeviceMemory zeros, to_device(q.zeros.bytes));
  const gpu_tile::Geometry geometry = gpu_tile::geometry(packed.scheme, packed.zero_type, packed.n, packed.k);
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory bytes, DeviceMemory::allocate(static_cast<std::size_t>(geometry.total_bytes())));
  const CanonicalArrays arrays{.codes = reinterpret_cast<const std::uint8_t*>(codes.data()),
                               .scales = scales.data(),
                               .zeros = zeros.data(),
                               .perm = reinterpret_cast<const std::int32_t*>(packed.device.perm.data())};
  NIBBLE_RETURN_IF_ERROR(launch_pack(geometry, packed.scheme, packed.zero_type, arrays, bytes.data(), {}));
  NIBBLE_RETURN_IF_ERROR(synchronize());  // before the arrays are freed
  packed.bytes = as_buffer(std::move(bytes));
  return {};
}

Status move_to_device(PackedWeightData& packed) {
  NIBBLE_RETURN_IF_ERROR(copy_parts(packed));
  NIBBLE_ASSIGN_OR_RETURN(DeviceMemory bytes, to_device(packed.bytes.span()));
  packed.bytes = as_buffer(std::move(bytes));
  return {};
}

Result<PackedWeightData> download(const PackedWeightData& packed) {
  PackedWeightData on_host{packed, Buffer(packed.bytes.size()), {}};
  NIBBLE_RETURN_IF_ERROR(copy_from_device(on_host.bytes.data(), packed.bytes.data(), packed.bytes.size()));
  return on_host;
}

DeviceWeight device_weight(const PackedWeightData& packed) {
  DeviceWeight weight{.records = packed.bytes.data(),
                      .geometry = gpu_tile::geometry(packed.scheme, packed.zero_type, packed.n, packed.k),
                      .codes = gpu_tile::stored_codes(packed.scheme.codes),
                      .scale_type = gpu_tile::stored_scale(packed.scheme.scale),
                      .zero = packed.scheme.zero,
                      .zero_base = static_cast<float>(code_bias(packed.scheme.codes)),
                      .scale2 = packed.scale2.value_or(1.0f),
                      .perm = reinterpret_cast<const std::int32_t*>(packed.device.perm.data()),
                      .prescale = reinterpret_cast<const float*>(packed.device.prescale.data()),
                      .per_channel = packed.scheme.group.k == 0 || packed.scheme.group.k >= packed.k};
  switch (weight.zero) {
    case ZeroKind::none: break;
    case ZeroKind::integer:  // code − bias − (zero − its bias)
      weight.zero_base -= static_cast<float>(gpu_tile::zero_bias(packed.zero_type));
      break;
    case ZeroKind::offset:
    case ZeroKind::real: weight.zero_type = packed.zero_type; break;
  }
  return weight;
}

NextWeight next_weight(const PackedWeight* next) {
  if (next == nullptr) return {};
  const std::span<const std::byte> bytes = next->bytes();
  return next_weight(bytes.data(), static_cast<std::int64_t>(bytes.size()));
}

}  // namespace cuda
}  // namespace nibble
