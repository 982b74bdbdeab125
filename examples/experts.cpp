// A layer of 8 experts, of which every token goes through 2: by one plan, and by the grouped products that it consists of.
#include <nibble/nibble.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using namespace nibble;

void must(const Status& status) {
  if (!status) std::exit((std::fprintf(stderr, "%s\n", status.message().c_str()), 1));
}
template <class T>
T must(Result<T> result) {
  must(result.status());
  return *std::move(result);
}

int main() {
  constexpr std::int64_t experts = 8, top_k = 2, tokens = 16, pairs = tokens * top_k, k = 256, hidden = 128, n = 256;
  std::mt19937 random(1);
  const auto floats = [&](std::int64_t count, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(static_cast<std::size_t>(count));
    std::ranges::generate(values, [&] { return normal(random); });
    return values;
  };
  const auto weight = [&](std::int64_t rows, std::int64_t columns) {
    return quantize(ConstTensorView(floats(rows * columns, 0.05f).data(), {rows, columns}), "u4b8g64");
  };
  const auto read_gate_up = [&](std::int64_t) { return weight(2 * hidden, k); };
  const auto read_down = [&](std::int64_t) { return weight(n, hidden); };
  const auto x = floats(tokens * k, 1), logits = floats(tokens * experts, 1);
  // docs: begin pack
  const LinearSpec first{.m_max = pairs, .epilogue = {.activation = Activation::silu, .glu = true}}, second{.m_max = pairs};
  const auto gate_up = must(pack_experts(experts, read_gate_up, first));
  const auto down = must(pack_experts(experts, read_down, second));
  // docs: end pack
  // docs: begin route
  std::vector<std::int32_t> ids(pairs);
  std::vector<float> weights(pairs);
  const TensorView ids_view(ids.data(), {tokens, top_k}), weights_view(weights.data(), {tokens, top_k});
  must(route(ConstTensorView(logits.data(), {tokens, experts}), {}, {.top_k = top_k}, ids_view, weights_view));
  // docs: end route

  // docs: begin run
  const auto plan = must(MoePlan::make(gate_up, down, {.tokens_max = tokens, .top_k = top_k}));
  std::vector<std::byte> workspace(plan.workspace_bytes());
  std::vector<float> d(tokens * n);
  must(plan.run(gate_up, down, ConstTensorView(x.data(), {tokens, k}), {.ids = ids_view, .weights = weights_view},
                TensorView(d.data(), {tokens, n}), workspace));
  // docs: end run

  // docs: begin grouped
  std::vector<std::int32_t> offsets{0}, order, rows;  // pairs t · top_k + j, sorted by expert, and their tokens
  for (std::int32_t e = 0; e < experts; ++e) {
    for (std::int32_t pair = 0; pair < pairs; ++pair)
      if (ids[static_cast<std::size_t>(pair)] == e) order.push_back(pair), rows.push_back(pair / top_k);
    offsets.push_back(static_cast<std::int32_t>(rows.size()));
  }
  const auto up = must(GroupedPlan::make(gate_up, first)), back = must(GroupedPlan::make(down, second));
  workspace.resize(std::max({workspace.size(), up.workspace_bytes(), back.workspace_bytes()}));
  std::vector<float> between(pairs * hidden), results(pairs * n);
  const TensorView between_view(between.data(), {pairs, hidden}), results_view(results.data(), {pairs, n});
  const ConstTensorView sorted(offsets.data(), {experts + 1});
  must(up.run(gate_up, ConstTensorView(x.data(), {tokens, k}), {.offsets = sorted, .rows = ConstTensorView(rows.data(), {pairs})},
              between_view, {}, workspace));
  must(back.run(down, between_view, {.offsets = sorted}, results_view, {}, workspace));
  // docs: end grouped

  float worst = 0;
  for (std::int64_t i = 0; i < pairs; ++i)
    for (std::int64_t c = 0; c < n; ++c) d[rows[i] * n + c] -= weights[order[i]] * results[i * n + c];
  for (float difference : d) worst = std::max(worst, std::abs(difference));
  std::printf("8 experts of %zu bytes, largest difference %.1e\n", gate_up.nbytes() + down.nbytes(), static_cast<double>(worst));
  return worst < 1e-4f ? 0 : 1;
}
