#include "linear_rows.hpp"

#include <algorithm>
#include <array>

namespace nibble {

using testing::all_schemes;

std::vector<Shape> shapes_for(const Kernel& kernel) {
  const std::int64_t tm = std::max(1, kernel.tile.m), tn = std::max(1, kernel.tile.n);
  std::vector<Shape> shapes = {{1, 1, 1},
                               {1, tn, 128},
                               {tm, tn - 1 > 0 ? tn - 1 : 1, 127},
                               {tm + 1, tn + 1, 129},
                               {3, 37, 61},
                               {tm * 17 + 1, 2 * tn + 3, 257},
                               {1, 96, 2048},
                               {5, 64, 640}};
  // So many row blocks that a thread multiplies several side by side.
  if (kernel.backend == Backend::cpu)
    shapes.insert(shapes.end(), {{1, 27 * tn + 3, 136}, {2, 26 * tn, 40}, {5, 10 * tn + 1, 72}});
  return shapes;
}

Backend memory_of(const Kernel& kernel) { return kernel.backend == Backend::cuda ? Backend::cuda : Backend::cpu; }

/// Whether it makes the codes of W8A8 itself, of 16-bit floats.
static bool quantizes_w8a8(const Kernel& kernel) { return kernel.quantizes && kernel.layout == "gpu_w8n64k128"; }

DType act_for(const Kernel& kernel, std::uint64_t turn) {
  if (quantizes_w8a8(kernel)) return turn % 2 == 0 ? DType::f16 : DType::bf16;
  if (kernel.form == ActForm::s8x3_rows || kernel.form == ActForm::f16x2_rows || kernel.form == ActForm::bf16x3k32)
    return DType::f32;
  if (kernel.form == ActForm::bf16x2k32) return DType::f16;
  if (kernel.act.starts_with("bf16")) return DType::bf16;
  if (kernel.act == "f16") return DType::f16;
  if (kernel.act == "f32" && kernel.backend == Backend::cuda) return DType::f32;
  return std::array{DType::f32, DType::f16, DType::bf16}[turn % 3];
}

ActScheme quantize_for(const Kernel& kernel) {
  if (quantizes_w8a8(kernel)) return {DType::s8, GroupShape::tensor()};
  if (kernel.act == "s8" || kernel.act == "s8k64") return {DType::s8, GroupShape::channel()};
  if (kernel.act == "s8i16" || kernel.quantizes) return {DType::s8, GroupShape::group(128)};
  if (kernel.act.starts_with("e4m3")) return {DType::e4m3, GroupShape::channel()};
  return {};
}

bool knows_the_scale(const Kernel& kernel) {
  const ActScheme act = quantize_for(kernel);
  return act.codes != DType::none && act.group == GroupShape::tensor();
}

QuantTensor weight_for(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, std::uint64_t seed,
                       const testing::RandomWeight& with) {
  QuantTensor q = testing::random_weight(scheme, n, k, seed, with);
  if (knows_the_scale(kernel)) q.static_acts = {0x1p-5f, 0};
  return q;
}

Problem problem_for(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
                    DType act) {
  return {.op = kernel.op,
          .n = n,
          .k = k,
          .scheme = scheme,
          .zero_type = testing::zero_type(scheme),
          .memory = memory_of(kernel),
          .a_dtype = act,
          .act_scheme = quantize};
}

bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
           DType act) {
  const std::int64_t group = scheme.group.k, block = quantize.group.k;
  if (scheme.is_dense() && quantize.codes != DType::none) return false;                    // plans refuse it
  if (block != 0 && group != 0 && group % block != 0 && block % group != 0) return false;  // plans refuse it
  return kernel.accepts(kernel, problem_for(kernel, scheme, n, k, quantize, act)).ok();
}

bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k) {
  return takes(kernel, scheme, n, k, quantize_for(kernel), act_for(kernel, 0));
}

WeightScheme scheme_for(const Kernel& kernel, const WeightScheme& wanted, std::int64_t n, std::int64_t k) {
  std::vector<WeightScheme> candidates(3, wanted);
  candidates[1].group = GroupShape::channel();
  candidates[2].group = GroupShape::group(32);
  std::ranges::copy(all_schemes(), std::back_inserter(candidates));
  const auto first = std::ranges::find_if(candidates, [&](const WeightScheme& s) { return takes(kernel, s, n, k); });
  EXPECT_NE(first, candidates.end()) << kernel.name;
  return first == candidates.end() ? wanted : *first;
}

bool takes_act_order(const Kernel& kernel, const WeightScheme& scheme, const Shape& shape, const ActScheme& quantize, DType act) {
  Problem problem = problem_for(kernel, scheme, shape.n, shape.k, quantize, act);
  problem.permutes_k = true;
  return kernel.accepts(kernel, problem).ok();
}

bool takes_prescale(const Kernel& kernel) {
  Problem problem = problem_for(kernel, scheme_for(kernel, {}), 64, 128, quantize_for(kernel), act_for(kernel, 0));
  problem.prescales_k = true;
  return kernel.accepts(kernel, problem).ok();
}

std::vector<WeightScheme> schemes_for(const Kernel& kernel, std::int64_t n, std::int64_t k) {
  std::vector<WeightScheme> list;
  for (const WeightScheme& scheme : all_schemes())
    if (takes(kernel, scheme, n, k)) list.push_back(scheme);
  EXPECT_FALSE(list.empty()) << kernel.name;
  return list;
}

std::vector<const Kernel*> kernels_of(Op op, bool (*which)(const Kernel&)) {
  std::vector<const Kernel*> list;
  for (const Kernel& kernel : kernel_table())
    if (kernel.op == op && is_built(kernel) && takes_one_weight(kernel) && (which == nullptr || which(kernel)))
      list.push_back(&kernel);
  return list;
}

std::vector<const Kernel*> linear_kernels_taking(bool (*something)(const Kernel&)) {
  auto list = kernels_of(Op::linear);
  std::erase_if(list, [&](const Kernel* kernel) { return runs_there(*kernel, {}).ok() && !something(*kernel); });
  return list;
}

std::string test_name(const ::testing::TestParamInfo<const Kernel*>& info) { return std::string(info.param->name); }

std::string name_of(const WeightScheme& weight, const ActScheme& act) { return Scheme{weight, act}.name(); }

Tensor gaussian(DType dtype, std::int64_t m, std::int64_t k) {
  Tensor a(dtype, {m, k});
  for (std::int64_t i = 0; i < a.numel(); ++i) a.set(i, random_normal(9, static_cast<std::uint64_t>(i)));
  return a;
}

ConstTensorView view_of(const Tensor& t) {
  if (t.shape.size() == 1) return {t.bytes.data(), t.dtype, {t.shape[0]}};
  return {t.bytes.data(), t.dtype, {t.shape[0], t.shape[1]}};
}

VerifySpec spec_for(const Kernel& kernel, std::int64_t m, DType act, const EpilogueSpec& epilogue, std::uint64_t seed) {
  VerifySpec spec;
  spec.linear = {.a_dtype = act, .m_max = m, .epilogue = epilogue};
  spec.linear.act_scheme = quantize_for(kernel);
  spec.seed = seed;
  spec.plan.kernel = kernel.name;
  return spec;
}

void expect_verified(const QuantTensor& q, const VerifySpec& spec, std::string_view kernel) {
  const auto report = verify_linear(q, spec);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->kernel, kernel);  // the forced one ran
  EXPECT_TRUE(report->passed) << q.scheme.name() << " W[" << q.n << "," << q.k << "] " << spec.linear.epilogue.name() << ": "
                              << report->failure;
}

}  // namespace nibble
