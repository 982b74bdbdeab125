// The store of CPU kernels against the epilogue of a row: the same bits at every level of instructions.
#include "kernels/cpu/tiles/outputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/random.hpp"
#include "epilogue/epilogue.hpp"

namespace nibble::cpu {
namespace {

constexpr std::int64_t kTokens = 5, kChannels = 64;  // of x: two row blocks of AVX-512, four of the others

Tensor numbers(DType type, std::vector<std::int64_t> shape, std::uint64_t seed) {
  Tensor t(type, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, random_normal(seed, static_cast<std::uint64_t>(i)));
  return t;
}

/// Sums of all sizes, infinities and NaN.
std::vector<float> sums_of_all_sizes() {
  std::vector<float> sums(static_cast<std::size_t>(kTokens * kChannels));
  for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = random_normal(1, i) * std::ldexp(1.0f, static_cast<int>(i % 16) - 9);
  const float infinity = std::numeric_limits<float>::infinity();
  const float special[] = {0.0f,  -0.0f,  infinity, -infinity, std::numeric_limits<float>::quiet_NaN(),
                           1e30f, -1e30f, 95.0f,    -95.0f};
  std::copy(std::begin(special), std::end(special), sums.begin() + 3);
  return sums;
}

struct Result {
  std::vector<std::byte> bytes;
  TensorView d;
  Result(DType type, std::int64_t columns)
      : bytes(static_cast<std::size_t>(kTokens * columns * bits(type) / 8)), d(bytes.data(), type, {kTokens, columns}) {}
};

/// Words that are NaN, of which only that counts.
template <class Word>
bool same(const Result& a, const Result& b, Word sign, Word infinity) {
  for (std::size_t i = 0; i < a.bytes.size(); i += sizeof(Word)) {
    Word x, y;
    std::memcpy(&x, a.bytes.data() + i, sizeof x), std::memcpy(&y, b.bytes.data() + i, sizeof y);
    const bool nan = (x & ~sign) > infinity && (y & ~sign) > infinity;
    if (x != y && !nan) return false;
  }
  return true;
}
bool same(const Result& a, const Result& b) {
  switch (a.d.dtype) {
    case DType::f32: return same<std::uint32_t>(a, b, 0x80000000u, 0x7f800000u);
    case DType::f16: return same<std::uint16_t>(a, b, 0x8000, 0x7c00);
    case DType::bf16: return same<std::uint16_t>(a, b, 0x8000, 0x7f80);
    default: return a.bytes == b.bytes;
  }
}

TEST(Outputs, HaveTheBitsOfARowsEpilogue) {
  const std::vector<float> sums = sums_of_all_sizes();
  const Tensor row_scale = numbers(DType::f32, {kTokens}, 2), col_scale = numbers(DType::f32, {kChannels}, 3);
  const Tensor bias = numbers(DType::bf16, {kChannels}, 4);
  const Operands operands{.row_scale = {row_scale.bytes.data(), DType::f32, {kTokens}},
                          .col_scale = {col_scale.bytes.data(), DType::f32, {kChannels}},
                          .bias = {bias.bytes.data(), DType::bf16, {kChannels}}};
  for (const Isa isa : kAllIsas) {
    if (!this_device().has(isa)) continue;
    const std::int64_t rows = isa == Isa::avx512 || isa == Isa::avx512vnni || isa == Isa::avx512bf16 || isa == Isa::amx ? 32 : 16;
    for (const Activation activation : {Activation::none, Activation::relu, Activation::silu, Activation::sigmoid,
                                        Activation::quick_gelu, Activation::gelu_tanh})
      for (const DType out : {DType::f32, DType::f16, DType::bf16, DType::s8})
        for (int parts = 0; parts < 32; ++parts) {
          const bool glu = (parts & 8) != 0, limited = glu && (parts & 16) != 0;
          if ((parts & 16) != 0 && !glu) continue;
          EpilogueSpec spec{.row_scale = (parts & 1) != 0,
                            .col_scale = (parts & 2) != 0,
                            .bias = (parts & 4) != 0,
                            .activation = activation,
                            .glu = glu,
                            .out = out,
                            .out_scale = 0.5f};
          if (limited) spec.glu_limit = 0.75f, spec.glu_offset = 1.0f;
          const std::int64_t columns = spec.columns(kChannels);
          Result wanted(out, columns), stored(out, columns);
          std::vector<float> own = sums;
          for (std::int64_t m = 0; m < kTokens; ++m)
            epilogue::store_row(spec, operands, own.data() + m * kChannels, m, 0, kChannels, wanted.d);
          const StepArgs args{.d = stored.d, .epilogue = &spec, .operands = operands, .n_end = kChannels};
          const Outputs outputs(isa, args);  // borrows args
          for (std::int64_t block = 0; block < kChannels / rows; ++block) {
            std::vector<float> part(static_cast<std::size_t>(kTokens * rows));
            for (std::int64_t m = 0; m < kTokens; ++m)
              std::copy_n(sums.data() + m * kChannels + block * rows, rows, part.data() + m * rows);
            outputs.store(part.data(), block, 0, kTokens);
          }
          EXPECT_TRUE(same(stored, wanted)) << name(isa) << " " << spec.name() << (limited ? ", limited" : "");
        }
  }
}

}  // namespace
}  // namespace nibble::cpu
