// Includes the file that NIBBLE_LOOPS names once per instruction set, in that set's namespace and target region, after simd.inl.
// A file that has no code for an instruction set is empty there, by a test of NIBBLE_ISA.

// A loop that is copied for each set of constant arguments. Under a sanitizer, where compiling the copies takes many minutes, there is one
// copy with variable arguments: it makes the same memory accesses. Not every file calls every one that it includes.
#if defined(NIBBLE_SANITIZED)
#define NIBBLE_VARIANT __attribute__((noinline, unused))
#else
#define NIBBLE_VARIANT __attribute__((always_inline)) inline
#endif

#define NIBBLE_ISA_BASELINE 0
#define NIBBLE_ISA_AVX2 1
#define NIBBLE_ISA_AVX2VNNI 2
#define NIBBLE_ISA_AVX512 3
#define NIBBLE_ISA_AVX512VNNI 4
#define NIBBLE_ISA_AVX512BF16 5
#define NIBBLE_ISA_AMX 6
#define NIBBLE_ISA_DOTPROD 7
#define NIBBLE_ISA_I8MM 8
#define NIBBLE_ISA_NEONBF16 9

namespace baseline {
#define NIBBLE_ISA NIBBLE_ISA_BASELINE
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace baseline

#if defined(__x86_64__)
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2)
namespace avx2 {
#define NIBBLE_ISA NIBBLE_ISA_AVX2
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace avx2
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX2VNNI)
namespace avx2vnni {
#define NIBBLE_ISA NIBBLE_ISA_AVX2VNNI
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace avx2vnni
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512)
namespace avx512 {
#define NIBBLE_ISA NIBBLE_ISA_AVX512
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace avx512
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512VNNI)
namespace avx512vnni {
#define NIBBLE_ISA NIBBLE_ISA_AVX512VNNI
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace avx512vnni
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AVX512BF16)
namespace avx512bf16 {
#define NIBBLE_ISA NIBBLE_ISA_AVX512BF16
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace avx512bf16
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_AMX)
namespace amx {
#define NIBBLE_ISA NIBBLE_ISA_AMX
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace amx
NIBBLE_TARGET_END
#endif

#if defined(__aarch64__)
NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_DOTPROD)
namespace dotprod {
#define NIBBLE_ISA NIBBLE_ISA_DOTPROD
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace dotprod
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_I8MM)
namespace i8mm {
#define NIBBLE_ISA NIBBLE_ISA_I8MM
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace i8mm
NIBBLE_TARGET_END

NIBBLE_TARGET_BEGIN(NIBBLE_TARGET_NEONBF16)
namespace neonbf16 {
#define NIBBLE_ISA NIBBLE_ISA_NEONBF16
#include "kernels/cpu/simd.inl"
#include NIBBLE_LOOPS
#undef NIBBLE_ISA
}  // namespace neonbf16
NIBBLE_TARGET_END
#endif
