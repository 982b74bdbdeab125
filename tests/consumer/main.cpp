// The shortest way through nibble: float weights → quantized → packed → planned → run, and a look at the result.
#include <nibble/nibble.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  constexpr std::int64_t m = 3, n = 40, k = 128;
  std::vector<float> w(n * k), a(m * k), d(m * n);
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = std::sin(0.1f * static_cast<float>(i));
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::cos(0.2f * static_cast<float>(i));

  const auto quantized = nibble::quantize(nibble::ConstTensorView(w.data(), {n, k}), "u8b128g32");
  if (!quantized) return std::fprintf(stderr, "%s\n", quantized.status().message().c_str()), 1;
  const auto weight = nibble::pack(*quantized);
  if (!weight) return std::fprintf(stderr, "%s\n", weight.status().message().c_str()), 1;
  nibble::LinearSpec linear;
  linear.m_max = m;
  const auto plan = nibble::Plan::linear(*weight, linear);
  if (!plan) return std::fprintf(stderr, "%s\n", plan.status().message().c_str()), 1;

  std::vector<std::byte> workspace(plan->workspace_bytes());
  const nibble::Status ran =
      plan->run(*weight, nibble::ConstTensorView(a.data(), {m, k}), nibble::TensorView(d.data(), {m, n}), {}, workspace);
  if (!ran) return std::fprintf(stderr, "%s\n", ran.message().c_str()), 1;

  double error = 0, norm = 0;
  for (std::int64_t row = 0; row < m; ++row) {
    for (std::int64_t col = 0; col < n; ++col) {
      double exact = 0;
      for (std::int64_t i = 0; i < k; ++i) exact += double{a[row * k + i]} * double{w[col * k + i]};
      error += std::pow(d[row * n + col] - exact, 2);
      norm += exact * exact;
    }
  }
  const double relative = std::sqrt(error / norm);
  std::printf("nibble " NIBBLE_VERSION ": %s in layout %s with %s, relative error %.1e\n", quantized->scheme.name().c_str(),
              std::string(weight->layout()).c_str(), std::string(plan->kernel(m)).c_str(), relative);
  return relative < 0.02 ? 0 : 1;
}
