// Layouts: what is packed comes back, and lies where kernels look for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/code_rows.hpp"
#include "layouts/gpu_rows.hpp"
#include "layouts/gpu_w8.hpp"
#include "layouts/layout.hpp"
#include "layouts/tile.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using testing::random_weight;

TEST(Layouts, RoundTripOfEverySchemeAndAwkwardShapes) {
  std::uint64_t seed = 0;
  std::map<const Layout*, int> held;
  for (const Layout* layout : layout_table())
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {16, 32}, {33, 129}, {31, 64}, {65, 7}}) {
        ++seed;
        const QuantTensor q =
            random_weight(scheme, n, k, seed, {.act_order = seed % 2 == 0, .prescale = seed % 3 == 0, .bias = seed % 5 == 0});
        if (const std::string reason = refusal(*layout, q.scheme, q.zeros.dtype, q.k); !reason.empty()) {
          const Status status = pack(q, {.layout = std::string(layout->name)}).status();
          EXPECT_EQ(status.code(), StatusCode::unsupported);
          EXPECT_THAT(status.message(), HasSubstr(reason));
          continue;
        }
        ++held[layout];
        const auto packed = pack(q, {.layout = std::string(layout->name)});
        ASSERT_TRUE(packed.ok()) << packed.status().message();
        EXPECT_EQ(packed->layout(), layout->name);
        const auto back = unpack(*packed);
        ASSERT_TRUE(back.ok());
        EXPECT_TRUE(*back == q) << layout->name << " " << scheme.name() << " [" << n << "," << k << "]";
      }
  for (const Layout* layout : layout_table())
    EXPECT_GE(held[layout], layout == &kGpuRowsLayout ? 15 : 50) << layout->name;  // of dense weights alone
}

/// Layouts have parameters of each element of a filter; packed and unpacked they are one again, however they were packed.
TEST(Layouts, RoundTripOfGroupsThatElementsShare) {
  std::uint64_t seed = 0;
  for (const Layout* layout : layout_table())
    for (const ZeroKind zero : {ZeroKind::none, ZeroKind::integer, ZeroKind::offset}) {
      const DType codes = zero == ZeroKind::none ? DType::u4b8 : DType::u4;
      const WeightScheme shared{codes, zero, GroupShape::image_channels(16), DType::f16};
      const QuantTensor q = random_weight(shared, 35, 3 * 2 * 48, ++seed, {.bias = true, .filter = {3, 2}});
      if (!refusal(*layout, q.scheme, q.zeros.dtype, q.k).empty()) continue;
      const PackOptions options{.layout = std::string(layout->name)};
      const auto packed = pack(q, options);
      ASSERT_TRUE(packed.ok()) << packed.status().message();
      EXPECT_EQ(packed->scheme(), q.scheme);
      const auto back = unpack(*packed);
      ASSERT_TRUE(back.ok()) << back.status().message();
      EXPECT_TRUE(*back == q) << layout->name << " " << q.scheme.name();

      QuantTensor runs = q;  // the same weight with a copy of the parameters for each element
      runs.scheme.group.all_elements = false;
      for (Tensor QuantTensor::*field : {&QuantTensor::scales, &QuantTensor::zeros}) {
        const Tensor& one = q.*field;
        if (one.empty()) continue;
        Tensor& all = runs.*field = Tensor(one.dtype, {35, 18});
        const std::size_t width = static_cast<std::size_t>(bits(one.dtype) / 8);
        for (std::size_t i = 0; i < 35 * 18; ++i)
          std::copy_n(one.bytes.data() + (i / 18 * 3 + i % 3) * width, width, all.bytes.data() + i * width);
      }
      const auto of_runs = pack(runs, options);
      ASSERT_TRUE(of_runs.ok()) << of_runs.status().message();
      EXPECT_TRUE(std::ranges::equal(packed->bytes(), of_runs->bytes())) << layout->name << " " << q.scheme.name();
    }
}

