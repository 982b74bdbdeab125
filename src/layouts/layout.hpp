// Packed layouts: the byte orders that kernels read.
//
// Adding a layout: one file that fills a Layout, one line in table.cpp. The round-trip test covers it from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/buffer.hpp"
#include "core/code_rows.hpp"
#include "nibble/device.hpp"
#include "nibble/scheme.hpp"
#include "nibble/status.hpp"
#include "nibble/tensor.hpp"

namespace nibble {

struct Layout;

/// The data that all layouts share; on the host, even if the packed bytes are not.
struct PackedWeightHeader {
  const Layout* layout = nullptr;
  WeightScheme scheme;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Extent filter;
  DType zero_type = DType::none;
  std::optional<float> scale2;
  /// Act-order: the packed position i holds input channel perm[i], so that groups are contiguous; empty: in order.
  std::vector<std::int32_t> perm;
  /// Of a weight packed for a glu: its rows lie in pairs, 2j and 2j + 1 for channels j and N/2 + j, so that a kernel has the factors of an
  /// output side by side. Its bias lies in the order of channels.
  bool paired = false;
  Tensor prescale;
  std::vector<float> prescale_f32;  // prescale, ready for kernels
  Tensor bias;
  std::optional<StaticActs> static_acts;
  std::optional<float> act_limit;
  /// Σ(q − z) over K of each output channel: integers, by which a zero point of the activations is multiplied (W8A8). Of weights in host
  /// memory with one scale per channel and integer codes and zeros, else empty; followed by zeros, up to a whole row block.
  std::vector<double> channel_sums;

  std::int64_t group_size() const { return scheme.group.k == 0 ? k : scheme.group.k; }
  std::int64_t groups() const { return scheme.group.cols(k); }
};

/// The data of a PackedWeight.
struct PackedWeightData : PackedWeightHeader {
  /// The backend of the layout.
  Buffer bytes;
  /// Copies for kernels, where `bytes` is in device memory; empty where there is nothing to copy.
  struct OnDevice {
    Buffer perm;      // s32 [K]
    Buffer prescale;  // f32 [K]
    Buffer bias;      // [N] of bias.dtype
  } device;

  Backend backend() const { return bytes.on_device() ? Backend::cuda : Backend::cpu; }
};

struct Layout {
  std::string_view name;
  /// Of the order of bytes, which files of packed weights record: raise it with every change of what pack() writes or size() returns,
  /// and older files are refused instead of misread.
  int version = 1;
  /// The bytes of one record, drawn; printed by `nibble doctor --layouts` and in the docs.
  std::string_view drawing;
  /// The backend whose kernels read it: cpu or cuda.
  Backend backend = Backend::cpu;
  /// Why it cannot hold such a weight, with the values; empty when it can. Null: it holds everything.
  std::string (*refusal)(const WeightScheme& scheme, DType zero_type, std::int64_t k) = nullptr;
  /// Packed size in bytes.
  std::size_t (*size)(const WeightScheme& scheme, DType zero_type, std::int64_t n, std::int64_t k);
  /// The output channels that it keeps together: a power of two.
  int rows = 1;
  /// The input channels of a group that it keeps together, where it takes bands of channels: a divisor of kBandUnit. 0: it takes rows of
  /// all channels only.
  int channels = 0;
  /// Fills what packed.bytes (of size() bytes, host memory) has of some rows: whole blocks of `rows` of them, or up to the last row; or of a
  /// band of channels of all rows, for weights that fits_bands() admits. Scales and zeros are those of q, whose codes are not read;
  /// everything else of `packed` is set. What is not of a block of rows belongs to row 0. Several threads may pack different rows, or bands.
  void (*pack)(const QuantTensor& q, const CodeRows& codes, PackedWeightData& packed);
  /// Fills q.codes, q.scales, q.zeros (allocated); everything else of `q` is set.
  void (*unpack)(const PackedWeightData& packed, QuantTensor& q);
};

/// Why the layout cannot hold such a weight; empty when it can.
std::string refusal(const Layout& layout, const WeightScheme& scheme, DType zero_type, std::int64_t k);

/// Whether pack() takes bands: groups consist of whole runs of the channels that the layout keeps together, and are packed in their order.
bool fits_bands(const Layout& layout, const PackedWeightHeader& weight);

/// All layouts.
std::span<const Layout* const> layout_table();
/// The layout of that name; null when there is none.
const Layout* find_layout(std::string_view name);

extern const Layout kGpuTileLayout;
extern const Layout kGpuW8Layout;
extern const Layout kPlainLayout;
extern const Layout kTile16Layout;
extern const Layout kTile32Layout;

}  // namespace nibble
