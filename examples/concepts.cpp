// The values of docs/concepts.md, one after the other: what a layer is, how it is packed, planned and run.
#include <nibble/nibble.hpp>

#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

int fail(const nibble::Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

}  // namespace

// docs: begin program
int main() {
  using namespace nibble;
  constexpr std::int64_t n = 512, k = 1024, m = 3, m_max = 64;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> w(n * k), a(m * k), d(m * n), again(m * n);
  for (float& x : w) x = 0.02f * normal(random);
  for (float& x : a) x = normal(random);

  // A Scheme says what numbers mean; a QuantTensor holds them. Checkpoint::read gives one, too.
  const auto quantized = quantize(ConstTensorView(w.data(), {n, k}), "u4zg128");
  if (!quantized) return fail(quantized.status());
  std::printf("%s: %s\n", quantized->scheme.name().c_str(), quantized->scheme.describe().c_str());

  // A PackedWeight has the same numbers in the order in which the kernels of a specification read them. It is made once.
  const auto weight = pack(*quantized, LinearSpec{.m_max = m_max, .epilogue = {.activation = Activation::silu}});
  if (!weight) return fail(weight.status());
  std::printf("packed as %s: %zu bytes\n", std::string(weight->layout()).c_str(), weight->bytes().size());

  // A Plan is made once for all layers of one shape and scheme: which kernels run for which M, and how they end; here for
  // the specification that the weight was packed for.
  const auto plan = Plan::linear(*weight);
  if (!plan) return fail(plan.status());
  const Explanation explanation = plan->explain();
  for (const Explanation::Bucket& bucket : explanation.buckets) {
    std::printf("M = %lld … %lld:", static_cast<long long>(bucket.m_low), static_cast<long long>(bucket.m_high));
    for (const std::string_view kernel : bucket.steps) std::printf(" %s", std::string(kernel).c_str());
    std::printf("\n");
  }

  // run() only runs: what it needs beyond its operands is the workspace. The number of threads does not show in the result.
  std::vector<std::byte> workspace(plan->workspace_bytes());
  const auto one = make_executor(1), two = make_executor(2);
  const ConstTensorView a_view(a.data(), {m, k});
  const Status status = plan->run(*weight, a_view, TensorView(d.data(), {m, n}), {}, workspace, one.get());
  if (!status) return fail(status);
  const Status second = plan->run(*weight, a_view, TensorView(again.data(), {m, n}), {}, workspace, two.get());
  if (!second) return fail(second);
  std::printf("the same bits on one thread and on two: %s\n", d == again ? "yes" : "no");
  return d == again ? 0 : 1;
}
// docs: end program
