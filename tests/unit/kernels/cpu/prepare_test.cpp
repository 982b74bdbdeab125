// Prepared activations lie where prepare.hpp says, with every instruction set of this machine: also those forms whose kernels do not run
// here.
#include "kernels/cpu/prepare/prepare.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/random.hpp"
#include "nibble/device.hpp"
#include "nibble/scheme.hpp"

namespace nibble::cpu {
namespace {

constexpr std::byte kUnwritten{0xa5};

template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// A[M,K] of codes or of the bits of bf16, prepared in one form.
struct Prepared {
  PrepareTask task{};
  std::vector<std::byte> a, out;
  float scale = 0.5f;
  std::int32_t zero = 0;
  float given_offset = -3.0f;  // with float offsets: the zero point 6

  Prepared(Isa isa, ActForm form, const Scheme& scheme, DType type, std::int64_t m, std::int64_t k, std::int64_t tile) {
    const std::int64_t width = bits(type) / 8;
    a.resize(static_cast<std::size_t>(m * k * width));
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::byte>(random_bits(5, i) & 0xff);
    if (scheme.act.zero == ZeroKind::integer) zero = 7;
    out.assign(static_cast<std::size_t>(prepared_bytes(form, m, scheme.act, scheme.weight, k)), kUnwritten);
    const ActDigits act = ActDigits::make(scheme.act, scheme.weight, k);
    const std::int64_t group = scheme.weight.group.k == 0 ? k : scheme.weight.group.k;
    task = {.a = a.data(),
            .type = type,
            .width = width,
            .stride = k * width,
            .m = m,
            .perm = nullptr,
            .prescale = nullptr,
            .segments = {k, group, act.piece, act.unit},
            .digits = act,
            .act_scheme = scheme.act,
            .block = scheme.act.group.k == 0 ? k : scheme.act.group.k,
            .known = {},
            .limit = 0,
            .given = {.scale = &scale, .zero = &zero},
            .bias = code_bias(scheme.weight.codes),
            .token_bytes = prepared_token_bytes(form, scheme.act, scheme.weight, k),
            .tile = prepared_tile(form, m, tile),
            .rows = in_rows(form),
            .terms = bf16_terms(form),
            .out = out.data()};
    if (scheme.act.zero == ZeroKind::offset) {
      task.given.zero = nullptr;
      task.given.offset = &given_offset;
      zero = 6;
    }
    const auto prepare = prepare_isa(isa).of(form);
    for (std::int64_t first = 0; first < m; first += task.tile) prepare(task, first);
  }

