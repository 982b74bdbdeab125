// A weight in gpu_n64k128, as numbers and as an argument of kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/tasks/linear_task.hpp"
#include "layouts/gpu_tile.hpp"

namespace nibble::emulator {

/// Random codes [n][k] of a type, scales and zeros of groups of `group` channels: none, integers, offsets or float zeros. Scales, offsets and
/// float zeros are f16 or, as asked and as MXFP4's, bf16: numbers that f16 holds, too.
struct TileWeight {
  int n, k, bits, group;
  DType float_type;
  ZeroKind kind;
  gpu_tile::Codes type;
  std::vector<int> codes;
  std::vector<f16> scales, offsets;
  std::vector<int> zeros;
  std::vector<std::uint8_t> records;

  TileWeight(int n, int k, gpu_tile::Codes type, int group, ZeroKind kind, std::mt19937& random, DType floats = DType::f16)
      : n(n),
        k(k),
        bits(gpu_tile::bits(type)),
        group(group),
        float_type(type == gpu_tile::Codes::e2m1 && gpu_tile::span(group) > 16 ? DType::bf16 : floats),
        kind(kind),
        type(type) {
    const auto below = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
    for (int i = 0; i < n * k; ++i) {
      codes.push_back(below(1 << bits));
      if (type == gpu_tile::Codes::e4m3) codes.back() &= 0xbf;  // none is NaN, and they are of one size about
    }
    for (int i = 0; i < n * groups(); ++i) {
      scales.push_back(held(0.001f * static_cast<float>(1 + below(100))));
      zeros.push_back(kind == ZeroKind::integer ? below(1 << bits) : base());
      offsets.push_back(held(kind == ZeroKind::offset ? 0.01f * static_cast<float>(below(100)) : 0.0f));
      if (kind == ZeroKind::real) {  // some are far from every code
        const float number = static_cast<float>(below(100));
        offsets.back() = held(below(8) > 0 ? 0.1f * number : 12.3f * (number - 50));
      }
    }
    pack();
  }

  /// After a change of codes, scales or zeros.
  void repack() {
    records.clear();
    pack();
  }

  int groups() const { return (k + group - 1) / group; }
  std::size_t group_of(int row, int channel) const { return static_cast<std::size_t>(row * groups() + channel / group); }
  /// Of a channel: u − z or the value of a float, which is exact, and W.
  float number(int row, int channel) const {
    const int code = codes[static_cast<std::size_t>(row * k + channel)];
    switch (type) {
      case gpu_tile::Codes::e2m1: return code_value(DType::e2m1, static_cast<std::uint8_t>(code));
      case gpu_tile::Codes::e4m3: return code_value(DType::e4m3, static_cast<std::uint8_t>(code));
      default:
        return kind == ZeroKind::real ? static_cast<float>(code) - offset(row, channel)
                                      : static_cast<float>(code - zeros[group_of(row, channel)]);
    }
  }
  float scale(int row, int channel) const { return to_f32(scales[group_of(row, channel)]); }
  float offset(int row, int channel) const { return to_f32(offsets[group_of(row, channel)]); }
  double value(int row, int channel) const {
    const double product = static_cast<double>(scale(row, channel)) * static_cast<double>(number(row, channel));
    return kind == ZeroKind::offset ? product + static_cast<double>(offset(row, channel)) : product;  // −0 stays −0
  }

  cuda::DeviceWeight device() const {
    const bool own = kind == ZeroKind::integer;
    return {.records = records.data(),
            .geometry = geometry(),
            .codes = type,
            .scale_type = float_type,
            .zero = kind,
            .zero_type = float_type,
            .zero_base = own || kind == ZeroKind::real || gpu_tile::are_floats(type) ? 0.0f : static_cast<float>(base()),
            .per_channel = group >= k};
  }

 private:
  /// The number of the type of scales.
  f16 held(float x) const { return to_f16(float_type == DType::bf16 ? to_f32(to_bf16(x)) : x); }
  std::uint16_t stored(f16 x) const { return float_type == DType::bf16 ? to_bf16(to_f32(x)).bits : x.bits; }
  int base() const { return 1 << (bits - 1); }
  gpu_tile::Geometry geometry() const {
    return {.n = n,
            .k = k,
            .bits = bits,
            .span = gpu_tile::span(group),
            .scale_bytes = 2,
            .zero_bytes = kind == ZeroKind::none      ? 0
                          : kind == ZeroKind::integer ? 1
                                                      : 2};
  }
  void pack() {
    const gpu_tile::Geometry geo = geometry();
    records.resize(static_cast<std::size_t>(geo.total_bytes()));
    for (int row = 0; row < n; ++row)
      for (int channel = 0; channel < k; ++channel) {
        const int in_tile = row % gpu_tile::kRows, in_record = channel % gpu_tile::kChannels;
        std::uint8_t* record = records.data() + geo.record(row / gpu_tile::kRows, channel / gpu_tile::kChannels);
        const gpu_tile::Place place = gpu_tile::place(bits, in_tile, in_record);
        record[place.byte] =
            static_cast<std::uint8_t>(record[place.byte] | codes[static_cast<std::size_t>(row * k + channel)] << place.shift);
        const std::size_t from = group_of(row, channel);
        const int slot = in_record / geo.span, position = gpu_tile::slot_position(in_tile);
        const std::uint16_t scale = stored(scales[from]), offset = stored(offsets[from]);
        std::memcpy(record + geo.scale_offset(slot) + position * 2, &scale, 2);
        if (kind == ZeroKind::integer)
          record[geo.zero_offset(slot) + position] = static_cast<std::uint8_t>(zeros[from]);
        else if (kind != ZeroKind::none)
          std::memcpy(record + geo.zero_offset(slot) + position * 2, &offset, 2);
      }
  }
};

}  // namespace nibble::emulator
