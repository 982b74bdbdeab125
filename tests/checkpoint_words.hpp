// Weights as AWQ and GPTQ checkpoints store them, of random bits; and their values by the formats' definitions, a bit at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "nibble/cuda.hpp"

namespace nibble::testing {

struct CheckpointWords {
  CheckpointTensors shape;                     // without pointers
  std::vector<std::uint32_t> qweight, qzeros;  // words
  Tensor scales;                               // [G,N]; some are 0, subnormal, or as large as f16 can be
  std::vector<std::int32_t> g_idx;             // [K]; shuffled for act-order, else k / group

  CheckpointWords(const CheckpointTensors& described, bool act_order, std::uint32_t seed) : shape(described) {
    std::mt19937 random(seed);
    qweight.resize(static_cast<std::size_t>(awq() ? shape.k * (shape.n / 8) : (shape.k * shape.bits + 31) / 32 * shape.n));
    qzeros.resize(static_cast<std::size_t>(groups() * zero_words()));
    for (auto* words : {&qweight, &qzeros})
      for (std::uint32_t& word : *words) word = static_cast<std::uint32_t>(random());
    scales = Tensor(shape.scale, {groups(), shape.n});
    for (std::int64_t i = 0; i < scales.numel(); ++i) {
      const float usual = (static_cast<float>(random() % 2001) - 1000) / 4096, rare[] = {0.0f, -0x1p-24f, 65504.0f};
      scales.set(i, random() % 16 == 0 ? rare[random() % 3] : usual);
    }
    for (std::int64_t k = 0; k < shape.k; ++k) g_idx.push_back(static_cast<std::int32_t>(k / group()));
    if (act_order) std::shuffle(g_idx.begin(), g_idx.end(), random);
  }

  bool awq() const { return shape.format == CheckpointTensors::Format::awq; }
  std::int64_t group() const { return shape.group == 0 ? shape.k : shape.group; }
  std::int64_t groups() const { return (shape.k + group() - 1) / group(); }
  std::int64_t zero_words() const { return awq() ? shape.n / 8 : (shape.n * shape.bits + 31) / 32; }

  /// W[n,k].
  float value(std::int64_t n, std::int64_t k) const {
    const std::int64_t g = g_idx[static_cast<std::size_t>(k)];
    const std::uint32_t* const zeros = qzeros.data() + g * zero_words();
    const unsigned code = awq() ? nibble_of(qweight.data() + k * (shape.n / 8), n) : code_of(qweight.data() + n, shape.n, k);
    unsigned zero = awq() ? nibble_of(zeros, n) : code_of(zeros, 1, n);
    if (shape.zeros_minus_one) zero = (zero + 1) % (1u << shape.bits);
    return static_cast<float>(static_cast<int>(code) - static_cast<int>(zero)) * scales.at(g * shape.n + n);
  }

 private:
  /// Of eight neighbours in a word, in AWQ's order.
  static unsigned nibble_of(const std::uint32_t* row, std::int64_t at) {
    constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    return row[at / 8] >> 4 * kPlaces[at % 8] & 15;
  }
  /// Of a stream of codes in words `stride` apart.
  unsigned code_of(const std::uint32_t* words, std::int64_t stride, std::int64_t at) const {
    unsigned code = 0;
    for (int i = 0; i < shape.bits; ++i) {
      const std::int64_t bit = at * shape.bits + i;
      code |= (words[bit / 32 * stride] >> bit % 32 & 1) << i;
    }
    return code;
  }
};

}  // namespace nibble::testing
