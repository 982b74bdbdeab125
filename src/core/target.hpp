// Target regions: code between NIBBLE_TARGET_BEGIN("...") and NIBBLE_TARGET_END is compiled for those instruction sets, and
// nothing outside is. Per-file -m flags would leak: an inline function first emitted by an AVX-512 file is linked into the
// baseline program too. Regions do not leak as long as nothing inside is shared between namespaces.
#pragma once

#define NIBBLE_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define NIBBLE_TARGET_BEGIN(isas) NIBBLE_PRAGMA(clang attribute push(__attribute__((target(isas))), apply_to = function))
#define NIBBLE_TARGET_END NIBBLE_PRAGMA(clang attribute pop)
#else
#define NIBBLE_TARGET_BEGIN(isas) NIBBLE_PRAGMA(GCC push_options) NIBBLE_PRAGMA(GCC target(isas))
#define NIBBLE_TARGET_END NIBBLE_PRAGMA(GCC pop_options)
#endif

#define NIBBLE_TARGET_AVX2 "avx2,fma,f16c"
#define NIBBLE_TARGET_AVX2VNNI "avxvnni,avx2,fma,f16c"
#define NIBBLE_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define NIBBLE_TARGET_AVX512VNNI "avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define NIBBLE_TARGET_AVX512BF16 "avx512vbmi,avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define NIBBLE_TARGET_AMX \
  "amx-tile,amx-int8,amx-bf16,avx512vbmi,avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"

#if defined(__clang__)
#define NIBBLE_TARGET_DOTPROD "dotprod"
#define NIBBLE_TARGET_I8MM "dotprod,i8mm"
#define NIBBLE_TARGET_NEONBF16 "dotprod,i8mm,bf16"
#else
#define NIBBLE_TARGET_DOTPROD "arch=armv8.2-a+dotprod"
#define NIBBLE_TARGET_I8MM "arch=armv8.2-a+dotprod+i8mm"
#define NIBBLE_TARGET_NEONBF16 "arch=armv8.2-a+dotprod+i8mm+bf16"
#endif
