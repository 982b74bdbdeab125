// Measures the error that quantizing activations adds to a layer, with the kernels that would run.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.hpp"
#include "core/sizes.hpp"
#include "nibble/verify.hpp"
#include "plan/gaussian.hpp"

namespace nibble {
namespace {

/// At most `count` rows of `a`, evenly spread.
Tensor spread_rows(const ConstTensorView& a, std::int64_t count) {
  const std::int64_t rows = a.dim(0), k = a.dim(1), width = bits(a.dtype) / 8, taken = std::clamp<std::int64_t>(count, 1, rows);
  Tensor out(a.dtype, {taken, k});
  for (std::int64_t i = 0; i < taken; ++i)
    std::memcpy(out.bytes.data() + i * k * width, static_cast<const std::byte*>(a.data) + i * rows / taken * a.stride(0) * width,
                static_cast<std::size_t>(k * width));
  return out;
}

Result<Tensor> inputs_of(const QuantTensor& q, const ActErrorSpec& spec) {
  const ConstTensorView& a = spec.inputs;
  NIBBLE_RETURN_IF_ERROR(check_outliers(spec.outliers));
  NIBBLE_RETURN_IF_ERROR(check_product(std::max<std::int64_t>(1, spec.tokens), q.n, q.k));
  if (a.empty()) return gaussian_activations(DType::f32, std::max<std::int64_t>(1, spec.tokens), q.k, spec.seed, spec.outliers);
  if (!is_compute_float(a.dtype) || a.rank != 2 || a.dim(0) < 1 || a.dim(1) != q.k || a.stride(1) != 1)
    return error(StatusCode::invalid_argument,
                 "inputs must be f32, f16 or bf16 [tokens,{}] with a last stride of 1, got {} [{},{}]", q.k, name(a.dtype),
                 a.dim(0), a.dim(1));
  return spread_rows(a, spec.tokens);
}

/// D with the activations quantized as `mode` says.
Result<Tensor> run_mode(const QuantTensor& q, const ActScheme& mode, const Tensor& a, Executor& executor) {
  const LinearSpec spec{.a_dtype = a.dtype, .m_max = a.shape[0], .act_scheme = mode};
  NIBBLE_ASSIGN_OR_RETURN(const PackedWeight weight, pack(q, spec, {.executor = &executor}));
  NIBBLE_ASSIGN_OR_RETURN(
      const Plan plan, Plan::linear(weight, spec, {.allow_reference = mode.codes == DType::none, .threads = executor.threads()}));
  Tensor d(DType::f32, {a.shape[0], q.n});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  NIBBLE_RETURN_IF_ERROR(plan.run(weight, ConstTensorView(a.bytes.data(), a.dtype, {a.shape[0], q.k}),
                                  TensorView(d.bytes.data(), d.dtype, {a.shape[0], q.n}), {}, workspace, &executor));
  return d;
}

}  // namespace

Result<std::vector<ActError>> activation_errors(const QuantTensor& q, std::span<const ActScheme> modes, const ActErrorSpec& spec,
                                                Executor* executor) try {
  NIBBLE_RETURN_IF_ERROR(check_environment());
  NIBBLE_RETURN_IF_ERROR(q.validate());
  Executor& on = executor != nullptr ? *executor : default_executor();
  NIBBLE_ASSIGN_OR_RETURN(const Tensor a, inputs_of(q, spec));
  NIBBLE_ASSIGN_OR_RETURN(const Tensor plain, run_mode(q, {}, a, on));
  double norm = 0;
  for (std::int64_t i = 0; i < plain.numel(); ++i) norm += std::pow(plain.at(i), 2.0);
  std::vector<ActError> errors;
  for (const ActScheme& mode : modes) {
    ActError& found = errors.emplace_back();
    found.act_scheme = mode;
    const Result<Tensor> d = run_mode(q, mode, a, on);
    found.possible = d.status();
    if (!d.ok()) continue;
    double moved = 0;
    for (std::int64_t i = 0; i < plain.numel(); ++i) moved += std::pow(double{d->at(i)} - double{plain.at(i)}, 2.0);
    found.relative_l2 = moved == 0 ? 0 : std::sqrt(moved / norm);
    found.sqnr_db = -20 * std::log10(found.relative_l2);
  }
  return errors;
} catch (...) {
  return caught();
}

}  // namespace nibble
