// The loops that dequantize write the same past the caches as through them, with every instruction set of this machine.
#include "kernels/cpu/tiles/dequantize_tile.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "nibble/device.hpp"
#include "nibble/plan.hpp"
#include "random_weights.hpp"

namespace nibble::cpu {
namespace {

using testing::random_weight;

struct Loops {
  Isa isa;
  const DequantizeIsa* loops;
  std::string_view layout;
};
const std::vector<Loops>& all_loops() {
  static const std::vector<Loops> kAll = {
    {Isa::baseline, &kBaselineDequantize, "cpu_n16"},
#if defined(__x86_64__)
    {Isa::avx2, &kAvx2Dequantize, "cpu_n16"},
    {Isa::avx512, &kAvx512Dequantize, "cpu_n32"},
#endif
  };
  return kAll;
}

/// W in rows that are `stride` bytes apart, from the boundary of a line on; bytes that are not written are 0xa5.
std::vector<std::byte> run(const Loops& isa, const PackedWeight& weight, DType type, bool transposed, std::int64_t stride,
                           bool bypass) {
  const std::int64_t rows = transposed ? weight.k() : weight.n();
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows * stride) + 64, std::byte{0xa5});
  const auto misaligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % 64;
  std::byte* const d = bytes.data() + (64 - misaligned) % 64;
  const Decoder decoder(weight.data(), isa.loops->rows);
  const DequantizeTask task{.decoder = &decoder,
                            .weight = weight.bytes().data(),
                            .perm = nullptr,
                            .type = type,
                            .d = d,
                            .stride = stride,
                            .bypass = bypass};
  const std::int64_t blocks = decoder.geometry.row_blocks();
  const std::int64_t together = transposed ? kRowBytes * 8 / bits(type) / isa.loops->rows : blocks;
  for (std::int64_t block = 0; block < blocks; block += together)
    (transposed ? isa.loops->rows_of_k : isa.loops->rows_of_n)(task, {block, std::min(block + together, blocks), 0, weight.k()});
  return {d, d + rows * stride};
}

TEST(Dequantize, BypassingCachesWritesTheSame) {
  constexpr std::int64_t n = 300, k = 333;
  for (const Loops& isa : all_loops()) {
    if (!runs_here(isa.isa).ok()) continue;
    for (const char* scheme : {"u4zg128", "u4b8g16", "s8c"}) {
      const auto weight = pack(random_weight(Scheme::parse(scheme)->weight, n, k, 1), {.layout = std::string(isa.layout)});
      ASSERT_TRUE(weight.ok()) << weight.status().message();
      for (DType type : {DType::f32, DType::f16, DType::bf16})
        for (bool transposed : {false, true})
          for (std::int64_t pitch : {384, 389}) {  // rows at the boundaries of lines, and not
            const std::int64_t stride = pitch * bits(type) / 8;
            const auto through = run(isa, *weight, type, transposed, stride, false);
            const auto past = run(isa, *weight, type, transposed, stride, true);
            EXPECT_EQ(past, through) << name(isa.isa) << " " << scheme << " to " << name(type)
                                     << (transposed ? " [K,N]" : " [N,K]");
            EXPECT_EQ(past.back(), std::byte{0xa5}) << "wrote past the row";
            EXPECT_NE(past.front(), std::byte{0xa5});
          }
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
