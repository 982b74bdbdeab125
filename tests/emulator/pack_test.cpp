// Packing into gpu_n64k128 (pack.cu) on the emulated GPU: the bytes that the library writes on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "emulator/tile_weight.hpp"

#undef __shared__
#define __shared__ static

#include "kernels/cuda/weights/pack.cu"

namespace nibble::cuda {
namespace {

struct Case {
  int bits, group;
  ZeroKind zeros;
  int n, k;
  bool signed_codes = false, act_order = false;
};

class EmulatedPack : public testing::TestWithParam<Case> {};

TEST_P(EmulatedPack, WritesTheRecords) {
  const Case& c = GetParam();
  std::mt19937 random(static_cast<unsigned>(c.n + c.k));
  const emulator::TileWeight weight(c.n, c.k, gpu_tile::integers(c.bits), c.group, c.zeros, random);
  std::vector<std::int32_t> order(static_cast<std::size_t>(c.k));
  std::iota(order.begin(), order.end(), 0);
  if (c.act_order) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::uint8_t> codes(weight.codes.size());
  for (int n = 0; n < c.n; ++n)
    for (int k = 0; k < c.k; ++k)
      codes[static_cast<std::size_t>(n * c.k + order[static_cast<std::size_t>(k)])] =
          static_cast<std::uint8_t>(weight.codes[static_cast<std::size_t>(n * c.k + k)] ^ (c.signed_codes ? 0x80 : 0));
  const std::vector<std::uint8_t> zeros(weight.zeros.begin(), weight.zeros.end());
  const WeightScheme scheme{.codes = c.signed_codes ? DType::s8
                                     : c.bits == 4  ? DType::u4
                                                    : DType::u8,
                            .zero = c.zeros == ZeroKind::integer  ? ZeroKind::integer
                                    : c.zeros == ZeroKind::offset ? ZeroKind::offset
                                                                  : ZeroKind::none,
                            .group = c.group >= c.k ? GroupShape::channel() : GroupShape::group(c.group)};
  const gpu_tile::Geometry geometry = weight.device().geometry;
  alignas(16) static std::uint8_t records[1 << 20];
  const auto bytes = static_cast<std::size_t>(geometry.total_bytes());
  ASSERT_LT(bytes, sizeof records);
  std::memset(records, 0xa5, sizeof records);
  const void* const stored = c.zeros == ZeroKind::offset ? static_cast<const void*>(weight.offsets.data()) : zeros.data();
  ASSERT_EQ(
      pack_gpu_tile(geometry, scheme, c.zeros == ZeroKind::offset ? DType::f16 : DType::u8, codes.data(), weight.scales.data(),
                    c.zeros == ZeroKind::none ? nullptr : stored, c.act_order ? order.data() : nullptr, records, nullptr),
      cudaSuccess);
  for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(records[i], weight.records[i]) << i;
  for (std::size_t i = bytes; i < bytes + 64; ++i) ASSERT_EQ(records[i], 0xa5) << "written past the records";
}

constexpr Case kCases[] = {
    {4, 128, ZeroKind::none, 72, 400},        {4, 32, ZeroKind::integer, 136, 264},
    {4, 64, ZeroKind::offset, 64, 136},       {8, 128, ZeroKind::integer, 100, 530},
    {8, 1024, ZeroKind::none, 72, 264, true}, {4, 128, ZeroKind::integer, 72, 264, false, true},
    {4, 96, ZeroKind::integer, 72, 672},      {8, 192, ZeroKind::offset, 72, 530},
    {4, 8, ZeroKind::integer, 72, 400},       {8, 48, ZeroKind::offset, 72, 480},
};
INSTANTIATE_TEST_SUITE_P(Weights, EmulatedPack, testing::ValuesIn(kCases));

}  // namespace
}  // namespace nibble::cuda
