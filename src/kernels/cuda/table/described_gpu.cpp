// GPUs that were measured, as their drivers describe them.
#include <algorithm>
#include <string>

#include <fmt/ranges.h>

#include "core/error.hpp"
#include "core/printable.hpp"
#include "nibble/cuda.hpp"

namespace nibble {
namespace {

constexpr std::uint32_t kHopper =
    1U << static_cast<int>(Isa::simt) | 1U << static_cast<int>(Isa::sm80) | 1U << static_cast<int>(Isa::sm90);

struct Described {
  std::string_view name;
  GpuInfo gpu;
};
const std::vector<Described>& described() {
  static const std::vector<Described> all = {
      {"h100",
       {.name = "NVIDIA H100 80GB HBM3",
        .compute_capability = 90,
        .sms = 132,
        .shared_bytes_per_block = 232448,
        .l2_bytes = 52428800,
        .memory_bytes = 85017493504,
        .read_gbytes_per_s = 3050.6112,
        .isas = kHopper}},
      {"h200",
       {.name = "NVIDIA H200",
        .compute_capability = 90,
        .sms = 132,
        .shared_bytes_per_block = 232448,
        .l2_bytes = 62914560,
        .memory_bytes = 150109880320,
        .read_gbytes_per_s = 4381.01664,
        .isas = kHopper}},
  };
  return all;
}

}  // namespace

std::vector<std::string_view> described_gpus() {
  std::vector<std::string_view> names;
  for (const Described& one : described()) names.push_back(one.name);
  return names;
}

Result<GpuInfo> described_gpu(std::string_view name) {
  const auto found = std::ranges::find(described(), name, &Described::name);
  if (found != described().end()) return found->gpu;
  return error(StatusCode::not_found, "no GPU is described as '{}'; there are {}", shown(name),
               fmt::join(described_gpus(), " and "));
}

}  // namespace nibble
