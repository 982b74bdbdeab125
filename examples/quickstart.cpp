// Quantizes a random layer to 4 bits, runs it on 8 tokens and says how far the result is from the float layer's.
#include <nibble/nibble.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() {
  using namespace nibble;
  constexpr std::int64_t m = 8, n = 512, k = 1024;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> w(n * k), a(m * k), d(m * n);
  for (float& x : w) x = 0.02f * normal(random);
  for (float& x : a) x = normal(random);

  const auto fail = [](const Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  const auto quantized = quantize(ConstTensorView(w.data(), {n, k}), "u4b8g128");
  if (!quantized) return fail(quantized.status());
  const LinearSpec spec{.a_dtype = DType::f32, .m_max = m, .epilogue = {.activation = Activation::silu}};
  const auto weight = pack(*quantized, spec);
  if (!weight) return fail(weight.status());
  const auto plan = Plan::linear(*weight);  // for the same specification
  if (!plan) return fail(plan.status());

  std::vector<std::byte> workspace(plan->workspace_bytes());
  const Status status = plan->run(*weight, ConstTensorView(a.data(), {m, k}), TensorView(d.data(), {m, n}), {}, workspace);
  if (!status) return fail(status);

  double error = 0, norm = 0;
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t col = 0; col < n; ++col) {
      double x = 0;
      for (std::int64_t i = 0; i < k; ++i) x += static_cast<double>(a[row * k + i]) * w[col * k + i];
      x /= 1 + std::exp(-x);
      error += (d[row * n + col] - x) * (d[row * n + col] - x);
      norm += x * x;
    }
  std::printf("%s as %s: %zu bytes instead of %zu, kernel %s, relative error %.3f\n", "W[512,1024]",
              weight->scheme().name().c_str(), weight->bytes().size(), w.size() * sizeof(float),
              std::string(plan->kernel(m)).c_str(), std::sqrt(error / norm));
  return std::sqrt(error / norm) < 0.2 ? 0 : 1;
}
