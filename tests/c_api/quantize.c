/* The C interface from C11: codes in the orders of others, and quantizing: weights and activations. */
#include <math.h>
#include <nibble/nibble.h>
#include <string.h>

#include "c_api_test.h"

void test_nibbles(void) {
  enum { N = 3, C = 4, TAPS = 6, K = C * TAPS, GROUP = 2 };
  uint8_t bytes[N * K / 2];
  float scales[N * C / GROUP], offsets[N * C / GROUP];
  for (int i = 0; i < N * K / 2; ++i) bytes[i] = (uint8_t)(i * 53 + 7);
  for (int i = 0; i < N * C / GROUP; ++i) scales[i] = 0.5f + (float)i, offsets[i] = (float)(i - 2);
  nib_qtensor* q;
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8ci2";
  desc.n = N, desc.k = K, desc.filter_height = 2, desc.filter_width = 3;
  desc.codes = nib_matrix(bytes, NIB_U8, N, K / 2);
  desc.scales = nib_matrix(scales, NIB_F32, N, C / GROUP);
  desc.nibble_order = NIB_HIGH_FIRST;
  OK(nib_qtensor_create(&desc, &q));
  nib_qtensor_desc got = SIZED(nib_qtensor_desc);
  OK(nib_qtensor_get(q, &got));
  CHECK(got.nibble_order == NIB_BYTES && strcmp(got.scheme, "u4b8ci2") == 0 && got.scales.shape[1] == C / GROUP);
  for (int i = 0; i < N * K; ++i)
    CHECK(((const uint8_t*)got.codes.data)[i] == (i % 2 == 0 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15));
  for (int i = 0; i < N * C / GROUP; ++i) CHECK(((const float*)got.scales.data)[i] == scales[i]);
  OK(nib_qtensor_destroy(q));

  desc.scheme = "u4oci2", desc.zeros = nib_matrix(offsets, NIB_F32, N, C / GROUP), desc.nibble_order = NIB_LOW_FIRST;
  OK(nib_qtensor_create(&desc, &q));
  OK(nib_qtensor_get(q, &got));
  CHECK(((const uint8_t*)got.codes.data)[1] == bytes[0] >> 4 && ((const float*)got.zeros.data)[2] == offsets[2]);
  OK(nib_qtensor_destroy(q));

  FAILS(NIB_INVALID_ARGUMENT, "nibble_order=7 is no nib_nibble_order", (desc.nibble_order = 7, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "two codes a byte, [3,13]", (desc.nibble_order = 1, desc.k = 26, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "for codes of 4 bits, u8oci2 has 8",
        (desc.k = K, desc.scheme = "u8oci2", nib_qtensor_create(&desc, &q)));
}

/* Codes as TensorRT-LLM lays them out: [K, N/2]. */
void test_trtllm_codes(void) {
  enum { N = 2, K = 6 };
  const uint8_t bytes[N * K / 2] = {0x10, 0x32, 0x54,
                                    0x98, 0xba, 0xdc}; /* of each output channel signed codes, one after the other */
  const float scales[N] = {1, 2};
  nib_qtensor* q = NULL;
  nib_qtensor_desc desc = SIZED(nib_qtensor_desc), got = SIZED(nib_qtensor_desc);
  desc.scheme = "u4b8c", desc.n = N, desc.k = K;
  desc.codes = nib_matrix(bytes, NIB_U8, K, N / 2);
  desc.scales = nib_matrix(scales, NIB_F32, N, 1);
  desc.nibble_order = NIB_TRTLLM_TRANSPOSED;
  OK(nib_qtensor_create(&desc, &q));
  OK(nib_qtensor_get(q, &got));
  for (int i = 0; i < N * K; ++i) {
    const int code = bytes[i / 2] >> (i % 2 * 4) & 15;
    CHECK(((const uint8_t*)got.codes.data)[i] == (code ^ 8));
  }
  OK(nib_qtensor_destroy(q));
  FAILS(NIB_INVALID_ARGUMENT, "W[2,6]: this layout has K in multiples of 64",
        (desc.nibble_order = NIB_TRTLLM_INTERLEAVED, nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "are u4b8 or u8b128, u4zc has u4", (desc.scheme = "u4zc", nib_qtensor_create(&desc, &q)));
  FAILS(NIB_INVALID_ARGUMENT, "has bytes of [6,2] in TensorRT-LLM's layouts",
        (desc.scheme = "u8b128c", nib_qtensor_create(&desc, &q)));
}

/* Quantizing a float matrix, W8A8 with activations that come quantized, verification. */
void test_quantize(void) {
  enum { n = 24, k = 64 };
  float w[n * k], x[M * k], from_codes[M * n], from_floats[M * n];
  fill(w, n * k, 9);
  fill(x, M * k, 10);
  const nib_view vw = nib_matrix(w, NIB_F32, n, k);

  static const char* const kSchemes[] = {"u4b8g32", "u4zg32", "u8b128c", "u3zg64", "s8c", "e4m3b16x32", "s8zt"};
  for (size_t i = 0; i < sizeof kSchemes / sizeof *kSchemes; ++i) {
    nib_quantize_desc desc = SIZED(nib_quantize_desc);
    desc.scheme = kSchemes[i];
    desc.scale = i % 2 ? NIB_F32 : NIB_NONE;
    nib_qtensor* q = NULL;
    OK(nib_quantize(NULL, &vw, &desc, &q));
    nib_qtensor_desc got = SIZED(nib_qtensor_desc);
    OK(nib_qtensor_get(q, &got));
    CHECK(strcmp(got.scheme, kSchemes[i]) == 0 && got.scales.dtype == (i % 2 ? NIB_F32 : NIB_F16));
    nib_quant_error error = SIZED(nib_quant_error);
    OK(nib_quantization_error(NULL, &vw, q, &error));
    CHECK(error.sqnr_db > 10 && error.cosine > 0.95 && error.relative_l2 < 0.3 && error.max_abs > 0);

    nib_verify_desc verify = SIZED(nib_verify_desc);
    nib_verify_report report = SIZED(nib_verify_report);
    char* failure = NULL;
    OK(nib_verify(q, &verify, &report, &failure));
    CHECK(report.passed && report.round_trip && report.repeatable && report.checked == n && report.worst_error_over_bound <= 1);
    CHECK(strcmp(failure, "") == 0 && strncmp(report.kernel, "linear_", 7) == 0);
    nib_text_free(failure);
    OK(nib_qtensor_destroy(q));
  }

  nib_quantize_desc s8 = SIZED(nib_quantize_desc);
  s8.scheme = "s8c";
  nib_qtensor* q = NULL;
  OK(nib_quantize(NULL, &vw, &s8, &q));
  nib_weight* weight = pack(q, "s8zr");
  int8_t x8[M * k];
  float x_scales[M];
  int32_t x_zeros[M], x_sums[M];
  const nib_view vx = nib_matrix(x, NIB_F32, M, k), v8 = nib_matrix(x8, NIB_S8, M, k), vs = nib_vector(x_scales, NIB_F32, M),
                 vz = nib_vector(x_zeros, NIB_S32, M), vu = nib_vector(x_sums, NIB_S32, M);
  nib_act_quantize_desc acts = SIZED(nib_act_quantize_desc);
  acts.scheme = "s8zr";
  acts.a = &vx, acts.codes = &v8, acts.scales = &vs, acts.zeros = &vz, acts.sums = &vu;
  OK(nib_quantize_activations(&acts, NULL));
  for (int m = 0; m < M; ++m) {
    int32_t sum = 0;
    for (int i = 0; i < k; ++i) {
      sum += x8[m * k + i];
      CHECK(fabsf((float)(x8[m * k + i] - x_zeros[m]) * x_scales[m] - x[m * k + i]) <= 0.51f * x_scales[m]);
    }
    CHECK(sum == x_sums[m]);
  }

  nib_linear_desc linear = SIZED(nib_linear_desc);
  linear.act_scheme = "s8zr";
  linear.m_max = M;
  nib_plan *by_floats = NULL, *by_codes = NULL;
  OK(nib_plan_linear(weight, &linear, NULL, &by_floats));
  linear.a_dtype = NIB_S8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  const nib_view df = nib_matrix(from_floats, NIB_F32, M, n), dc = nib_matrix(from_codes, NIB_F32, M, n);
  nib_operands operands = SIZED(nib_operands);
  operands.a = &vx, operands.d = &df;
  OK(execute(by_floats, weight, &operands));
  operands.a = &v8, operands.d = &dc, operands.a_scale = &vs, operands.a_zero = &vz;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  for (int m = 0; m < M; ++m)
    for (int j = 0; j < n; ++j) {
      double exact = 0;
      for (int i = 0; i < k; ++i) exact += (double)x[m * k + i] * w[j * k + i];
      CHECK(fabs(from_codes[m * n + j] - exact) < 0.15);
    }
  operands.a_scale = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "a_scale", execute(by_codes, weight, &operands));
  OK(nib_plan_destroy(by_codes));

  /* The same codes as u8. */
  uint8_t xu[M * k];
  int32_t u_zeros[M];
  for (int i = 0; i < M * k; ++i) xu[i] = (uint8_t)(x8[i] + 128);
  for (int m = 0; m < M; ++m) u_zeros[m] = x_zeros[m] + 128;
  const nib_view v_u8 = nib_matrix(xu, NIB_U8, M, k), vuz = nib_vector(u_zeros, NIB_S32, M);
  linear.a_dtype = NIB_U8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  memset(from_codes, 0, sizeof from_codes);
  operands.a = &v_u8, operands.a_scale = &vs, operands.a_zero = &vuz;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  operands.a_scale = NULL;
  OK(nib_plan_destroy(by_floats));
  OK(nib_plan_destroy(by_codes));

  /* Float offsets: a token that is far from zero. */
  float x_offsets[M], far[M * k];
  for (int i = 0; i < M * k; ++i) far[i] = x[i] + (i < k ? 40.0f : 0.0f);
  const nib_view vo = nib_vector(x_offsets, NIB_F32, M), vf = nib_matrix(far, NIB_F32, M, k);
  acts.scheme = "s8or", acts.a = &vf, acts.zeros = &vo;
  OK(nib_quantize_activations(&acts, NULL));
  for (int i = 0; i < M * k; ++i)
    CHECK(fabsf((float)x8[i] * x_scales[i / k] + x_offsets[i / k] - far[i]) <= 0.51f * x_scales[i / k] + 1e-5f);
  linear.act_scheme = "s8or", linear.a_dtype = NIB_F32;
  OK(nib_plan_linear(weight, &linear, NULL, &by_floats));
  linear.a_dtype = NIB_S8;
  OK(nib_plan_linear(weight, &linear, NULL, &by_codes));
  operands.a = &vf, operands.d = &df, operands.a_scale = NULL;
  OK(execute(by_floats, weight, &operands));
  operands.a = &v8, operands.d = &dc, operands.a_scale = &vs;
  FAILS(NIB_INVALID_ARGUMENT, "a_zero must be f32", execute(by_codes, weight, &operands));
  operands.a_zero = &vo;
  OK(execute(by_codes, weight, &operands));
  CHECK(memcmp(from_floats, from_codes, sizeof from_codes) == 0);
  OK(nib_plan_destroy(by_floats));
  OK(nib_plan_destroy(by_codes));

  /* A known scale; FP8 in groups. */
  const float known = 1.0f / 64;
  nib_act_quantize_desc fixed = SIZED(nib_act_quantize_desc);
  fixed.scheme = "s8t";
  fixed.a = &vx, fixed.codes = &v8, fixed.static_scale = &known;
  OK(nib_quantize_activations(&fixed, NULL));
  for (int i = 0; i < M * k; ++i) CHECK(fabsf((float)x8[i] * known - x[i]) <= 0.5f * known);
  fixed.static_scale = NULL;
  FAILS(NIB_INVALID_ARGUMENT, "known beforehand", nib_quantize_activations(&fixed, NULL));
  float group_scales[M * 2];
  const nib_view vg = nib_matrix(group_scales, NIB_F32, M, 2), ve = nib_matrix(x8, NIB_E4M3, M, k);
  nib_act_quantize_desc grouped = SIZED(nib_act_quantize_desc);
  grouped.scheme = "e4m3g32";
  grouped.a = &vx, grouped.codes = &ve, grouped.scales = &vg;
  OK(nib_quantize_activations(&grouped, NULL));
  for (int i = 0; i < M * 2; ++i) CHECK(group_scales[i] > 0 && group_scales[i] <= 1 / 448.0f);

  FAILS(NIB_INVALID_ARGUMENT, "no scheme of activations", (acts.scheme = "s8r_s8c", nib_quantize_activations(&acts, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "scheme is NULL", (acts.scheme = NULL, nib_quantize_activations(&acts, NULL)));
  FAILS(NIB_INVALID_ARGUMENT, "pass NULL for the stream", nib_quantize_activations(&grouped, &acts));
  OK(nib_weight_destroy(weight));
  OK(nib_qtensor_destroy(q));
}
