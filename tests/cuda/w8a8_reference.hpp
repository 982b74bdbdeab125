// The reference of w8a8_check: random codes, their products by definition, and the comparison, all on the GPU.
//
// A thread makes an output from the formula of w8a8_task.hpp, a product after the other. Of the kernels' sources it uses only the layout's
// index maths. Everything runs in the default stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tasks/w8a8_task.hpp"

namespace nibble::cuda {

/// Normal numbers as codes: s8 with a deviation of 32, or e4m3 with one of 60; never a NaN.
void fill_codes(void* codes, std::int64_t count, bool integers, std::uint32_t seed);
/// Uniform numbers: around · [0.5, 1.5), −128 … 127.
void fill_scales(float* scales, std::int64_t count, float around, std::uint32_t seed);
void fill_zeros(std::int32_t* zeros, std::int64_t count, std::uint32_t seed);
/// Sums of the s8 codes of each row.
void sum_codes(const void* codes, std::int64_t pitch, std::int64_t rows, std::int64_t k, std::int32_t* sums);
/// The records of a weight, from codes[N,K].
void pack_codes(const void* codes, const gpu_w8::Geometry& geometry, std::byte* weight);

/// D before it is rounded to its type, [M,N] each.
struct Expected {
  float* value = nullptr;
  float* spread = nullptr;  // of e4m3: √Σ p², p an output's products with their scales, as large as a random sum of them is
};
/// Of a task whose weight has the codes[N,K]. Of the epilogue there may be a bias in f32.
void multiply_codes(const W8A8Task& task, const void* codes, const Expected& expected);

/// |D − value| ≤ spread · Expected::spread + relative · |value| + absolute. All 0: the same bits.
struct Bound {
  float spread = 0, relative = 0, absolute = 0;
};

struct Difference {
  unsigned long long count = 0, first = ~0ull;  // an index
};
/// Elements of D that are not as expected, and those beside it that are no longer all ones: of D[M + 1, d_stride], the last row and
/// columns past N must not change. Adds to *found, which is device memory.
void compare(const W8A8Task& task, const Expected& expected, const Bound& bound, Difference* found);
/// Words of 32 bits that differ.
void compare_words(const void* a, const void* b, std::int64_t words, Difference* found);

}  // namespace nibble::cuda
