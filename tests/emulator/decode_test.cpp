// Decode of weights in gpu_n64k128 by sm_90's kernel (decode.cu), on the emulated GPU: the launcher and the kernels as they are.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "emulator/expert_rows.hpp"
#include "emulator/float_layer.hpp"
#include "emulator/memory.hpp"
#include "emulator/ring_memory.hpp"
#include "kernels/cuda/sm90/decode/decode.cu"
#include "kernels/cuda/sm90/decode/decode_experts.cu"
#include "kernels/cuda/sm90/decode/decode_float_codes.cu"
#include "kernels/cuda/table/decode_cost.hpp"

namespace nibble::cuda {

alignas(1024) std::uint8_t shared[emulator::kSharedBytes];  // what the ring's kernels declare extern

namespace {

struct Case {
  emulator::FloatCase layer;
  int tokens, split;  // of a launch; of a cluster
};

std::string name(const Case& c) { return fmt::format("{}_tokens{}_split{}", emulator::name(c.layer), c.tokens, c.split); }

emulator::Multiplied multiplied(const emulator::TileWeight& weight, int n, int k) { return {weight.value(n, k), 0x1p-18}; }

class EmulatedDecode : public testing::TestWithParam<Case> {};

TEST_P(EmulatedDecode, GivesTheSumsOfTheLayer) {
  const Case& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer(c.layer);
  const emulator::NextMemory next;
  LinearTask of_layer = layer.task();
  of_layer.next = next.weight();
  layer.expect_sums(
      of_layer,
      [&](const LinearTask& task) {
        RingRoom room;
        if (const cudaError_t e = ring_room_sm90(room)) return e;
        const Result<DecodeConfig> config =
            configure_decode(task.weight.geometry, 0, room, {.tokens = c.tokens, .split = c.split});
        return config.ok() ? linear_decode_sm90(task, *config, nullptr) : cudaErrorInvalidConfiguration;
      },
      [&](int n, int k) { return multiplied(layer.weight, n, k); });
  next.expect_asked();
}

// Row tiles and channels with tails, more tiles than clusters, more records than the ring has stages, more tokens than a launch.
constexpr auto kNone = ZeroKind::none, kInteger = ZeroKind::integer, kOffset = ZeroKind::offset;
constexpr Case kCases[] = {
    {{DType::f16, Codes::u4, 128, kNone, 1, 264, 4096}, 1, 1},
    {{DType::bf16, Codes::u4, 128, kInteger, 7, 328, 1936}, 8, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 16, 200, 1024}, 16, 1},
    {{DType::f16, Codes::u4, 128, kNone, 3, 200, 2048}, 8, 2},
    {{DType::bf16, Codes::u4, 128, kNone, 5, 136, 4096}, 8, 3},
    {{DType::f16, Codes::u4, 128, kInteger, 8, 520, 8192}, 8, 8},
    {{DType::f16, Codes::u4, 32, kInteger, 2, 72, 1408}, 8, 1},
    {{DType::bf16, Codes::u4, 64, kOffset, 9, 72, 640}, 16, 2},
    {{DType::f16, Codes::u8, 128, kNone, 1, 100, 1536}, 1, 1},
    {{DType::bf16, Codes::u8, 128, kInteger, 6, 136, 784}, 8, 1},
    {{DType::f16, Codes::u4, 128, kInteger, 4, 72, 640, true}, 8, 1},
    {{DType::f16, Codes::u4, 128, kNone, 11, 72, 530}, 8, 1},
    {{DType::f16, Codes::u4, 96, kInteger, 2, 136, 1056}, 8, 1},
    {{DType::bf16, Codes::u4, 192, kNone, 9, 72, 1536}, 16, 2},
    {{DType::f16, Codes::e4m3, 128, kNone, 1, 136, 1936}, 1, 1},
    {{DType::bf16, Codes::e4m3, 2048, kNone, 7, 72, 2048}, 8, 2},
    {{DType::f16, Codes::e2m1, 16, kNone, 3, 72, 1408}, 8, 1},
    {{DType::bf16, Codes::e2m1, 32, kNone, 9, 136, 640}, 8, 1},
    {{DType::f16, Codes::u4, 16, kInteger, 1, 136, 1056}, 1, 1},
    {{DType::bf16, Codes::u8, 48, kOffset, 12, 72, 960}, 16, 2},
    {{DType::f16, Codes::u4, 128, kInteger, 1, 136, 1024, false, true}, 1, 1},
    {{DType::bf16, Codes::u4, 128, kNone, 7, 328, 4096, false, true}, 8, 1},
    {{DType::f16, Codes::u8, 128, kInteger, 12, 136, 3072, false, true}, 8, 3},
    {{DType::f16, Codes::u4, 128, kInteger, 20, 72, 640, false, true}, 16, 1},
    {{DType::bf16, Codes::u4, 128, kNone, 7, 72, 652, true, true}, 8, 2},
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedDecode, testing::ValuesIn(kCases), [](const auto& info) { return name(info.param); });

/// bf16 activations become f16 under a power of two: all of them times 2ᵏ give the same bits, times 2ᵏ.
TEST(EmulatedDecode, TakesBf16OfEveryMagnitude) {
  emulator::use_shared_memory(shared);
  const emulator::FloatLayer layer({DType::bf16, Codes::u4, 128, kInteger, 5, 136, 1936});
  const auto run = [&](int exponent) {
    std::vector<std::uint16_t> x = layer.x, d(static_cast<std::size_t>(layer.m * 136));
    for (std::uint16_t& v : x) v = emulator::to_half(DType::bf16, std::ldexp(emulator::from_half(DType::bf16, v), exponent));
    LinearTask task = layer.task();
    task.x = x.data();
    task.epilogue.out = DType::bf16;
    task.epilogue.d = d.data(), task.epilogue.d_stride = 136;
    RingRoom room;
    EXPECT_EQ(ring_room_sm90(room), cudaSuccess);
    const DecodeConfig config = configure_decode(task.weight.geometry, 0, room, {.tokens = 8, .split = 2}).value();
    EXPECT_EQ(linear_decode_sm90(task, config, nullptr), cudaSuccess);
    std::vector<float> values;
    for (const std::uint16_t v : d) values.push_back(std::ldexp(emulator::from_half(DType::bf16, v), -exponent));
    return values;
  };
  const std::vector<float> expected = run(0);
  for (const int exponent : {-100, -17, 30, 110}) EXPECT_EQ(run(exponent), expected) << exponent;
}

// ---- rows of experts

struct RingExpertCase {
  emulator::ExpertCase experts;
  int ctas;
};

class EmulatedDecodeExperts : public testing::TestWithParam<RingExpertCase> {};

TEST_P(EmulatedDecodeExperts, GivesTheSumsOfEachExpert) {
  const emulator::ExpertCase& experts = GetParam().experts;
  const int ctas = GetParam().ctas;
  emulator::use_shared_memory(shared);
  emulator::expect_sums_of_experts(
      experts,
      [&](const LinearTask& task) {
        RingRoom room;
        if (const cudaError_t e = ring_room_sm90(room)) return e;
        room.bytes -= kFewTilesBytes;
        Result<DecodeConfig> config = configure_decode(task.weight.geometry, 0, room, {.tokens = experts.tokens, .split = 1});
        if (!config.ok()) return cudaErrorInvalidConfiguration;
        config->grid = ctas;
        return linear_decode_sm90(task, *config, nullptr);
      },
      [&](const emulator::TileWeight& weight, int n, int k) { return multiplied(weight, n, k); }, true);
}

/// Two products in a launch: gate_up [N,K] of each expert, then down [M,N] of its results.
struct JoinedCase {
  emulator::FloatCase gate_up;
  int out;                // M
  std::vector<int> rows;  // of each expert
  int ctas;
};

class EmulatedDecodeJoined : public testing::TestWithParam<JoinedCase> {};

TEST_P(EmulatedDecodeJoined, GivesTheBitsOfTwoLaunches) {
  const JoinedCase& c = GetParam();
  emulator::use_shared_memory(shared);
  const emulator::FloatCase down{c.gate_up.a_dtype, c.gate_up.codes, c.gate_up.group, c.gate_up.zeros, 1, c.out, c.gate_up.n};
  std::vector<ExpertTile> tiles;
  std::vector<std::int32_t> ids;  // by token, an expert each, in turn
  int m = 0;
  for (std::size_t e = 0; e < c.rows.size(); ++e) {
    for (int first = 0; first < c.rows[e]; first += 8)
      tiles.push_back({static_cast<int>(e), m + first, std::min(8, c.rows[e] - first)});
    m += c.rows[e];
  }
  for (int turn = 0; turn < m; ++turn)
    for (std::size_t e = c.rows.size(); e-- > 0;)
      if (turn < c.rows[e]) ids.push_back(static_cast<std::int32_t>(e));
  const int count = static_cast<int>(tiles.size()), rows = std::max(m, 1);
  TileCount tile_count{.tiles = count};
  tiles.resize(tiles.size() + 1);

  struct Experts {
    std::vector<emulator::FloatLayer> layers;
    std::vector<std::uint8_t> records;
    std::size_t pitch = 0;
  };
  const auto experts_of = [&](emulator::FloatCase of) {
    Experts experts;
    for (std::size_t e = 0; e < c.rows.size(); ++e) {
      of.m = static_cast<int>(e) + 1;  // seeds its random numbers
      const auto& weight = experts.layers.emplace_back(of).weight;
      experts.pitch = (weight.records.size() + 255) / 256 * 256;
      experts.records.insert(experts.records.end(), weight.records.begin(), weight.records.end());
      experts.records.resize(experts.pitch * experts.layers.size());
    }
    return experts;
  };
  const Experts first = experts_of(c.gate_up), second = experts_of(down);
  emulator::FloatCase of_rows = c.gate_up;
  of_rows.m = rows;
  const emulator::FloatLayer x(of_rows);  // its activations, a row of each pair
  std::vector<std::int32_t> pair_of(static_cast<std::size_t>(rows), 77), row_of = pair_of, expert_of = pair_of;
  for (std::size_t e = 0, row = 0; e < c.rows.size(); ++e)
    for (std::size_t pair = 0; pair < ids.size(); ++pair)
      if (ids[pair] == static_cast<int>(e)) pair_of[row++] = static_cast<std::int32_t>(pair);

  struct Result {
    std::vector<std::uint16_t> hidden, d;
  };
  const auto run = [&](bool joined, bool sorts, Meeting& meeting) {
    const std::int64_t pitch = (c.gate_up.n + 7) / 8 * 8;
    Result result{std::vector<std::uint16_t>(static_cast<std::size_t>(rows * pitch), 0x7e00),
                  std::vector<std::uint16_t>(static_cast<std::size_t>(rows * c.out), 0x7e00)};
    LinearTask a = x.task(), b = second.layers.front().task();
    a.weight = first.layers.front().task().weight;
    a.weight.records = first.records.data(), b.weight.records = second.records.data();
    a.m = b.m = rows;
    a.experts = {.tiles = tiles.data(), .count = &tile_count, .most = count + 1, .source = pair_of.data()};
    b.experts = {.tiles = tiles.data(), .count = &tile_count, .most = count + 1};
    a.experts.weight_pitch = static_cast<std::int64_t>(first.pitch);
    b.experts.weight_pitch = static_cast<std::int64_t>(second.pitch);
    a.epilogue.out = b.epilogue.out = c.gate_up.a_dtype;
    a.epilogue.acc_scale = b.epilogue.acc_scale = 0x1p-9f;  // small enough for f16
    a.epilogue.d = result.hidden.data(), a.epilogue.d_stride = pitch;
    b.epilogue.d = result.d.data(), b.epilogue.d_stride = c.out;
    b.x = result.hidden.data(), b.x_stride = pitch;
    b.scratch = &meeting;
    std::vector<ExpertTile> written[2] = {std::vector<ExpertTile>(tiles.size()), std::vector<ExpertTile>(tiles.size())};
    TileCount counts[2];
    const SortTask sort{.ids = ids.data(),
                        .token_stride = 1,
                        .choice_stride = 1,
                        .experts = static_cast<int>(c.rows.size()),
                        .rows = m,
                        .top_k = 1,
                        .pair_of = pair_of.data(),
                        .row_of = row_of.data(),
                        .expert_of = expert_of.data(),
                        .products = {{8, written[0].data(), &counts[0]}, {8, written[1].data(), &counts[1]}}};
    if (sorts) a.experts.sort = &sort, a.experts.tiles = written[0].data(), a.experts.count = &counts[0];
    const auto config = [&](const LinearTask& task) {
      RingRoom room;
      EXPECT_EQ(ring_room_sm90(room), cudaSuccess);
      room.bytes -= kFewTilesBytes;
      DecodeConfig of = configure_decode(task.weight.geometry, 0, room, {.tokens = 8, .split = 1}).value();
      of.grid = c.ctas;
      return of;
    };
    if (joined) {
      EXPECT_EQ(decode_joined_sm90(a, config(a), b, config(b), nullptr), cudaSuccess);
    } else {
      EXPECT_EQ(linear_decode_sm90(a, config(a), nullptr), cudaSuccess);
      EXPECT_EQ(linear_decode_sm90(b, config(b), nullptr), cudaSuccess);
    }
    return result;
  };
  Meeting meeting{0xdeadbeefdeadbeefu, 7, 7};  // as memory is that nobody has cleared
  const Result expected = run(false, false, meeting);
  for (const bool sorts : {false, m >= 1}) {
    const Result got = run(true, sorts, meeting);
    EXPECT_EQ(got.hidden, expected.hidden);
    EXPECT_EQ(got.d, expected.d);
    if (count > 0 && c.ctas <= emulator::kMultiprocessors) {
      EXPECT_EQ(meeting.open, 0u);
    }
  }
}

// Fewer items than CTAs and more, of the first product or the second; the longer rows in either; channels of the second past its K; more CTAs than
// run at once, for which there are two launches.
const JoinedCase kJoinedCases[] = {
    {{DType::f16, Codes::u4, 128, kNone, 0, 264, 1424}, 136, {3, 0, 9, 1}, 3},
    {{DType::bf16, Codes::u4, 128, kInteger, 0, 1992, 256}, 72, {1, 0, 2}, 3},
    {{DType::bf16, Codes::u4, 32, kNone, 0, 72, 416}, 520, {1}, 3},
    {{DType::f16, Codes::u8, 128, kNone, 0, 328, 512}, 136, {8, 8, 1}, 2},
    {{DType::f16, Codes::e2m1, 16, kNone, 0, 136, 1056}, 200, {2, 5}, 1},
    {{DType::bf16, Codes::e2m1, 32, kNone, 0, 200, 640}, 72, {0, 17}, 2},
    {{DType::f16, Codes::u4, 128, kNone, 0, 72, 256}, 72, {0, 0}, 2},  // no rows at all
    {{DType::bf16, Codes::u4, 128, kNone, 0, 136, 512}, 72, {2, 1}, 5},
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedDecodeJoined, testing::ValuesIn(kJoinedCases), [](const auto& info) {
  return fmt::format("{}_out{}_ctas{}", emulator::name(info.param.gate_up), info.param.out, info.param.ctas);
});

// More tiles than CTAs and fewer, tiles that several CTAs share, more records than the ring has stages, channels past K.
const RingExpertCase kExpertCases[] = {
    {{{DType::f16, Codes::u4, 128, kNone, 0, 200, 1424}, 8, {3, 0, 20, 1, 0, 8}}, 3},
    {{{DType::bf16, Codes::u4, 128, kInteger, 0, 136, 2048}, 8, {1, 1, 0, 7}}, 2},
    {{{DType::bf16, Codes::u4, 32, kNone, 0, 72, 416}, 8, {9, 2, 0, 16}}, 20},
    {{{DType::f16, Codes::u4, 64, kOffset, 0, 264, 640}, 8, {2, 30}}, 4},
    {{{DType::f16, Codes::u4, 16, kInteger, 0, 72, 1056}, 8, {5, 2}}, 1},
    {{{DType::bf16, Codes::u8, 128, kNone, 0, 72, 1536}, 8, {4, 0, 12}}, 3},
    {{{DType::bf16, Codes::e4m3, 128, kNone, 0, 136, 384}, 8, {1, 13, 2}}, 2},
    {{{DType::f16, Codes::e2m1, 32, kNone, 0, 136, 416}, 8, {2, 17, 0, 3}}, 5},
    {{{DType::bf16, Codes::e2m1, 16, kNone, 0, 72, 1408}, 8, {8, 1}}, 2},
    {{{DType::bf16, Codes::u4, 128, kNone, 0, 136, 4096}, 4, {1, 5, 0, 1}}, 3},
    {{{DType::bf16, Codes::u4, 128, kInteger, 0, 136, 1536}, 8, {0, 9, 1, 0, 1}}, 4},
    {{{DType::f16, Codes::u4, 128, kNone, 0, 72, 256}, 8, {0, 0}}, 2},  // no rows at all
};
INSTANTIATE_TEST_SUITE_P(Decode, EmulatedDecodeExperts, testing::ValuesIn(kExpertCases), [](const auto& info) {
  return fmt::format("{}_ctas{}", emulator::name(info.param.experts), info.param.ctas);
});

}  // namespace
}  // namespace nibble::cuda
