// The compiler's intrinsics, declared whatever the file's default target is; target regions decide where each may be used.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#if defined(__clang__)  // before version 16 it declares these only when the whole file is compiled for them
#ifndef __ARM_FEATURE_DOTPROD
#define __ARM_FEATURE_DOTPROD 1
#endif
#ifndef __ARM_FEATURE_MATMUL_INT8
#define __ARM_FEATURE_MATMUL_INT8 1
#endif
#ifndef __ARM_FEATURE_BF16
#define __ARM_FEATURE_BF16 1
#endif
#ifndef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define __ARM_FEATURE_BF16_VECTOR_ARITHMETIC 1
#endif
#endif
#include <arm_neon.h>
#endif
