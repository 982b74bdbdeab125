// The list of packed layouts.
#include <algorithm>
#include <array>

#include "layouts/gpu_rows.hpp"
#include "layouts/layout.hpp"

namespace nibble {

std::span<const Layout* const> layout_table() {
  static constexpr std::array kTable{&kTile32Layout, &kTile16Layout,  &kGpuTileLayout,
                                     &kGpuW8Layout,  &kGpuRowsLayout, &kPlainLayout};
  return kTable;
}

const Layout* find_layout(std::string_view name) {
  const auto table = layout_table();
  const auto it = std::ranges::find_if(table, [&](const Layout* layout) { return layout->name == name; });
  return it == table.end() ? nullptr : *it;
}

bool fits_bands(const Layout& layout, const PackedWeightHeader& weight) {
  return layout.channels != 0 && weight.perm.empty() && (weight.groups() == 1 || weight.group_size() % layout.channels == 0);
}

std::string refusal(const Layout& layout, const WeightScheme& scheme, DType zero_type, std::int64_t k) {
  return layout.refusal == nullptr ? std::string() : layout.refusal(scheme, zero_type, k);
}

}  // namespace nibble
