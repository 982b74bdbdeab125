// Packs the first layer of experts of a checkpoint, sends 4 tokens through 2 experts each, and compares a channel of each with double precision.
//
// usage: expert_layers DIR      `nibble sample experts --shapes tiny --experts 8 --top-k 2` makes one
#include <nibble/nibble.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace nibble;

template <class T>
T must(Result<T> result) {
  if (!result) std::exit((std::fprintf(stderr, "%s\n", result.status().message().c_str()), 1));
  return *std::move(result);
}

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: %s DIR\n", argv[0]), 2;
  constexpr std::int64_t tokens = 4, top_k = 2;
  // docs: begin checkpoint
  const Checkpoint checkpoint = must(Checkpoint::open(argv[1]));
  const LinearSpec first{.m_max = tokens, .epilogue = {.activation = Activation::silu, .glu = true}}, second{.m_max = tokens};
  const std::vector<ExpertLayer> layers = expert_layers(checkpoint);
  if (layers.empty()) return std::fprintf(stderr, "%s has no experts\n", argv[1]), 1;
  const PackedExpertLayer packed = must(pack_experts(checkpoint, layers.front(), first, second));
  const MoePlan plan = must(MoePlan::make(packed.gate_up, packed.down, {.tokens_max = tokens, .top_k = top_k}));
  // docs: end checkpoint
  const std::int64_t k = packed.gate_up.k(), n = packed.down.n(), hidden = packed.down.k(), experts = packed.down.count();
  std::vector<float> x(tokens * k), d(tokens * n), weights(tokens * top_k, 0.5f);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 101) / 50 - 1;
  std::vector<std::int32_t> ids;
  for (std::int64_t pair = 0; pair < tokens * top_k; ++pair) ids.push_back(static_cast<std::int32_t>(pair % experts));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const Status ran =
      plan.run(packed.gate_up, packed.down, ConstTensorView(x.data(), {tokens, k}),
               {.ids = ConstTensorView(ids.data(), {tokens, top_k}), .weights = ConstTensorView(weights.data(), {tokens, top_k})},
               TensorView(d.data(), {tokens, n}), workspace);
  if (!ran) return std::fprintf(stderr, "%s\n", ran.message().c_str()), 1;
  double error = 0, size = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    double expected = 0;
    for (std::int64_t j = 0; j < top_k; ++j) {
      const std::int32_t expert = ids[t * top_k + j];
      const QuantTensor up = must(read_gate_up(checkpoint, layers.front(), expert)),
                        down = must(read_down(checkpoint, layers.front(), expert));
      const auto product = [&](std::int64_t row) {
        double sum = up.bias.empty() ? 0 : up.bias.at(row);
        for (std::int64_t i = 0; i < k; ++i) sum += x[t * k + i] * up.value(row, i);
        return sum;
      };
      double result = down.bias.empty() ? 0 : down.bias.at(t);
      for (std::int64_t i = 0; i < hidden; ++i) {
        const double gate = product(i);
        result += gate / (1 + std::exp(-gate)) * product(hidden + i) * down.value(t, i);
      }
      expected += 0.5 * result;
    }
    error += std::pow(d[t * n + t] - expected, 2), size += expected * expected;
  }
  std::printf("%s: %lld experts in %.1f MB, relative error %.1e\n", layers.front().name.c_str(), static_cast<long long>(experts),
              static_cast<double>(packed.gate_up.nbytes() + packed.down.nbytes()) * 1e-6, std::sqrt(error / size));
  return std::sqrt(error / size) < 1e-4 ? 0 : 1;
}
