// W from the tensors of AWQ and GPTQ checkpoints (dequantize.cu) on the emulated GPU, bit for bit.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "checkpoint_words.hpp"
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

  bool awq() const { return format == CheckpointFormat::awq; }
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
  Aligned(const T* from, std::size_t count, std::size_t skew) : Aligned(count, skew) { std::copy_n(from, count, first); }
};

class EmulatedDequantize : public ::testing::TestWithParam<Case> {
 protected:
  template <class Out>
  void expect_weights(const Case& c, DType type) {
    emulator::use_shared_memory(reinterpret_cast<std::uint8_t*>(shared));
    const testing::CheckpointWords words({.format = c.awq() ? CheckpointTensors::Format::awq : CheckpointTensors::Format::gptq,
                                          .bits = c.bits,
                                          .zeros_minus_one = c.minus_one,
                                          .scale = c.scale,
                                          .n = c.n,
                                          .k = c.k,
                                          .group = c.group},
                                         c.act_order, static_cast<unsigned>(c.n * 7 + c.k));
    const auto n = static_cast<std::size_t>(c.n), k = static_cast<std::size_t>(c.k);
    const Aligned codes(words.qweight.data(), words.qweight.size(), c.skew),
        zeros(words.qzeros.data(), words.qzeros.size(), c.skew);
    const Aligned scales(words.scales.bytes.data(), words.scales.bytes.size(),
                         c.skew * static_cast<std::size_t>(bits(c.scale) / 8));
    const Aligned g_idx(words.g_idx.data(), k, c.skew);
    const auto weight = [&](std::size_t row, std::size_t channel) {
      return words.value(static_cast<std::int64_t>(row), static_cast<std::int64_t>(channel));
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
                               .scales = scales.first,
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
INSTANTIATE_TEST_SUITE_P(Weights, EmulatedDequantize, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_{}", info.index, name(info.param)); });

}  // namespace
}  // namespace nibble::cuda