/// The bytes of a packed weight do not depend on what its memory held before, those of padding included.
TEST(Layouts, EveryByteOfACpuLayoutIsWritten) {
  for (const Layout* layout : {&kTile16Layout, &kTile32Layout})
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {32, 64}, {33, 129}, {64, 72}}) {
        const QuantTensor q = random_weight(scheme, n, k, 7);
        if (!refusal(*layout, q.scheme, q.zeros.dtype, q.k).empty()) continue;
        PackedWeightData packed[2];
        for (int i = 0; i < 2; ++i) {
          packed[i].zero_type = q.zeros.dtype;
          packed[i].bytes = Buffer(layout->size(q.scheme, q.zeros.dtype, n, k));
          std::memset(packed[i].bytes.data(), i == 0 ? 0 : 0xa5, packed[i].bytes.size());
          std::vector<std::uint8_t> unused;
          layout->pack(q, *CodesOf(q).read(0, n, unused), packed[i]);
        }
        EXPECT_EQ(std::memcmp(packed[0].bytes.data(), packed[1].bytes.data(), packed[0].bytes.size()), 0)
            << layout->name << " " << scheme.name() << " [" << n << "," << k << "]";
      }
}

/// Codes that lie two to a byte.
std::vector<std::uint8_t> in_pairs(const QuantTensor& q, std::int64_t k_begin, std::int64_t k_end) {
  std::vector<std::uint8_t> pairs;
  for (std::int64_t n = 0; n < q.n; ++n)
    for (std::int64_t k = k_begin; k < k_end; k += 2) {
      const std::uint8_t* const code = q.codes.data() + n * q.k + k;
      pairs.push_back(static_cast<std::uint8_t>(code[0] | (k + 1 < k_end ? code[1] << 4 : 0xf0)));
    }
  return pairs;
}

/// Bands of channels, in any order, with codes of a byte or half a byte, give the bytes that rows of all channels do.
TEST(Layouts, BandsMakeTheBytesOfRows) {
  std::map<const Layout*, int> banded;
  for (const Layout* layout : layout_table())
    for (const WeightScheme& scheme : testing::all_schemes())
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {33, 129}, {64, 96}, {80, 260}, {7, 1024}}) {
        const QuantTensor q = random_weight(scheme, n, k, 11);
        if (!refusal(*layout, q.scheme, q.zeros.dtype, q.k).empty() || q.scheme.is_dense()) continue;
        PackedWeightData packed[2];
        for (PackedWeightData& p : packed) {
          p.scheme = q.scheme;
          p.n = n;
          p.k = k;
          p.zero_type = q.zeros.dtype;
          p.bytes = Buffer(layout->size(q.scheme, q.zeros.dtype, n, k));
        }
        if (!fits_bands(*layout, packed[0])) continue;
        std::vector<std::uint8_t> unused;
        layout->pack(q, *CodesOf(q).read(0, n, unused), packed[0]);
        const bool pairs = bits(scheme.codes) == 4;
        for (const std::int64_t band : {kBandUnit, 3 * kBandUnit}) {
          std::memset(packed[1].bytes.data(), 0xa5, packed[1].bytes.size());
          for (std::int64_t i = (k - 1) / band; i >= 0; --i) {
            const std::int64_t k_begin = i * band, k_end = std::min(k, k_begin + band);
            const std::vector<std::uint8_t> halves = in_pairs(q, k_begin, k_end);
            layout->pack(q,
                         pairs ? CodeRows{0, n, k_begin, k_end, halves.data(), (k_end - k_begin + 1) / 2, true}
                               : CodeRows{0, n, k_begin, k_end, q.codes.data() + k_begin, k},
                         packed[1]);
          }
          EXPECT_TRUE(std::ranges::equal(packed[0].bytes.span(), packed[1].bytes.span()))
              << layout->name << " " << scheme.name() << " [" << n << "," << k << "] in bands of " << band;
          ++banded[layout];
        }
      }
  for (const Layout* layout : layout_table()) {
    if (layout->channels == 0) continue;
    EXPECT_EQ(kBandUnit % layout->channels, 0) << layout->name;
    EXPECT_GE(banded[layout], 100) << layout->name;
  }
  EXPECT_GE(banded.size(), 2U);
}

