// Tile registers belong to the thread: a library that configured them before a product finds them so after it.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "nibble/nibble.hpp"
#include "random_weights.hpp"

namespace nibble {
namespace {

using Config = std::array<std::uint8_t, 64>;

__attribute__((target("amx-tile"))) void configure(const Config& config) { _tile_loadconfig(config.data()); }
__attribute__((target("amx-tile"))) void release() { _tile_release(); }
__attribute__((target("amx-tile"))) Config configuration() {
  Config config{};
  _tile_storeconfig(config.data());
  return config;
}

void run(const char* text, DType type, const char* kernel, std::int64_t m) {
  const Scheme scheme = *Scheme::parse(text);
  const QuantTensor q = testing::random_weight(scheme.weight, 96, 256, 1);
  const LinearSpec spec{.a_dtype = type, .m_max = m, .act_scheme = scheme.act};
  const auto packed = pack(q, spec);
  ASSERT_TRUE(packed.ok()) << packed.status().message();
  const auto plan = Plan::linear(*packed, spec, {.kernel = kernel});
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const std::vector<float> floats(static_cast<std::size_t>(m * 256), 0.5f);
  const std::vector<bf16> halves(floats.size(), to_bf16(0.5f));
  const ConstTensorView a =
      type == DType::f32 ? ConstTensorView(floats.data(), {m, 256}) : ConstTensorView(halves.data(), {m, 256});
  std::vector<float> d(static_cast<std::size_t>(m * 96));
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const std::unique_ptr<Executor> this_thread = make_executor(1);
  const Status status = plan->run(*packed, a, TensorView(d.data(), {m, 96}), {}, workspace, this_thread.get());
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST(AmxTiles, AreAsTheThreadHadThem) {
  if (!this_device().has(Isa::amx)) GTEST_SKIP() << "this CPU has no AMX";
  Config own{};  // palette 1, and eight tiles of 3 rows of 32 bytes
  own[0] = 1;
  for (std::size_t tile = 0; tile < 8; ++tile) own[16 + 2 * tile] = 32, own[48 + tile] = 3;
  struct Case {
    const char* scheme;
    DType type;
    const char* kernel;
  };
  for (const auto& [scheme, type, kernel] : {Case{"u4b8g128", DType::bf16, "linear_any_bf16k32_any__cpu_amx_m32n32"},
                                             Case{"s8g128_u4b8g128", DType::f32, "linear_any_s8k64_any__cpu_amx_m32n32"},
                                             Case{"s8r_s8c", DType::f32, "linear_any_s8k64_any__cpu_amx_whole_m32n32"}})
    for (const std::int64_t m : {3, 40}) {
      SCOPED_TRACE(kernel);
      configure(own);
      run(scheme, type, kernel, m);
      EXPECT_EQ(configuration(), own) << "M = " << m;
      release();
      run(scheme, type, kernel, m);
      EXPECT_EQ(configuration(), Config{}) << "M = " << m;
    }
}

}  // namespace
}  // namespace nibble
#endif
