// What the conformance tests of linear layers share: the problems that a row of the kernel table takes, and how it is verified.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel.hpp"
#include "nibble/nibble.hpp"
#include "random_weights.hpp"
#include "rows.hpp"

namespace nibble {

struct Shape {
  std::int64_t m, n, k;
};
/// 1, tile ± 1, primes, K of one group, and a slice of a real layer.
std::vector<Shape> shapes_for(const Kernel& kernel);
/// The memory from which the kernel reads weights.
Backend memory_of(const Kernel& kernel);
/// The type of A, varied by the seed; kernels of 16-bit floats take only their type, those of fixed point on the GPU only f32.
DType act_for(const Kernel& kernel, std::uint64_t turn);
/// How A is quantized for a kernel that multiplies codes: per token, in blocks, or with one scale that is known before, by those that take
/// nothing else.
ActScheme quantize_for(const Kernel& kernel);
bool knows_the_scale(const Kernel& kernel);
/// random_weight(), with the scale of activations where the kernel has to know it: a power of two, with which exact data stays exact.
QuantTensor weight_for(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, std::uint64_t seed,
                       const testing::RandomWeight& with = {});
Problem problem_for(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
                    DType act);
bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k, const ActScheme& quantize,
           DType act);
bool takes(const Kernel& kernel, const WeightScheme& scheme, std::int64_t n, std::int64_t k);
/// `wanted` or, if the kernel does not take it, something close that it takes.
WeightScheme scheme_for(const Kernel& kernel, const WeightScheme& wanted, std::int64_t n = 64, std::int64_t k = 1024);
bool takes_act_order(const Kernel& kernel, const WeightScheme& scheme, const Shape& shape, const ActScheme& quantize, DType act);
bool takes_prescale(const Kernel& kernel);
/// The schemes a kernel takes for W[n,k]. A kernel that takes none would pass without being tested.
std::vector<WeightScheme> schemes_for(const Kernel& kernel, std::int64_t n = 64, std::int64_t k = 1024);
std::vector<const Kernel*> kernels_of(Op op, bool (*which)(const Kernel&) = nullptr);
/// Every linear kernel that takes a scheme, and those that this machine cannot run.
std::vector<const Kernel*> linear_kernels_taking(bool (*something)(const Kernel&));
std::string test_name(const ::testing::TestParamInfo<const Kernel*>& info);
std::string name_of(const WeightScheme& weight, const ActScheme& act);
Tensor gaussian(DType dtype, std::int64_t m, std::int64_t k);
ConstTensorView view_of(const Tensor& t);
VerifySpec spec_for(const Kernel& kernel, std::int64_t m, DType act, const EpilogueSpec& epilogue, std::uint64_t seed);
void expect_verified(const QuantTensor& q, const VerifySpec& spec, std::string_view kernel);

/// Skipped where the kernel does not run.
class OfKernel : public ::testing::TestWithParam<const Kernel*> {
 protected:
  void SetUp() override {
    if (const Status here = runs_there(*GetParam(), {}); !here.ok()) GTEST_SKIP() << here.message();
  }
};
class LinearConformance : public OfKernel {};

}  // namespace nibble