/// Groups that begin inside of an octet, and act-order, need rows of all channels.
TEST(Layouts, BandsFitWholeOctetsInOrder) {
  PackedWeightData packed;
  packed.scheme = {DType::u4, ZeroKind::integer, GroupShape::group(32), DType::f16};
  packed.n = 16;
  packed.k = 120;
  EXPECT_TRUE(fits_bands(kTile32Layout, packed));
  EXPECT_FALSE(fits_bands(kPlainLayout, packed));
  packed.scheme.group = GroupShape::group(12);
  EXPECT_FALSE(fits_bands(kTile32Layout, packed));
  packed.scheme.group = GroupShape::channel();
  EXPECT_TRUE(fits_bands(kTile32Layout, packed));
  packed.perm.assign(120, 0);
  EXPECT_FALSE(fits_bands(kTile32Layout, packed));
}

/// Kernels of gpu_w8n64k128 multiply what is stored as signed bytes: the value of a code less that of a zero point is the difference of both
/// as they are stored, in the middle of the codes of every type.
TEST(Layouts, BytesOfGpuW8AreSignedCodes) {
  constexpr std::int64_t n = 70, k = 200;
  for (const WeightScheme& scheme : testing::whole_row_schemes()) {
    SCOPED_TRACE(scheme.name());
    const QuantTensor q = random_weight(scheme, n, k, 3);
    ASSERT_EQ(gpu_w8::refusal(scheme, q.zeros.dtype, k), "");
    const auto packed = pack(q, {.layout = "gpu_w8n64k128"});
    ASSERT_TRUE(packed.ok()) << packed.status().message();
    const std::byte* const bytes = packed->bytes().data();
    const gpu_w8::Geometry geo = gpu_w8::geometry(scheme, n, k);
    const auto integer_at = [&](std::int64_t offset) {
      std::int32_t value = 0;
      std::memcpy(&value, bytes + offset, 4);
      return value;
    };
    const int reach = 1 << (bits(scheme.codes) - 1);
    for (std::int64_t row = 0; row < n; ++row) {
      const std::int64_t of_row = scheme.group.n == 0 ? 0 : row;
      const int zero = geo.has_zeros ? integer_at(geo.zeros_offset() + 4 * row) : 0;
      const int wanted_zero = geo.has_zeros ? static_cast<int>(q.zeros.at(of_row)) : 0;
      int sum = 0;
      for (std::int64_t channel = 0; channel < k; ++channel) {
        const std::int64_t record =
            geo.record(static_cast<int>(row / gpu_w8::kRows), static_cast<int>(channel / gpu_w8::kChannels));
        const int place = gpu_w8::place(static_cast<int>(row % gpu_w8::kRows), static_cast<int>(channel % gpu_w8::kChannels));
        const auto stored = static_cast<std::int8_t>(bytes[record + place]);
        const auto code = static_cast<int>(code_value(scheme.codes, q.codes[static_cast<std::size_t>(row * k + channel)]));
        ASSERT_EQ(stored - zero, code - wanted_zero) << row << "," << channel;
        ASSERT_TRUE(stored >= -reach && stored < reach) << row << "," << channel;
        sum += stored;
      }
      ASSERT_EQ(integer_at(geo.sums_offset() + 4 * row), sum) << row;
    }
  }
}

/// The planes of every code width tile its bits, and every (plane, row, channel) has a distinct place.
TEST(Layouts, BitPlanesAreAPartition) {
  for (int bits = 1; bits <= 8; ++bits)
    for (int rows : {16, 32}) {
      const tile::Planes planes = tile::planes(bits);
      int shift = 0;
      std::int64_t bytes = 0;
      for (int p = 0; p < planes.count; ++p) {
        const auto [width, at] = planes.plane[static_cast<std::size_t>(p)];
        EXPECT_EQ(at, shift);
        shift += width;
        std::set<std::pair<int, int>> places;
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < tile::kOctet; ++j) {
            const tile::BitPlace place = tile::place(rows, width, r, j);
            EXPECT_LT(place.byte, rows * width);
            EXPECT_LE(place.shift + width, 8);
            EXPECT_TRUE(places.insert({place.byte, place.shift}).second);
          }
        bytes += rows * width;
      }
      EXPECT_EQ(shift, bits);
      EXPECT_EQ(bytes, rows * bits);
    }
}

}  // namespace
}  // namespace nibble
