// What the conformance tests of convolutions share: geometry, images and operands from seeds, and how a row of the kernel table is run on
// them and compared with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "rows.hpp"

namespace nibble {

/// Filter 1…7, stride 1…3, dilation 1…3, padding up to the filter's size, odd sizes, groups, depthwise. Kernels for sm_90 need one group,
/// and channels that are a multiple of 64; kernels for sm_80 need channels that are a multiple of 8, or 16 or 64 for codes, and outputs of
/// a group that are a multiple of 64. AMX multiplies patches in place where channels of a group are a multiple of 64.
ConvGeometry random_geometry(std::uint64_t seed, Isa isa = Isa::baseline);
/// The same for a kernel; those of the GPU that multiply patches in memory need one group, and nothing else.
ConvGeometry random_geometry(std::uint64_t seed, const Kernel& kernel);
std::string describe(const ConvGeometry& g);
std::string scheme_name(const QuantTensor& q, const ActScheme& act);
ImageLayout layout_of(std::uint64_t bit);

/// An image in memory: dense, or a slice of one with more channels.
struct Images {
  Tensor memory;
  TensorView view;

  Images(DType type, ImageLayout layout, std::int64_t b, std::int64_t c, std::int64_t h, std::int64_t w, std::int64_t more = 0);
  void fill_random(std::uint64_t seed);
};

struct ConvCase {
  ConvSpec spec;
  std::int64_t batch = 1;
  std::int64_t more = 0;  // further channels in the memory of A, D, gate and residual
  std::uint64_t seed = 1;
};

/// Operands of an epilogue that uses all of them.
struct ConvOperands {
  Images gate, residual;
  Tensor col_scale, sum_bias, out_scale;

  explicit ConvOperands(const ConvCase& c);
  Operands args(const QuantTensor& q) const;
};

/// Packs, plans and runs; D as [B·Oh·Ow, Co]. Memory beside D must not change.
Tensor run_conv(const QuantTensor& q, const ConvCase& c, const Images& a, const Operands& args, std::string_view kernel,
                Executor* executor = nullptr);
/// Within the bound, element by element.
void expect_within_bound(const QuantTensor& q, const ConvCase& c, const Images& a, const Operands& args, const Tensor& d,
                         const Kernel& kernel);

bool takes(const Kernel& kernel, const WeightScheme& scheme, const ConvSpec& spec);
/// Images that come as codes are never prescaled.
bool takes_prescale(const Kernel& kernel, const QuantTensor& q, const ConvSpec& spec);
std::vector<const Kernel*> conv_kernels(bool (*which)(const Kernel&) = nullptr);

const std::vector<WeightScheme>& conv_schemes();
/// Groups of image channels that do not divide them are runs of K instead.
QuantTensor conv_weight(WeightScheme scheme, const ConvGeometry& g, std::uint64_t seed, bool bias);
/// A factor for each channel of a group.
Tensor random_prescale(const ConvGeometry& g, std::uint64_t seed);

}  // namespace nibble
