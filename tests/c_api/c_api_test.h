/* What the tests of the C interface share. */
#pragma once

#include <nibble/nibble.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

extern atomic_int failures;
#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) {                                                                         \
      atomic_fetch_add(&failures, 1);                                                           \
      printf("%s:%d: %s is false; %.300s\n", __FILE__, __LINE__, #condition, nib_last_error()); \
    }                                                                                           \
  } while (0)
#define OK(call) CHECK((call) == NIB_OK)
/* The call fails with this status, and its text has `part`. */
#define FAILS(status, part, call)                                                                                   \
  do {                                                                                                              \
    const nib_status got_ = (call);                                                                                 \
    if (got_ != (status) || strstr(nib_last_error(), part) == NULL) {                                               \
      atomic_fetch_add(&failures, 1);                                                                               \
      printf("%s:%d: %s\n  gave %s: %.300s\n", __FILE__, __LINE__, #call, nib_status_name(got_), nib_last_error()); \
    }                                                                                                               \
  } while (0)
#define SIZED(type) \
  { .struct_size = sizeof(type) }

#ifdef COUNT_ALLOCATIONS
extern atomic_long allocations;
#endif

/* Deterministic values in [-1, 1]. */
void fill(float* x, size_t count, unsigned seed);
nib_weight* pack(const nib_qtensor* q, const char* act_scheme);
/* W in f32 [N,K] of a packed weight. */
void dequantize(const nib_weight* weight, float* w, int64_t n, int64_t k);
nib_status execute(const nib_plan* plan, const nib_weight* weight, const nib_operands* operands);

/* 3 tokens through 40x96, u4zg32 with act-order, a bias, a pre-scale and scales as checkpoints have them, [G,N]. */
enum { M = 3, N = 40, K = 96, GROUP = 32, G = K / GROUP };
extern uint8_t codes[N * K];
extern float scales[G * N], a[M * K];
extern int32_t g_idx[K];
nib_qtensor_desc describe(void);
nib_qtensor* make_qtensor(void);

void test_nibbles(void);
void test_trtllm_codes(void);
void test_quantize(void);
void test_conv(void);
void test_checkpoint(const char* golden, const char* scratch);
void test_packed_files(const char* golden, const char* scratch);
void test_bad_qtensors(void);
void test_bad_runs(void);
void test_expert_layers(const char* scratch);
void test_experts(void);