  template <class T>
  T at(std::int64_t offset) const {
    return read<T>(out.data() + offset);
  }
  std::int64_t height(std::int64_t first) const { return std::min(task.tile, task.m - first); }
  std::int64_t room(std::int64_t first) const {
    return task.rows ? (height(first) + kRowTokens - 1) / kRowTokens * kRowTokens : height(first);
  }
};

std::vector<Isa> instruction_sets() {
  std::vector<Isa> sets{Isa::baseline};
  for (Isa isa : {Isa::avx2, Isa::avx512})
    if (runs_here(isa).ok()) sets.push_back(isa);
  return sets;
}

std::int64_t up(std::int64_t count, std::int64_t to) { return (count + to - 1) / to * to; }

void expect_codes(const Prepared& p) {
  const PrepareTask& t = p.task;
  const bool per_token = t.digits.zero_sums == ZeroSums::per_token, per_segment = t.digits.zero_sums == ZeroSums::per_segment;
  for (std::int64_t first = 0; first < t.m; first += t.tile) {
    const std::int64_t room = p.room(first), header = t.digits.segment_header();
    std::int64_t at = first * t.token_bytes;
    for (std::int64_t r = 0; per_token && r < p.height(first); ++r) ASSERT_EQ(p.at<std::int32_t>(at + 4 * r), p.zero);
    if (per_token) at += 4 * room;
    for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
      end = t.segments.end(k);
      const std::int64_t padded = up(end - k, t.rows ? kRowBytes : tile::kOctet), codes = at + header * room;
      for (std::int64_t r = 0; r < p.height(first); ++r) {
        std::int64_t sum = 0, plain = 0;
        for (std::int64_t c = 0; c < padded; ++c) {
          const bool there = k + c < end;
          const int code = there ? static_cast<std::int8_t>(p.a[static_cast<std::size_t>((first + r) * t.stride + k + c)]) : 0;
          const int expected = !there && t.digits.paired && c < up(end - k, tile::kOctet) ? p.zero : code;
          const std::int64_t place =
              t.rows ? ((r / kRowTokens * padded / kRowBytes + c / kRowBytes) * kRowTokens + r % kRowTokens) * kRowBytes +
                           c % kRowBytes
                     : 4 * (c / 4 * room + r) + c % 4;
          ASSERT_EQ(p.at<std::int8_t>(codes + place), expected) << "token " << first + r << " channel " << k + c;
          if (there) sum += code - (per_segment ? p.zero : 0), plain += code;
        }
        ASSERT_EQ(p.at<float>(at + 4 * r), p.scale);
        ASSERT_EQ(p.at<float>(at + 4 * (room + r)), static_cast<float>(sum));
        if (t.digits.paired) {
          ASSERT_EQ(p.at<std::int16_t>(at + 4 * (2 * room + r)), -sum);
          ASSERT_EQ(p.at<std::int16_t>(at + 4 * (2 * room + r) + 2), -p.zero);
        } else if (per_segment) {
          ASSERT_EQ(p.at<float>(at + 4 * (2 * room + r)), static_cast<float>(p.zero));
        }
        ASSERT_EQ(p.at<std::int32_t>(at + (header - 4) * room + 4 * r),
                  static_cast<std::int32_t>(-t.bias * (t.digits.paired ? sum : plain)));
      }
      at += (header + padded) * room;
    }
  }
}

void expect_halves(const Prepared& p) {
  constexpr std::int64_t kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};
  const PrepareTask& t = p.task;
  for (std::int64_t first = 0; first < t.m; first += t.tile) {
    const std::int64_t room = p.room(first);
    std::int64_t at = first * t.token_bytes;
    for (std::int64_t k = 0, end = 0; k < t.segments.k; k = end) {
      end = t.segments.end(k);
      const std::int64_t padded = up(end - k, t.rows ? kRowBytes / 2 : tile::kOctet);
      for (std::int64_t r = 0; t.digits.fp8 && r < p.height(first); ++r) ASSERT_EQ(p.at<float>(at + 4 * r), p.scale);
      if (t.digits.fp8) at += 4 * room;
      for (std::int64_t r = 0; r < p.height(first); ++r)
        for (std::int64_t i = 0; i < padded; ++i) {
          const std::int64_t channel = k + i / 8 * 8 + kOrder[i % 8];
          const std::byte* const a = p.a.data() + (first + r) * t.stride + channel * t.width;
          if (t.terms > 1) {
            const std::int64_t step = r / kRowTokens * padded / 32 + i / 32;
            double sum = 0, x = 0;
            for (int term = 0; term < t.terms; ++term) {
              const std::int64_t row = (step * t.terms + term) * kRowTokens + r % kRowTokens;
              sum += to_f32(p.at<bf16>(at + row * kRowBytes + i % 32 * 2));
            }
            if (channel < end) x = t.type == DType::f32 ? read<float>(a) : to_f32(read<f16>(a));
            // What is left of an f32 has fewer bits than a bf16 below 2⁻¹³³.
            ASSERT_TRUE(std::isnan(x) ? std::isnan(sum) : x == sum || std::abs(x - sum) < 0x1p-133)
                << "token " << first + r << " channel " << channel << ": " << x << " became " << sum;
            continue;
          }
          std::uint16_t expected = 0;
          if (channel < end && t.digits.fp8)
            expected =
                static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(code_value(t.type, static_cast<std::uint8_t>(*a))) >> 16);
          else if (channel < end)
            std::memcpy(&expected, a, 2);
          const std::int64_t place =
              t.rows ? ((r / kRowTokens * padded / 32 + i / 32) * kRowTokens + r % kRowTokens) * kRowBytes + i % 32 * 2
                     : 4 * (i / 2 * room + r) + i % 2 * 2;
          ASSERT_EQ(p.at<std::uint16_t>(at + place), expected) << "token " << first + r << " channel " << channel;
        }
      at += 2 * padded * t.terms * room;
    }
  }
}

