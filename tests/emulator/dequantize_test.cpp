// W from the tensors of AWQ and GPTQ checkpoints (dequantize.cu) on the emulated GPU, bit for bit. The reference reads the formats a bit at
// a time.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "emulator/float_layer.hpp"

// Valid for arrays of a kernel, and for what it declares extern: this file has both.
#undef __shared__
#define __shared__ thread_local

namespace nibble::cuda {
namespace {
alignas(1024) thread_local uint4 shared[emulator::kSharedBytes / sizeof(uint4)];
}
}  // namespace nibble::cuda

#include "kernels/cuda/weights/dequantize.cu"

namespace nibble::cuda {
namespace {

struct Case {
  const char* kernel;  // of f16 [N,K]
  CheckpointFormat format;
  int bits;
  bool minus_one;
  DType scale;
  int n, k, group;
  bool act_order = false;
  std::size_t skew = 0;  // elements that pointers are off their alignment

  int groups() const { return (k + group - 1) / group; }
  bool awq() const { return format == CheckpointFormat::awq; }
  int zero_words() const { return awq() ? n / 8 : (n * bits + 31) / 32; }
};

std::string name(const Case& c) {
  return fmt::format("{}_{}{}{}_{}_n{}_k{}_g{}{}{}", c.kernel, c.awq() ? "awq" : "gptq", c.bits, c.minus_one ? "v1" : "",
                     nibble::name(c.scale), c.n, c.k, c.group, c.act_order ? "_act_order" : "", c.skew != 0 ? "_skew" : "");
}

/// Words or elements, aligned to 16 bytes and `skew` elements.
template <class T>
struct Aligned {
  std::vector<T> memory;
  T* first;
  Aligned(std::size_t count, std::size_t skew) : memory(count + 32), first(memory.data()) {
    while (reinterpret_cast<std::uintptr_t>(first) % 16 != 0) ++first;
    first += skew;
  }
};

class EmulatedDequantize : public testing::TestWithParam<Case> {
 protected:
  template <class Out>
  void expect_weights(const Case& c, DType type) {
    emulator::use_shared_memory(reinterpret_cast<std::uint8_t*>(shared));
    std::mt19937 random(static_cast<unsigned>(c.n * 7 + c.k));
    const auto n = static_cast<std::size_t>(c.n), k = static_cast<std::size_t>(c.k),
               groups = static_cast<std::size_t>(c.groups());
    const auto zero_words = static_cast<std::size_t>(c.zero_words()), bits = static_cast<std::size_t>(c.bits);
    Aligned<std::uint32_t> codes(c.awq() ? k * n / 8 : (k * bits + 31) / 32 * n, c.skew), zeros(groups * zero_words, c.skew);
    for (auto& word : codes.memory) word = static_cast<std::uint32_t>(random());
    for (auto& word : zeros.memory) word = static_cast<std::uint32_t>(random());
    Aligned<float> wide(groups * n, c.skew);
    Aligned<std::uint16_t> narrow(groups * n, c.skew);
    std::vector<float> scales(groups * n);
    for (std::size_t i = 0; i < scales.size(); ++i) {
      wide.first[i] = scales[i] = (static_cast<float>(random() % 2001) - 1000) / 4096;
      if (c.scale == DType::f32) continue;
      narrow.first[i] = emulator::to_half(c.scale, scales[i]);
      scales[i] = emulator::from_half(c.scale, narrow.first[i]);
    }
    Aligned<std::int32_t> g_idx(k, c.skew);
    for (std::size_t i = 0; i < k; ++i) g_idx.first[i] = static_cast<std::int32_t>(i) / c.group;
    if (c.act_order) std::shuffle(g_idx.first, g_idx.first + k, random);

    // Code `at` of a row of words `stride` apart: in order, or in AWQ's of eight neighbours.
    const auto stream = [&](const std::uint32_t* words, std::size_t stride, std::size_t at) {
      unsigned code = 0;
      for (std::size_t bit = at * bits, i = 0; i < bits; ++i, ++bit) code |= (words[bit / 32 * stride] >> bit % 32 & 1) << i;
      return code;
    };
    const auto awq = [](const std::uint32_t* row, std::size_t at) {
      constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
      return row[at / 8] >> 4 * kPlaces[at % 8] & 15;
    };
    const auto weight = [&](std::size_t row, std::size_t channel) {
      const auto g = static_cast<std::size_t>(g_idx.first[channel]);
      const std::uint32_t* of_group = zeros.first + g * zero_words;
      const unsigned code = c.awq() ? awq(codes.first + channel * n / 8, row) : stream(codes.first + row, n, channel);
      const unsigned zero = c.awq()       ? awq(of_group, row)
                            : c.minus_one ? (stream(of_group, 1, row) + 1) % (1u << bits)
                                          : stream(of_group, 1, row);
      return static_cast<float>(static_cast<int>(code) - static_cast<int>(zero)) * scales[g * n + row];
    };

    for (const WeightOrder order : {WeightOrder::nk, WeightOrder::kn}) {
      SCOPED_TRACE(fmt::format("{} {}", nibble::name(type), order == WeightOrder::nk ? "nk" : "kn"));
      constexpr int kCanary = 0x5a;
      Aligned<Out> out(n * k, c.skew);
      std::memset(out.memory.data(), kCanary, out.memory.size() * sizeof(Out));
      const CheckpointWeight w{.format = c.format,
                               .bits = c.bits,
                               .zeros_minus_one = c.minus_one,
                               .scale = c.scale,
                               .n = c.n,
                               .k = c.k,
                               .group = c.group == c.k ? 0 : c.group,
                               .qweight = codes.first,
                               .qzeros = zeros.first,
                               .scales = c.scale == DType::f32 ? static_cast<const void*>(wide.first) : narrow.first,
                               .g_idx = c.act_order ? g_idx.first : nullptr};
      if (type == DType::f16 && order == WeightOrder::nk) {
        EXPECT_STREQ(dequantize_kernel(w, out.first, type, order), c.kernel);
      }
      ASSERT_EQ(dequantize(w, out.first, type, order, nullptr), cudaSuccess);
      for (std::size_t row = 0; row < n; ++row)
        for (std::size_t channel = 0; channel < k; ++channel) {
          Out expected;
          if constexpr (sizeof(Out) == 4)
            expected = std::bit_cast<std::uint32_t>(weight(row, channel));
          else
            expected = emulator::to_half(type, weight(row, channel));
          ASSERT_EQ(out.first[order == WeightOrder::nk ? row * k + channel : channel * n + row], expected)
              << row << " " << channel;
        }
      const auto* const end = reinterpret_cast<const std::uint8_t*>(out.memory.data() + out.memory.size());
      for (const auto* byte = reinterpret_cast<const std::uint8_t*>(out.first + n * k); byte != end; ++byte)
        ASSERT_EQ(*byte, kCanary) << "written past W";
    }
  }
};

TEST_P(EmulatedDequantize, FollowsTheFormat) {
  expect_weights<std::uint16_t>(GetParam(), DType::f16);
  expect_weights<std::uint16_t>(GetParam(), DType::bf16);
  expect_weights<std::uint32_t>(GetParam(), DType::f32);
}

// Every kernel and width; tiles with tails, groups that begin inside a tile, words that are aligned to 4 bytes only.
constexpr auto kAwq = CheckpointFormat::awq, kGptq = CheckpointFormat::gptq;
constexpr Case kCases[] = {
    {"tile", kAwq, 4, false, DType::f16, 160, 320, 64},          {"tile", kAwq, 4, false, DType::f32, 136, 264, 264},
    {"tile", kGptq, 4, true, DType::f16, 200, 320, 128},         {"tile", kGptq, 8, false, DType::bf16, 136, 288, 32},
    {"tile", kGptq, 2, true, DType::f32, 264, 320, 40},          {"gather", kGptq, 4, true, DType::f16, 136, 328, 64, true},
    {"gather", kGptq, 8, false, DType::bf16, 72, 136, 32, true}, {"gather", kGptq, 2, false, DType::f16, 72, 144, 48, true},
    {"generic", kGptq, 3, true, DType::f16, 40, 96, 32},         {"generic", kAwq, 4, false, DType::bf16, 40, 100, 32, false, 1},
    {"generic", kGptq, 4, false, DType::f32, 33, 72, 24, true},  {"generic", kGptq, 8, true, DType::f16, 41, 70, 16},
};
INSTANTIATE_TEST_SUITE_P(Weights, EmulatedDequantize, testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_{}", info.index, name(info.param)); });

}  // namespace
}  // namespace nibble::cuda
