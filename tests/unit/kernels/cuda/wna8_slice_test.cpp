// The index maths of the decode kernel for online quantized activations (kernels/cuda/sm90/decode/wna8_decode.cu), simulated on the host:
// warps quantize a slice, and a record's matrix instructions read the right operands.
#include "kernels/cuda/tasks/wna8_slice.hpp"
#include "kernels/cuda/tasks/wna8_task.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/random.hpp"
#include "quantize/act_rule.hpp"

namespace nibble::cuda {
namespace {

constexpr int kWarps = 8;

/// Every warp, chunk and lane of a CTA: the codes that it writes, and the lanes that share its scale.
TEST(Wna8Slice, EveryCodeOfEveryTokenIsMadeOnce) {
  for (int m = 1; m <= 8; ++m)
    for (int group : {0, 32, 64, 128, 256})
      for (auto [first, records] : {std::pair{0, 1}, {3, 5}, {7, 8}, {0, 17}, {5, 64}}) {
        const int shift = token_shift(m), step = kWarps >> shift;
        EXPECT_GE(1 << shift, m);
        const Seen seen = seen_records(first, records, group);
        EXPECT_LE(seen.first, first);
        EXPECT_GE(seen.end, first + records);
        EXPECT_TRUE(group != 256 || (seen.first % 2 == 0 && seen.end % 2 == 0));
        std::map<std::pair<int, int>, int> made;  // token, channel / 8 of the slice
        for (int warp = 0; warp < kWarps; ++warp) {
          const int token = warp & ((1 << shift) - 1);
          for (int chunk = warp >> shift; token < m && chunk < seen.chunks(); chunk += step)
            for (int lane = 0; lane < 32; ++lane)
              for (int v = 0; v < kLaneVectors; ++v) {
                const int record = seen.first + chunk * kChunkRecords + lane / 4 - first;
                const int channel = (seen.first + chunk * kChunkRecords) * 128 + vector_channel(lane, v);
                EXPECT_EQ(channel / 128, first + record);
                EXPECT_EQ(channel / 32 % 4, vector_fold(lane, v));
                if (record >= 0 && record < records) ++made[{token, channel / 8 - first * 16}];
              }
        }
        EXPECT_EQ(made.size(), static_cast<std::size_t>(m * records * 16));
        for (const auto& [place, times] : made) EXPECT_TRUE(times == 1 && place.second >= 0 && place.second < records * 16);
      }
}

/// Shuffles of the kernel: lanes 1 and 2 apart have one fold or record, 4 apart the two records of 256 channels, v and v ^ 1 one 64.
TEST(Wna8Slice, LanesThatShareAScaleAreNeighbours) {
  for (int lane = 0; lane < 32; ++lane)
    for (int v = 0; v < kLaneVectors; ++v) {
      const int channel = vector_channel(lane, v);
      for (int apart : {1, 2}) EXPECT_EQ(vector_channel(lane ^ apart, v) / 32, channel / 32);
      for (int other = 0; other < kLaneVectors; ++other) EXPECT_EQ(vector_channel(lane, other) / 128, channel / 128);
      EXPECT_EQ(vector_channel(lane, v ^ 1) / 64, channel / 64);
      EXPECT_EQ(vector_channel(lane ^ 4, v) / 256, channel / 256);
      EXPECT_EQ(vector_channel(lane ^ 1, v) / 16, channel / 16);  // who swaps halves of 16
    }
}

TEST(Wna8Slice, CodesGoToDifferentBanks) {
  for (int v = 0; v < kLaneVectors; ++v)
    for (int half : {0, 16}) {  // eight bytes a lane: half a warp at a time
      std::set<int> banks;
      for (int lane = half; lane < half + 16; ++lane) banks.insert(vector_channel(lane, v) % 128 / 8);
      EXPECT_EQ(banks.size(), 16u);
    }
  for (int records : {1, 7, 32, 64, 112})
    for (int folds : {1, 4}) {
      const TokenRow row = token_row(records, folds);
      EXPECT_GE(row.tops, records * 128 + records * folds * 8);
      EXPECT_GE(row.pitch, row.tops + kMostRanks * 8);
      EXPECT_EQ(row.pitch % 32, 16);  // 8 tokens in 8 groups of banks
      EXPECT_EQ(row.terms % 8 + row.tops % 8, 0);
    }
}

/// A record of 64 rows × 128 channels times 8 tokens, by the instructions' definitions: LOP3 or PRMT, ldmatrix, m16n8k32.
TEST(Wna8Slice, ARecordTimesItsCodes) {
  for (int bits : {4, 8}) {
    std::array<std::array<int, 128>, 64> weight{};
    std::array<std::array<int, 128>, 8> act{};
    std::vector<std::uint8_t> record(static_cast<std::size_t>(gpu_tile::Geometry{.bits = bits}.code_bytes()));
    std::uint64_t seed = 1;
    for (int row = 0; row < 64; ++row)
      for (int channel = 0; channel < 128; ++channel) {
        const int code = static_cast<int>(random_bits(3, seed++) % (1u << bits));
        weight[static_cast<std::size_t>(row)][static_cast<std::size_t>(channel)] = code - (1 << (bits - 1));
        const auto [byte, shift] = gpu_tile::place(bits, row, channel);
        record[static_cast<std::size_t>(byte)] =
            static_cast<std::uint8_t>(record[static_cast<std::size_t>(byte)] | code << shift);
      }
    const TokenRow row = token_row(1, 1);
    std::vector<std::int8_t> shared(static_cast<std::size_t>(8 * row.pitch));
    for (int token = 0; token < 8; ++token)
      for (int channel = 0; channel < 128; ++channel)
        act[static_cast<std::size_t>(token)][static_cast<std::size_t>(channel)] =
            static_cast<int>(random_bits(4, seed++) % 255) - 127;
    for (int token = 0; token < 8; ++token)
      for (int lane = 0; lane < 4; ++lane)  // of record 0
        for (int v = 0; v < kLaneVectors; ++v)
          for (int i = 0; i < 8; ++i) {  // interleave(): lane 2j has the first 8 of 16 positions, 2j + 1 the others
            const int at = vector_channel(lane, v), block = at / 16 * 16;
            const int channel = block + gpu_tile::interleaved(at % 16 + i);
            shared[static_cast<std::size_t>(token * row.pitch + at + i)] =
                static_cast<std::int8_t>(act[static_cast<std::size_t>(token)][static_cast<std::size_t>(channel)]);
          }
    const int unit = bits == 4 ? 16 : 1;
    for (int fragment = 0; fragment < 4; ++fragment) {
      std::array<std::array<int, 8>, 16> dot{};
      for (int step = 0; step < 4; ++step) {
        std::array<std::array<int, 32>, 16> a{};
        std::array<std::array<int, 8>, 32> b{};
        for (int lane = 0; lane < 32; ++lane) {
          const int g = lane / 4, t = lane % 4, per_vector = bits == 4 ? 2 : 1;
          const int vector = gpu_tile::vector_offset(step / per_vector, fragment, lane);
          for (int j = 0; j < 4; ++j)
            for (int half = 0; half < 2; ++half)         // of 16 channels
              for (int upper = 0; upper < 2; ++upper) {  // rows g, g + 8
                int value;
                if (bits == 4) {
                  const int word = step % 2 * 8 + half * 4;
                  const int byte = record[static_cast<std::size_t>(vector + word + j)];
                  value = static_cast<std::int8_t>(((upper == 0 ? byte << 4 : byte) ^ 0x80) & 0xf0);
                } else {
                  const int selector = (upper == 0 ? 0x5140 : 0x7362) >> (4 * j) & 7;
                  value = static_cast<std::int8_t>(record[static_cast<std::size_t>(vector + half * 8 + selector)] ^ 0x80);
                }
                a[static_cast<std::size_t>(g + upper * 8)][static_cast<std::size_t>(half * 16 + t * 4 + j)] = value;
              }
          // ldmatrix of 64 channels: matrix i has chunk i of 8 tokens; lane 4g + t gets bytes 4t … of token g.
          for (int half = 0; half < 2; ++half)
            for (int j = 0; j < 4; ++j) {
              const int chunk = step % 2 * 2 + half;
              const int address = g * row.pitch + step / 2 * 64 + chunk * 16 + t * 4 + j;
              b[static_cast<std::size_t>(half * 16 + t * 4 + j)][static_cast<std::size_t>(g)] =
                  shared[static_cast<std::size_t>(address)];
            }
        }
        for (std::size_t r = 0; r < 16; ++r)
          for (std::size_t n = 0; n < 8; ++n)
            for (std::size_t k = 0; k < 32; ++k) dot[r][n] += a[r][k] * b[k][n];
      }
      for (std::size_t r = 0; r < 16; ++r)
        for (std::size_t n = 0; n < 8; ++n) {
          int expected = 0;
          for (std::size_t k = 0; k < 128; ++k) expected += weight[static_cast<std::size_t>(fragment) * 16 + r][k] * act[n][k];
          EXPECT_EQ(dot[r][n], unit * expected)
              << bits << " bits, row " << fragment * 16 + static_cast<int>(r) << ", token " << n;
        }
    }
  }
}

TEST(Wna8Slice, TheQuickCodesAreTheRules) {
  const auto code = [](std::uint32_t bits) { return static_cast<std::int8_t>(bits & 0xff); };
  std::vector<float> values{0.0f,   -0.0f,  0.5f,   1.5f,    2.5f,    -0.5f,   -1.5f, 126.5f,
                            127.0f, 127.5f, 128.0f, -127.5f, -128.5f, -129.0f, 1e30f, -1e30f};
  for (std::uint64_t i = 0; i < 20000; ++i) values.push_back(80.0f * random_normal(5, i));
  for (float scale : {1.0f, 0.02f, 3.0f}) {
    const act_rule::Rule rule = act_rule::known(scale, 0);
    for (float x : values)
      EXPECT_EQ(code(act_rule::s8_bits<true>(x, rule.inverse)), act_rule::to_s8(x, rule)) << x << " by " << scale;
    for (float x : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(), std::nanf("")})
      EXPECT_EQ(code(act_rule::s8_bits<true>(x, rule.inverse)), act_rule::to_s8(x, rule)) << x;
  }
  for (float absmax : {1.0f, 0.3f, 0x1p-113f, 3e38f, 77.7f}) {
    const act_rule::Rule rule = act_rule::symmetric(absmax, 127.0f);
    for (float x : values) {
      const float inside = absmax * std::fmin(std::fmax(x / 320.0f, -1.0f), 1.0f);
      EXPECT_EQ(code(act_rule::s8_bits<false>(inside, rule.inverse)), act_rule::to_s8(inside, rule))
          << inside << " of " << absmax;
    }
  }
}

/// A fold's Σ(a − z) and z share a word: all values that 128 channels can give.
TEST(Wna8Terms, SumAndZeroPointComeBack) {
  for (std::int32_t zero : {-128, -37, -1, 0, 1, 127})
    for (std::int32_t sum : {-128 * 255, -1000, -1, 0, 1, 8191, 128 * 255}) {
      const std::uint32_t term = zero_term(sum, zero);
      EXPECT_EQ(term_sum(term), sum) << zero;
      EXPECT_EQ(term_zero(term), zero) << sum;
    }
}

/// TMA's conditions on an image's terms: 16 bytes for every box, and pixels at multiples of that. Parts that do not overlap.
TEST(Wna8Terms, OfPixelsLieAsTheWalkReadsThem) {
  for (int fold : {32, 128})
    for (std::int64_t channels : {128, 256, 640}) {
      const Wna8ImageMap map = wna8_image_map(fold, 35, channels, 70);
      const std::int64_t folds = channels / fold, boxes = fold == 128 ? folds : folds / 2;
      EXPECT_EQ(map.term_row * 8, boxes * 16);
      for (std::int64_t i = 0; i < folds; ++i) EXPECT_EQ(i * map.term_fold * 8, fold == 128 ? i * 16 : i / 2 * 16 + i % 2 * 8);
      EXPECT_GE(map.terms, static_cast<std::size_t>(35 * channels));
      EXPECT_GE(map.image, map.terms + static_cast<std::size_t>(35 * boxes * 16));
      EXPECT_GE(map.bytes, map.image + 70);
      EXPECT_EQ(map.terms % 256 + map.image % 256 + map.bytes % 256, 0U);
    }
}

}  // namespace
}  // namespace nibble::cuda