TEST(Prepare, CodesLieWhereTheFormSays) {
  for (Isa isa : instruction_sets())
    for (const char* scheme :
         {"s8r_s8c", "s8zr_s8c", "s8g32_u4b8g32", "s8g64_u4zg64", "s8zg32_u4b8g32", "s8zg32_u4zg32", "s8zg128_u8zg128",
          "s8og32_u4zg32", "s8og256_u4og256", "s8or_s8c", "s8zg256_u8zg256", "s8r_u4zg128"})
      for (ActForm form : {ActForm::s8, ActForm::s8k64})
        for (std::int64_t m : {1, 2, 5, 12, 17, 40})
          for (std::int64_t k : {1, 30, 64, 200, 1040}) {
            SCOPED_TRACE(::testing::Message() << name(isa) << " " << name(form) << " " << scheme << " M=" << m << " K=" << k);
            const Prepared prepared(isa, form, *Scheme::parse(scheme), DType::s8, m, k, in_rows(form) ? 32 : 12);
            expect_codes(prepared);
            if (HasFatalFailure()) return;
          }
}

/// A block with a NaN or an infinity has the scale NaN, and integers whose sums do not overflow.
TEST(Prepare, FixedPointOfWhatIsNoNumberIsZero) {
  const auto scheme = Scheme::parse("u4b8g32");
  ASSERT_TRUE(scheme.ok());
  constexpr std::int64_t kK = 64, kBlock = 32;
  for (Isa isa : instruction_sets())
    for (float special : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      std::vector<float> a(kK, 1.0f);
      std::fill_n(a.begin(), kBlock, special);
      std::vector<std::byte> out(static_cast<std::size_t>(prepared_bytes(ActForm::s8x3, 1, {}, scheme->weight, kK)));
      const ActDigits digits = ActDigits::make({}, scheme->weight, kK);
      prepare_isa(isa).fixed({.a = reinterpret_cast<const std::byte*>(a.data()),
                              .type = DType::f32,
                              .width = 4,
                              .stride = 4 * kK,
                              .m = 1,
                              .perm = nullptr,
                              .prescale = nullptr,
                              .segments = {kK, kBlock, digits.piece, digits.unit},
                              .digits = digits,
                              .act_scheme = {},
                              .block = kK,
                              .known = {},
                              .limit = std::numeric_limits<float>::infinity(),
                              .given = {},
                              .bias = 8,
                              .token_bytes = static_cast<std::int64_t>(out.size()),
                              .tile = 1,
                              .rows = false,
                              .out = out.data()},
                             0);
      const std::size_t block = out.size() / 2;
      float scale = 0;
      std::memcpy(&scale, out.data(), 4);
      EXPECT_TRUE(std::isnan(scale));
      EXPECT_TRUE(std::all_of(out.begin() + 4, out.begin() + static_cast<std::ptrdiff_t>(block),
                              [](std::byte x) { return x == std::byte{0}; }));
      std::memcpy(&scale, out.data() + block, 4);
      EXPECT_GT(scale, 0.0f);
    }
}

TEST(Prepare, SumsOfHalvesAreTheActivations) {
  for (Isa isa : instruction_sets())
    for (ActForm form : {ActForm::bf16x2k32, ActForm::bf16x3k32})
      for (const char* scheme : {"u4zg128", "u4b8g32", "s8c"})
        for (std::int64_t m : {1, 17, 40})
          for (std::int64_t k : {1, 30, 64, 200, 1040}) {
            SCOPED_TRACE(::testing::Message() << name(isa) << " " << name(form) << " " << scheme << " M=" << m << " K=" << k);
            for (DType type : {DType::f16, DType::f32})
              if (bf16_terms(form) == 3 || type == DType::f16)
                expect_halves(Prepared(isa, form, *Scheme::parse(scheme), type, m, k, 32));
            if (HasFatalFailure()) return;
          }
}

TEST(Prepare, HalvesLieWhereTheFormSays) {
  for (Isa isa : instruction_sets())
    for (ActForm form : {ActForm::bf16, ActForm::bf16k32})
      for (const char* scheme : {"u4zg128", "u4b8g32", "s8c", "e4m3r_e4m3c", "e4m3g128_e4m3b128x128", "e4m3g32_u4zg128"})
        for (std::int64_t m : {1, 3, 6, 17, 40})
          for (std::int64_t k : {1, 30, 64, 200, 1040}) {
            SCOPED_TRACE(::testing::Message() << name(isa) << " " << name(form) << " " << scheme << " M=" << m << " K=" << k);
            const Scheme parsed = *Scheme::parse(scheme);
            const DType type = parsed.act.codes == DType::none ? DType::bf16 : parsed.act.codes;
            expect_halves(Prepared(isa, form, parsed, type, m, k, in_rows(form) ? 32 : 6));
            if (HasFatalFailure()) return;
          }
}

}  // namespace
}  // namespace nibble::cpu
