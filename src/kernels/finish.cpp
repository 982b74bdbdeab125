#include "kernels/finish.hpp"

#include <cstring>

namespace nibble {
namespace {

/// Row i of `to` is row from(i) of `rows`, each `bytes` long.
template <class Bytes, class From>
Bytes permuted(const Bytes& rows, std::int64_t n, From from) {
  Bytes to(rows.size());
  const std::size_t bytes = rows.size() / static_cast<std::size_t>(n);
  for (std::int64_t i = 0; i < n; ++i)
    std::memcpy(to.data() + static_cast<std::size_t>(i) * bytes, rows.data() + static_cast<std::size_t>(from(i)) * bytes, bytes);
  return to;
}

template <class From>
void permute_rows(QuantTensor& q, From from) {
  q.codes = permuted(q.codes, q.n, from);
  for (Tensor* parameters : {&q.scales, &q.zeros})
    if (!parameters->empty() && q.scheme.group.rows(q.n) == q.n) parameters->bytes = permuted(parameters->bytes, q.n, from);
}

}  // namespace

bool pairs_rows(const EpilogueSpec& epilogue, const WeightScheme& scheme) { return epilogue.glu && scheme.group.n <= 1; }

QuantTensor with_paired_rows(const QuantTensor& q) {
  QuantTensor paired = q;
  permute_rows(paired, [half = q.n / 2](std::int64_t i) { return i / 2 + i % 2 * half; });
  return paired;
}

void unpair_rows(QuantTensor& q) {
  permute_rows(q, [half = q.n / 2](std::int64_t i) { return i < half ? 2 * i : 2 * (i - half) + 1; });
}

bool needs_finish(const Problem& problem) {
  constexpr std::int64_t kTokens = 16;  // of which the GPU's kernels store a glu at no cost
  if (problem.op != Op::linear) return false;
  if (problem.experts != 0 && problem.epilogue.bias) return true;
  if (!problem.epilogue.glu) return false;
  return !pairs_rows(problem.epilogue, problem.scheme) || (problem.memory == Backend::cuda && mean_expert(problem).m > kTokens);
}

Problem product_of(const Problem& problem) {
  Problem product = problem;
  product.epilogue = {.out = problem.epilogue.factor_type()};
  return product;
}

Problem finishing(const Problem& problem) {
  Problem finishing = problem;
  finishing.op = Op::finish;
  finishing.layout = {};
  finishing.u8_codes = finishing.normalizes = false;
  return finishing;
}

TensorView sums_view(const Problem& problem, std::byte* data) {
  return {data, product_of(problem).epilogue.out, {problem.m, problem.n}};
}

std::size_t sums_bytes(const Problem& problem) {
  if (!needs_finish(problem)) return 0;
  return static_cast<std::size_t>(problem.m * problem.n * bits(product_of(problem).epilogue.out) / 8);
}

}  // namespace nibble
